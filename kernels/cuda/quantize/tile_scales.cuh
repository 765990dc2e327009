// Scales of a tile's square blocks, and of short blocks, which a warp determines.
#pragma once

#include <type_traits>

#include "scales_by_tile.cuh"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

struct TensorScales {
  TensorScale rows, columns;
};

// What all blocks have in common, by direction; `stores`: this is the first tile, which stores it. Every thread of the block
// must call it, while its piece is being loaded.
template <class E, int Block>
__device__ __forceinline__ TensorScales tensor_scales(const QuantizeArguments& a, bool stores) {
  TensorScales scales{};
  if constexpr (Block == 0) {
    // By every thread, rather than by one for which all would wait.
    scales.rows = tensor_scale<E, Block>(a, a.amax);
    if (stores && threadIdx.x == 0) {
      const float stored = stored_tensor_scale(a, scales.rows.decode);
      if (a.row.codes != nullptr) *static_cast<float*>(a.row.scales) = stored;
      if (a.column.codes != nullptr) *static_cast<float*>(a.column.scales) = stored;
    }
  } else if constexpr (Block == 16) {
    __shared__ TensorScale tensor[2];
    // Two warps, so that the divisions of both directions run at once.
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
      const bool transposed = threadIdx.x != 0;
      const TensorScale t = tensor_scale<E, Block>(a, transposed ? a.amax_t : a.amax);
      tensor[transposed] = t;
      float* out = transposed ? a.tensor_scale_t : a.tensor_scale;
      if (stores && out != nullptr) *out = stored_tensor_scale(a, t.decode);
    }
    __syncthreads();
    scales = {tensor[0], tensor[1]};
  }
  return scales;
}

// The amax of a square block within a warp, and whether it contains a NaN that E has no code for.
template <int Block, class E, class T, Rounding R>
__device__ __forceinline__ int32_t amax_of_square(const Piece<E, T, R>& piece, bool& nan) {
  constexpr int kLanesDown = Block / kDepth, kLanesAcross = Block / 8;
  const auto amax = [&](auto poison) {
    return lanes_max<kLanesDown, 8>(lanes_max<kLanesAcross>(piece.template amax<decltype(poison)::value>()));
  };
  return amax_within_warp<E>(amax, nan);
}

// The scale of the square block that is the tile, combined in shared memory.
template <class E>
struct TileScale {
  static constexpr int kParts = kTileThreads / 32;
  int32_t parts[kParts];

  // The same in all threads, every one of which must call it.
  template <class T, Rounding R>
  __device__ __forceinline__ BlockScale<float> decide(const Piece<E, T, R>& piece) {
    static_assert(kTileRows == 128 && kTileColumns == 128, "a block is a tile");
    const int32_t amax = lanes_max<32>(piece.template amax<false>());
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = amax;
    __syncthreads();
    int32_t most = parts[0];
#pragma unroll
    for (int i = 1; i < kParts; ++i) most = max(most, parts[i]);
    return block_scale<E, 128>(most, piece.a, {});
  }
};

// Stores the scale of a square block for the requested directions; done by the thread that has its first element.
template <int Block, class E, class T, Rounding R>
__device__ __forceinline__ void store_square_scale(const Piece<E, T, R>& piece, int32_t stored) {
  const QuantizeArguments& a = piece.a;
  if (piece.place.row % Block != 0 || piece.place.column % Block != 0) return;
  const int64_t grid_rows = ((kOfGroups<R> ? filled_rows(a) : a.window.row_phase + a.x.rows) + Block - 1) / Block;
  const int64_t grid_columns = (a.window.column_phase + a.x.columns + Block - 1) / Block;
  // A tile begins at a block boundary, so phase + origin is a multiple of the block.
  const int64_t row = (piece.tile.row + a.window.row_phase + piece.place.row) / Block;
  const int64_t column = (piece.tile.column + a.window.column_phase + piece.place.column) / Block;
  if (row >= grid_rows || column >= grid_columns) return;
  if constexpr (kOfGroups<R>) {
    const int64_t at = a.groups.own.first_column / Block + row;
    if (a.row.codes != nullptr) store_scale<Block>(a.row.scales, at * grid_columns + column, stored);
    if (a.column.codes != nullptr) store_scale<Block>(a.column.scales, column * (a.groups.columns / Block) + at, stored);
    return;
  }
  const int64_t batch = piece.tile.batch;
  if (a.row.codes != nullptr) store_scale<Block>(a.row.scales, (batch * grid_rows + row) * grid_columns + column, stored);
  if (a.column.codes != nullptr) store_scale<Block>(a.column.scales, (batch * grid_columns + column) * grid_rows + row, stored);
}

