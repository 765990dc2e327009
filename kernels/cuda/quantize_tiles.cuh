// Quantizes along the rows (transposed codes), along both axes in one read, and in square blocks.
//
// A block of threads has a tile, a thread a piece of it (piece.cuh). Scales come first, within a warp (line_scales.cuh) or over warps
// (wide_scales.cuh), then the rows' codes, then the columns' (piece_codes.cuh), which leave through shared memory (staging.cuh).
#pragma once

#include <type_traits>

#include "line_scales.cuh"
#include "piece_codes.cuh"
#include "rotate.cuh"
#include "scales_by_tile.cuh"
#include "wide_scales.cuh"

namespace blockfp {
namespace cuda {

struct NoScales {};

// Stored scales of 1-D blocks that a warp decides, on their way out.
template <class E, int Block>
struct StoredScales {
  static constexpr int kAcross = kTileColumns / Block, kDown = kTileRows<E> / Block;
  __align__(16) uint8_t rows[kTileRows<E> * kAcross];
  __align__(16) uint8_t columns[kTileColumns * kDown];

  // Where a line's scales are kept: the first lines of all threads, then their second ones, which keeps threads out of one another's banks.
  template <int LinesOfThread, int Lines>
  __device__ __forceinline__ static int slot(int line) {
    return line % LinesOfThread * (Lines / LinesOfThread) + line / LinesOfThread;
  }
  __device__ __forceinline__ static int row_slot(int row) { return slot<kDepth<E>, kTileRows<E>>(row); }
  __device__ __forceinline__ static int column_slot(int column) { return slot<8, kTileColumns>(column); }
};

template <class E, int Block, class T, bool Square, Rounding R>
struct TileKernel {
  static constexpr bool kWithinWarp = Block == 16 || Block == 32;
  static constexpr int kRows = kDepth<E>;
  using P = Piece<E, T, R>;
  using Stored = StoredScales<E, kWithinWarp ? Block : 32>;
  using Wide = std::conditional_t<Square, WideSquareScale<E, T, R>, WideScales<E, T, R>>;

  struct Shared {
    Staging<E> staging;
    std::conditional_t<Block == 128, Wide, std::conditional_t<kWithinWarp && !Square, Stored, NoScales>> scales;
  };

  P& piece;
  Shared& shared;
  TensorScale tensor, tensor_t;  // of the rows, of the columns

  __device__ __forceinline__ void run() {
    if constexpr (Square) {
      square();
    } else if constexpr (Block == 128) {
      wide();
    } else {
      lines();
    }
    if (piece.a.column.codes == nullptr) return;
    __syncthreads();
    copy_columns();
  }

 private:
  __device__ __forceinline__ auto staged() {
    return [this](int j, const uint2(&codes)[kRows / 8]) { shared.staging.put(piece.place.column + j, piece.place.row / kRows, codes); };
  }

  // One scale for both directions.
  __device__ __forceinline__ void square() {
    const QuantizeArguments& a = piece.a;
    BlockScale<float> scale{0, tensor.multiplier};
    bool nan = false;
    if constexpr (Block == 128) scale = shared.scales.decide(piece);
    if constexpr (kWithinWarp) scale = small_square(nan);
    if constexpr (Block != 0) store_square(nan ? kNanMark<E, Block> : scale.stored);
    const PieceCodes<E, T, R> codes(piece, nan, tensor);
    RowOutput<E, T, R> out(piece);
    const auto multiplier = [&](int) { return scale.multiplier; };
    // Codes are transposed where that gives those of the other direction; 6-bit ones are made again.
    if (R == Rounding::kNearest || (R == Rounding::kGeneral && a.row.key == nullptr && a.column.key == nullptr)) {
      if constexpr (R != Rounding::kStochastic && E::kBits != 6) {
        uint2 kept[kRows];
        codes.rows(multiplier, [&](int r, uint2 c) { kept[r] = c, out.put(r, c); });
        if (a.column.codes == nullptr) return;
        uint2 columns[kRows / 8][8];
#pragma unroll
        for (int h = 0; h < kRows / 8; ++h) transpose_eight<E::kBits>(kept + 8 * h, columns[h]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint2 column[kRows / 8];
#pragma unroll
          for (int h = 0; h < kRows / 8; ++h) column[h] = columns[h][j];
          staged()(j, column);
        }
        return;
      }
    }
    if constexpr (R != Rounding::kNearest || E::kBits == 6) {
      if (a.row.codes != nullptr) codes.rows(multiplier, [&](int r, uint2 c) { out.put(r, c); });
      if (a.column.codes != nullptr) codes.columns(multiplier, staged());
    }
  }