// Scales of 1-D blocks of 16 and 32, determined within a warp: the lanes that share a line's block divide their pieces' lines.
//
// For `Lines` lines, whose blocks are held by `Lanes` lanes, `Step` apart.
template <class E, int Block, class T, int Lines, int Lanes, int Step>
struct LineScales {
  using Share = LaneShare<Lines / kLinesPerWord<T>, Lanes, Step>;
  static constexpr int kWordCount = Lines / kLinesPerWord<T>;
  static constexpr int kMine = Share::kMine * kLinesPerWord<T>;  // lines of this lane
  static_assert(Share::kSame == 1 && kMine % 2 == 0, "each lane has lines of its own, two by two");
  // MX multipliers are powers of two, determined by their upper halves: two per word. Others take a word each.
  static constexpr int kPerWord = Block == 32 ? 2 : 1;
  static constexpr Range kBounds = kRange<Block>;

  bool care;  // some line of the warp contains a NaN or an Inf that E has no code for, or exceeds the range

  // `amaxes` fills words with this lane's parts; `store` takes a line and its stored scale. Every lane of the warp must call
  // it.
  template <class Amaxes, class Store>
  __device__ __forceinline__ void decide(Amaxes amaxes, const QuantizeArguments& a, const TensorScale& tensor, Store store) {
    uint32_t most[kWordCount], poisoned[Share::kMine];
    care = false;
    if constexpr (E::kHasNan) {
      amaxes(std::false_type{}, most);
      Share::template reduce<T, false>(most);
    } else {
      amaxes(std::true_type{}, most);
      Share::template reduce<T, true>(most);
#pragma unroll
      for (int i = 0; i < kMine; ++i) care = care || magnitude<true>(most, i) >= kInfinity;
#pragma unroll
      for (int i = 0; i < Share::kMine; ++i) poisoned[i] = most[i];
      care = __any_sync(0xFFFFFFFFu, care);
      if (care) {
        amaxes(std::false_type{}, most);
        Share::template reduce<T, false>(most);
      }
    }
    const int first = Share::first() * kLinesPerWord<T>;
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
      uint32_t multiplier[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t amax = magnitude<false>(most, i + h);
        const BlockScale<float> scale = block_scale<E, Block>(amax, a, tensor);
        exceeds = exceeds || exceeds_range<Block>(amax, scale.multiplier);
        const bool marked = !E::kHasNan && magnitude<true>(poisoned, i + h) > kInfinity;
        store(first + i + h, marked ? kNanMark<E, Block> : scale.stored);
        multiplier[h] = __float_as_uint(scale.multiplier);
      }
      if constexpr (kPerWord == 2) {
        mine_[i / 2] = __byte_perm(multiplier[0], multiplier[1], 0x7632);
      } else {
        mine_[i] = multiplier[0], mine_[i + 1] = multiplier[1];
      }
    }
    if constexpr (kBounds == Range::kBounded) care = __any_sync(0xFFFFFFFFu, care || exceeds);
  }

  // Words with the multipliers of all lines. Every lane of the warp must call it.
  __device__ __forceinline__ void gather(uint32_t (&words)[Lines / kPerWord]) const {
    constexpr int kOfLane = kMine / kPerWord;
#pragma unroll
    for (int i = 0; i < Lines / kPerWord; ++i) {
      words[i] = mine_[i % kOfLane];
      if constexpr (Lanes > 1) {
        const int from = threadIdx.x % 32 - Share::lane() * Step + i / kOfLane * Step;
        words[i] = __shfl_sync(0xFFFFFFFFu, words[i], from);
      }
    }
  }

  // A line's multiplier, from gathered words.
  __device__ __forceinline__ static float multiplier(const uint32_t (&words)[Lines / kPerWord], int line) {
    if constexpr (kPerWord == 1) return __uint_as_float(words[line]);
    const uint32_t word = words[line / kPerWord];
    return __uint_as_float(line % 2 ? word & 0xFFFF0000u : word << 16);
  }

 private:
  template <bool Poison, int Count>
  __device__ __forceinline__ static int32_t magnitude(const uint32_t (&words)[Count], int line) {
    return magnitude_bits<T, Poison>(words[line / kLinesPerWord<T>], line % kLinesPerWord<T>);
  }

  uint32_t mine_[kMine / kPerWord];
};

// Stored scales of those blocks, waiting to be stored.
template <class E, int Block>
struct StoredScales {
  static constexpr int kAcross = kTileColumns / Block, kDown = kTileRows / Block;
  __align__(16) uint8_t rows[kTileRows * kAcross];
  __align__(16) uint8_t columns[kTileColumns * kDown];

  __device__ __forceinline__ void put_row(int row, int column, int32_t stored) {
    rows[row_slot(row) * kAcross + column / Block] = stored;
  }
  __device__ __forceinline__ void put_column(int column, int row, int32_t stored) {
    columns[column_slot(column) * kDown + row / Block] = stored;
  }

  // Stores them to memory; every thread of the block must call it.
  template <class P>
  __device__ __forceinline__ void copy_out(const P& piece) const {
    const QuantizeArguments& a = piece.a;
    const int64_t row = piece.tile.row + a.window.row_phase, column = piece.tile.column + a.window.column_phase;
    const auto grid = [](int phase, int64_t elements) { return (phase + elements + Block - 1) / Block; };
    if constexpr (P::kInGroups) {
      const int64_t blocks = grid(0, a.x.columns), pitch = a.groups.columns / Block;
      if (a.row.codes != nullptr) {
        uint8_t* out = static_cast<uint8_t*>(a.row.scales) + (a.groups.own.first_row + piece.tile.row) * blocks + column / Block;
        copy_units<kAcross>(rows, row_slot, out, a.x.rows - piece.tile.row, blocks - column / Block, blocks);
      }
      if (a.column.codes != nullptr) {
        uint8_t* out = static_cast<uint8_t*>(a.column.scales) + column * pitch + (a.groups.own.first_column + row) / Block;
        copy_units<kDown>(columns, column_slot, out, a.x.columns - column, (filled_rows(a) - row) / Block, pitch);
      }
      return;
    }
    if (a.row.codes != nullptr) {
      copy_lines<kAcross>(piece, rows, row_slot, static_cast<uint8_t*>(a.row.scales), piece.tile.row, a.x.rows, column / Block,
                          grid(a.window.column_phase, a.x.columns));
    }
    copy_lines<kDown>(piece, columns, column_slot, static_cast<uint8_t*>(a.column.scales), piece.tile.column, a.x.columns,
                      row / Block, grid(a.window.row_phase, a.x.rows));
  }

 private:
  // Slot of a line's scales: the first lines of all threads, then their second ones, which keeps threads in different banks.
  template <int LinesOfThread, int Lines>
  __device__ __forceinline__ static int slot(int line) {
    return line % LinesOfThread * (Lines / LinesOfThread) + line / LinesOfThread;
  }
  __device__ __forceinline__ static int row_slot(int row) { return slot<kDepth, kTileRows>(row); }
  __device__ __forceinline__ static int column_slot(int column) { return slot<8, kTileColumns>(column); }

  // Stores a tile's scales, `Width` per line, to the `lines` lines that remain from `out`, `pitch` apart, with `blocks`
  // remaining. The number of scales is a multiple of those of 128 elements, which are in one group.
  template <int Width, int Bytes, class Slot>
  __device__ __forceinline__ static void copy_units(const uint8_t (&scales)[Bytes], Slot slot_of, uint8_t* out, int64_t lines,
                                                    int64_t blocks, int64_t pitch) {
    constexpr int kUnit = kGroupUnit / Block, kUnits = Width / kUnit;
    using Unit = std::conditional_t<kUnit == 4, uint32_t, uint2>;
    static_assert(sizeof(Unit) == kUnit && Width % kUnit == 0, "a vector has the scales of 128 elements");
    const bool vectors = pitch % kUnit == 0 && reinterpret_cast<uintptr_t>(out) % kUnit == 0;
    for (int i = threadIdx.x; i < Bytes / kUnit; i += kTileThreads) {
      const int line = i / kUnits, first = i % kUnits * kUnit;
      if (line >= lines) continue;
      const uint8_t* from = scales + slot_of(line) * Width + first;
      uint8_t* to = out + line * pitch + first;
      if (vectors && first + kUnit <= blocks) {
        *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
      } else {
        for (int j = 0; j < kUnit && first + j < blocks; ++j) to[j] = from[j];
      }
    }
  }

  // Stores a tile's scales, `Width` per line, to their place among `lines` lines of `grid`.
  template <int Width, class P, int Bytes, class Slot>
  __device__ __forceinline__ static void copy_lines(const P& piece, const uint8_t (&scales)[Bytes], Slot slot_of, uint8_t* out,
                                                    int64_t first_line, int64_t lines, int64_t first, int64_t grid) {
    static_assert(Width == 4 || Width == 8 || Width == 16, "a vector a line");
    using Vector = std::conditional_t<Width == 4, uint32_t, std::conditional_t<Width == 8, uint2, uint4>>;
    const int line = threadIdx.x, slot = slot_of(line);
    if constexpr (P::kWhole && Width == 4) {
      if (piece.a.scales_by_tile) {
        if (line >= Bytes / Width) return;
        store_by_tile(reinterpret_cast<uint32_t*>(out), index_by_tile(piece.tile.batch * lines + first_line + line, first / 4, grid / 4),
                      reinterpret_cast<const uint32_t*>(scales)[slot]);
        return;
      }
    }
    // `first` is a multiple of Width, since a tile begins where its first blocks do.
    if (grid % Width == 0 && reinterpret_cast<uintptr_t>(out) % Width == 0) {
      if (line >= Bytes / Width || first_line + line < 0 || first_line + line >= lines || first >= grid) return;
      *reinterpret_cast<Vector*>(out + (piece.tile.batch * lines + first_line + line) * grid + first) =
          reinterpret_cast<const Vector*>(scales)[slot];
      return;
    }
    for (int i = threadIdx.x; i < Bytes; i += kTileThreads) {
      const int64_t line = first_line + i / Width, at = first + i % Width;
      if (line < 0 || line >= lines || at >= grid) continue;
      out[(piece.tile.batch * lines + line) * grid + at] = scales[slot_of(i / Width) * Width + i % Width];
    }
  }
};

}  // namespace cuda
}  // namespace blockfp