  // Of blocks that lie in a warp.
  __device__ __forceinline__ BlockScale<float> small_square(bool& nan) const {
    constexpr int kLanesDown = Block / kRows, kLanesAcross = Block / 8;
    const auto amax = [&](auto poison) {
      return lanes_max<kLanesDown, 8>(lanes_max<kLanesAcross>(piece.template amax<decltype(poison)::value>()));
    };
    int32_t most;
    if constexpr (E::kHasNan) {
      most = amax(std::false_type{});
    } else {
      most = amax(std::true_type{});
      nan = most > kInfinity;
      if (__any_sync(0xFFFFFFFFu, nan)) most = amax(std::false_type{});
    }
    return block_scale<E, Block>(most, piece.a, tensor);
  }

  __device__ __forceinline__ void store_square(int32_t stored) const {
    const QuantizeArguments& a = piece.a;
    if (piece.place.row % Block != 0 || piece.place.column % Block != 0) return;
    const int64_t grid_rows = (a.window.row_phase + a.x.rows + Block - 1) / Block;
    const int64_t grid_columns = (a.window.column_phase + a.x.columns + Block - 1) / Block;
    // A tile begins on a block boundary, so phase + origin is a multiple of the block.
    const int64_t row = (piece.tile.row + a.window.row_phase + piece.place.row) / Block;
    const int64_t column = (piece.tile.column + a.window.column_phase + piece.place.column) / Block;
    if (row >= grid_rows || column >= grid_columns) return;
    const int64_t batch = piece.tile.batch;
    if (a.row.codes != nullptr) store_scale<Block>(a.row.scales, (batch * grid_rows + row) * grid_columns + column, stored);
    if (a.column.codes != nullptr) store_scale<Block>(a.column.scales, (batch * grid_columns + column) * grid_rows + row, stored);
  }

  __device__ __forceinline__ void wide() {
    shared.scales.decide(piece);
    const PieceCodes<E, T, R> codes(piece, false, tensor);
    float multipliers[8];
    if (piece.a.row.codes != nullptr) {
      RowOutput<E, T, R> out(piece);
      Wide::read(shared.scales.row_multipliers, piece.place.row, multipliers);
      codes.rows([&](int r) { return multipliers[r]; }, [&](int r, uint2 c) { out.put(r, c); });
    }
    Wide::read(shared.scales.column_multipliers, piece.place.column, multipliers);
    codes.columns([&](int j) { return multipliers[j]; }, staged());
  }

  __device__ __forceinline__ void lines() {
    const QuantizeArguments& a = piece.a;
    if (a.row.codes != nullptr) {
      LineScales<E, Block, T, kRows, Block / 8, 1> scales;
      scales.decide([&](auto poison, auto& words) { piece.template row_amaxes<decltype(poison)::value>(words); }, a, tensor,
                    [&](int r, int32_t stored) {
                      shared.scales.rows[Stored::row_slot(piece.place.row + r) * Stored::kAcross + piece.place.column / Block] = stored;
                    });
      RowOutput<E, T, R> out(piece);
      const auto put = [&](int r, uint2 c) { out.put(r, c); };
      uint32_t words[kRows / scales.kPerWord];
      scales.gather(words);
      if constexpr (kMultipliesPairs<E, T, R>) {
        rows_by_pairs<E, R>(piece, words, put);
      } else {
        PieceCodes<E, T, R>(piece, scales.nan, tensor).rows([&](int r) { return scales.multiplier(words, r); }, put);
      }
    }
    if constexpr (Block == 16) {
      const int64_t row = piece.tile.row + piece.place.row;
      if (a.rotate_column && row + 16 <= a.x.rows && (P::kWhole || row >= 0)) rotate_columns<T>(piece.x);
    }
    LineScales<E, Block, T, 8, Block / kRows, 8> scales;
    scales.decide([&](auto poison, auto& words) { piece.template column_amaxes<decltype(poison)::value>(words); }, a, tensor_t,
                  [&](int j, int32_t stored) {
                    shared.scales.columns[Stored::column_slot(piece.place.column + j) * Stored::kDown + piece.place.row / Block] = stored;
                  });
    uint32_t words[8 / scales.kPerWord];
    scales.gather(words);
    if constexpr (kMultipliesPairs<E, T, R>) {
      columns_by_pairs<E, R>(piece, words, staged());
    } else {
      PieceCodes<E, T, R>(piece, scales.nan, tensor_t).columns([&](int j) { return scales.multiplier(words, j); }, staged());
    }
  }

  // What lies in shared memory, to memory.
  __device__ __forceinline__ void copy_columns() const {
    const QuantizeArguments& a = piece.a;
    const TileOrigin& tile = piece.tile;
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.rows);
    if constexpr (P::kWhole) {
      uint8_t* out = a.column.codes + (tile.batch * a.x.columns + tile.column) * pitch + tile.row / 8 * E::kBits;
      shared.staging.copy_vectors(out, pitch, a.x.rows - tile.row, a.x.columns - tile.column);
    } else {
      shared.staging.copy_bytes(a.column.codes + tile.batch * a.x.columns * pitch, pitch, tile.row / 8 * E::kBits, tile.column,
                                a.x.columns);
    }
    if constexpr (kWithinWarp && !Square) {
      const int64_t row = tile.row + a.window.row_phase, column = tile.column + a.window.column_phase;
      const auto grid = [](int phase, int64_t elements) { return (phase + elements + Block - 1) / Block; };
      if (a.row.codes != nullptr) {
        copy_scales<Stored::kAcross>(shared.scales.rows, Stored::row_slot, static_cast<uint8_t*>(a.row.scales), tile.row, a.x.rows,
                                     column / Block, grid(a.window.column_phase, a.x.columns));
      }
      copy_scales<Stored::kDown>(shared.scales.columns, Stored::column_slot, static_cast<uint8_t*>(a.column.scales), tile.column,
                                 a.x.columns, row / Block, grid(a.window.row_phase, a.x.rows));
    }
  }

  // A tile's scales, `Width` a line, to their place among `lines` lines of `grid`.
  template <int Width, int Bytes, class Slot>
  __device__ __forceinline__ void copy_scales(const uint8_t (&scales)[Bytes], Slot slot_of, uint8_t* out, int64_t first_line,
                                              int64_t lines, int64_t first, int64_t grid) const {
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
    if (P::kWhole && grid % Width == 0 && reinterpret_cast<uintptr_t>(out) % Width == 0) {
      if (line >= Bytes / Width || first_line + line >= lines || first >= grid) return;
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

template <class E, int Block, class T, bool Square, Rounding R>
__global__ void __launch_bounds__(kTileThreads, sizeof(typename T::Raw) == 2 ? (kDepth<E> == 8 ? 3 : 2) : (kDepth<E> == 8 ? 2 : 1))
    quantize_tiles(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  using Kernel = TileKernel<E, Block, T, Square, R>;
  // What puts the scales in order may be made ready.
  asm volatile("griddepcontrol.launch_dependents;");
  __shared__ __align__(16) typename Kernel::Shared shared;
  // Down `strip` tiles, then across: tiles that are written together are neighbours in the codes of both directions.
  const uint32_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x - batch * matrix;
  const uint32_t top = in_matrix / (across * strip) * strip, in_strip = in_matrix - top * across, tall = min(down - top, strip);
  const TileOrigin tile{batch, static_cast<int64_t>(top + in_strip % tall) * kTileRows<E> - a.window.row_phase,
                        static_cast<int64_t>(in_strip / tall) * kTileColumns - a.window.column_phase};
  Piece<E, T, R> piece(a, tile);
  piece.load(vectors);
  Kernel kernel{piece, shared, {}, {}};
  if constexpr (Block == 0) {
    // By every thread while its piece is on the way, rather than by one for which all would wait.
    kernel.tensor = tensor_scale<E, Block>(a, a.amax);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (a.row.codes != nullptr) *static_cast<float*>(a.row.scales) = kernel.tensor.decode;
      if (a.column.codes != nullptr) *static_cast<float*>(a.column.scales) = kernel.tensor.decode;
    }
  } else if constexpr (Block == 16) {
    __shared__ TensorScale tensor[2];
    // Two warps, so that the divisions of both directions go on at once.
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
      const bool transposed = threadIdx.x != 0;
      const TensorScale t = tensor_scale<E, Block>(a, transposed ? a.amax_t : a.amax);
      tensor[transposed] = t;
      if (blockIdx.x == 0) *(transposed ? a.tensor_scale_t : a.tensor_scale) = t.decode;
    }
    __syncthreads();
    kernel.tensor = tensor[0];
    kernel.tensor_t = tensor[1];
  }
  if constexpr (Block == 0) {
    if (a.recorded != nullptr) {
      const int32_t most = lanes_max<32>(piece.template amax<false>());
      if (threadIdx.x % 32 == 0 && most > 0) atomicMax(a.recorded, most);
    }
  }
  kernel.run();
}

}  // namespace cuda
}  // namespace blockfp
