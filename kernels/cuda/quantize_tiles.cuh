// Quantizes along the rows (transposed codes), along both axes in one read, and in square blocks.
#pragma once

#include <type_traits>

#include "tile.cuh"

namespace blockfp {
namespace cuda {

enum class Along { kRow, kColumn, kSquare };

// Blocks of one direction in a tile, and the lanes and warps that share one.
template <class E, int Block, Along A>
struct TileBlocks {
  static constexpr int kTall = A == Along::kRow ? 1 : Block, kWide = A == Along::kColumn ? 1 : Block;
  static constexpr int kDown = kTileRows<E> / kTall, kAcross = kTileColumns / kWide;
  static constexpr int kLaneRows = kTall == 1 ? 1 : (kTall < 4 * kDepth<E> ? kTall : 4 * kDepth<E>) / kDepth<E>;
  static constexpr int kLaneColumns = kWide == 1 ? 1 : (kWide < 64 ? kWide : 64) / 8;
  // Partial amaxes: a warp covers 4 * kDepth rows and 64 columns, and its part of a taller or wider block is one.
  static constexpr int kPartTall = kTall < 4 * kDepth<E> ? kTall : 4 * kDepth<E>, kPartWide = kWide < 64 ? kWide : 64;
  static constexpr int kPartsDown = kTall / kPartTall, kPartsAcross = kWide / kPartWide;
  static constexpr int kPartColumns = kTileColumns / kPartWide;
  static constexpr int kParts = kTileRows<E> / kPartTall * kPartColumns;
};

template <class E, int Block, bool Square>
constexpr int most_parts() {
  if constexpr (Block == 0) {
    return 1;
  } else if constexpr (Square) {
    return TileBlocks<E, Block, Along::kSquare>::kParts;
  } else {
    constexpr int row = TileBlocks<E, Block, Along::kRow>::kParts, column = TileBlocks<E, Block, Along::kColumn>::kParts;
    return row > column ? row : column;
  }
}

template <class E, int Block, class T, bool Square, Rounding R>
struct TileKernel {
  static constexpr bool kAligned = R != Rounding::kGeneral;
  static constexpr int kRows = kDepth<E>;
  static constexpr int kMostParts = most_parts<E, Block, Square>();

  // A thread's eight lines in four words, two by two; the lanes that share a block then part them among themselves.
  static constexpr bool kPairs = kRows == 8 && sizeof(typename T::Raw) == 2;
  // Each of four lanes makes the scales of two lines and hands them to the others.
  static constexpr bool kPacked = kPairs && Block == 32 && !Square;

  // Blocks of 128 reach over warps and meet in shared memory. Smaller ones lie within a warp and may be scaled there, where that does
  // not mean making every scale in every lane.
  static constexpr bool kWithinWarp = (Block == 16 || Block == 32) && (Square || !E::kHasNan || kPacked);
  static constexpr int kRowScales = kWithinWarp && !Square ? kTileRows<E> * (kTileColumns / (kWithinWarp ? Block : 1)) : 1;

  struct Shared {
    Staging<E> staging;
    int32_t amax[Square ? 1 : 2][kWithinWarp ? 1 : kMostParts];  // of each direction; then the multipliers
    __align__(4) uint8_t row_scales[kRowScales];
    __align__(4) uint8_t column_scales[kRowScales];
  };

  const QuantizeArguments& a;
  Shared& shared;
  TilePlace place;
  TileOrigin tile;
  TensorScale tensor, tensor_t;
  Eight<T> x[kRows];

  __device__ __forceinline__ void load(bool vectors) {
    using Raw = typename T::Raw;
    const int64_t column = tile.column + place.column;
    const int first = !kAligned && column < 0 ? 8 : 0;
    const int64_t left = a.x.columns - column;
    const int last = kAligned ? (left > 0 ? 8 : 0) : static_cast<int>(max(min(left, int64_t{8}), int64_t{0}));
    const Raw* data = static_cast<const Raw*>(a.x.data) + tile.batch * a.x.batch_stride + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile.row + place.row + r;
      const bool inside = (kAligned || row >= 0) && row < a.x.rows;
      const Raw* at = data + row * a.x.row_stride;
      if (inside && first == 0 && last == 8 && (kAligned || vectors)) {
        x[r] = load_vector<T>(at);
      } else if (!kAligned && inside) {
        x[r] = load_some<T>(at, first, last);
      } else {
        x[r] = zeros<T>();
      }
    }
  }

  // Largest magnitudes of the rows of a thread's piece: two in a word.
  template <bool Poison>
  __device__ __forceinline__ void over_columns(uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t row[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t(&word)[kWords<T>] = x[2 * i + h].word;
        row[h] = larger_magnitude<T, Poison>(larger_magnitude<T, Poison>(word[0], word[1]),
                                             larger_magnitude<T, Poison>(word[2], word[3]));
      }
      pairs[i] = larger_magnitude<T, Poison>(__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632));
    }
  }

  // Maxima over `Lanes` lanes, `Step` apart, of four words: each lane takes one of them, number pair_of_lane.
  template <int Lanes, int Step, bool Poison>
  __device__ __forceinline__ static uint32_t part_lanes_max(const uint32_t (&word)[4]) {
    const int lane = threadIdx.x / Step % Lanes;
    const bool upper = lane & (Lanes / 2), odd = lane & (Lanes / 4);
    const auto meet = [](uint32_t keep, uint32_t send, int distance) {
      return larger_magnitude<T, Poison>(keep, __shfl_xor_sync(0xFFFFFFFFu, send, distance));
    };
    const uint32_t first = meet(upper ? word[2] : word[0], upper ? word[0] : word[2], Lanes / 2 * Step);
    const uint32_t second = meet(upper ? word[3] : word[1], upper ? word[1] : word[3], Lanes / 2 * Step);
    uint32_t most = meet(odd ? second : first, odd ? first : second, Lanes / 4 * Step);
#pragma unroll
    for (int distance = Lanes / 8 * Step; distance >= Step; distance /= 2) most = meet(most, most, distance);
    return most;
  }

  template <int Lanes, int Step>
  __device__ __forceinline__ static int pair_of_lane() {
    return threadIdx.x / Step % Lanes / (Lanes / 4);
  }

  // Of blocks of four lanes, `Step` apart: what the lines are multiplied with, as biased exponents, a byte each. `store` takes a line
  // and its scale.
  template <int Step, class Pairs, class Store>
  __device__ __forceinline__ uint2 exponents_of_lines(Pairs pairs_of, Store store) const {
    uint32_t pairs[4], most;
    bool any = false;
    if constexpr (E::kHasNan) {
      pairs_of(std::false_type{}, pairs);
      most = part_lanes_max<4, Step, false>(pairs);
    } else {
      pairs_of(std::true_type{}, pairs);
      most = part_lanes_max<4, Step, true>(pairs);
      any = magnitude_bits<T, true>(most, 0) > kInfinity || magnitude_bits<T, true>(most, 1) > kInfinity;
    }
    uint32_t poisoned = most;
    if constexpr (!E::kHasNan) {
      if (__any_sync(0xFFFFFFFFu, any)) {
        pairs_of(std::false_type{}, pairs);
        most = part_lanes_max<4, Step, false>(pairs);
      }
    }
    const int lane = pair_of_lane<4, Step>();
    uint32_t mine = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const BlockScale<float> scale = block_scale<E, Block>(magnitude_bits<T, false>(most, h), a, tensor);
      const bool nan = !E::kHasNan && magnitude_bits<T, true>(poisoned, h) > kInfinity;
      store(2 * lane + h, nan ? kNanMark<E, Block> : scale.stored);
      mine |= static_cast<uint32_t>(254 - scale.stored) << (8 * h);
    }
    const uint32_t beside = __shfl_xor_sync(0xFFFFFFFFu, mine, Step);
    const uint32_t four = __byte_perm(mine, beside, lane & 1 ? 0x1054 : 0x5410);
    const uint32_t others = __shfl_xor_sync(0xFFFFFFFFu, four, 2 * Step);
    return lane & 2 ? uint2{others, four} : uint2{four, others};
  }

  // The power of two that line `i` is multiplied with.
  __device__ __forceinline__ static float multiplier_of_line(uint2 exponents, int i) {
    const uint32_t byte = ((i < 4 ? exponents.x : exponents.y) >> (8 * (i % 4))) & 0xFF;
    return __uint_as_float(max(byte << 23, 0x400000u));
  }

  __device__ __forceinline__ uint2 row_exponents() {
    constexpr int kAcross = kTileColumns / Block;
    return exponents_of_lines<1>(
        [&](auto poison, uint32_t(&pairs)[4]) { over_columns<decltype(poison)::value>(pairs); },
        [&](int line, int32_t stored) { shared.row_scales[(place.row + line) * kAcross + place.column / Block] = stored; });
  }

  __device__ __forceinline__ uint2 column_exponents() {
    constexpr int kDown = kTileRows<E> / Block;
    return exponents_of_lines<8>(
        [&](auto poison, uint32_t(&pairs)[4]) {
          const Eight<T> most = over_rows<decltype(poison)::value>();
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = most.word[i];
        },
        [&](int line, int32_t stored) { shared.column_scales[(place.column + line) * kDown + place.row / Block] = stored; });
  }

  template <Along A>
  __device__ __forceinline__ int32_t* parts() const {
    return shared.amax[A == Along::kColumn ? 1 : 0];
  }

  template <Along A, bool Poison>
  __device__ __forceinline__ void partial_amaxes(int32_t* out) const {
    using B = TileBlocks<E, Block, A>;
    if constexpr (kPairs && A != Along::kSquare) {
      constexpr int kLanes = A == Along::kRow ? B::kLaneColumns : B::kLaneRows, kStep = A == Along::kRow ? 1 : 8;
      uint32_t pairs[4];
      if constexpr (A == Along::kRow) {
        over_columns<Poison>(pairs);
      } else {
        const Eight<T> most = over_rows<Poison>();
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = most.word[i];
      }
      const uint32_t most = part_lanes_max<kLanes, kStep, Poison>(pairs);
      if (threadIdx.x / kStep % (kLanes / 4) != 0) return;
      const int line = 2 * pair_of_lane<kLanes, kStep>();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t one = magnitude_bits<T, Poison>(most, h);
        if constexpr (A == Along::kRow) {
          out[(place.row + line + h) * B::kPartColumns + place.column / B::kPartWide] = one;
        } else {
          out[place.row / B::kPartTall * B::kPartColumns + place.column + line + h] = one;
        }
      }
      return;
    }
    const bool writes = place.lane_row % B::kLaneRows == 0 && place.lane_column % B::kLaneColumns == 0;
    if constexpr (A == Along::kRow) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int32_t most = lanes_max<B::kLaneColumns>(largest<T, Poison>(x[r]));
        if (writes) out[(place.row + r) * B::kPartColumns + place.column / B::kPartWide] = most;
      }
    } else {
      Eight<T> most = x[0];
#pragma unroll
      for (int r = 1; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kWords<T>; ++i) most.word[i] = larger_magnitude<T, Poison>(most.word[i], x[r].word[i]);
      }
      const int part_row = place.row / B::kPartTall;
      if constexpr (A == Along::kSquare) {
        const int32_t one = lanes_max<B::kLaneRows, 8>(lanes_max<B::kLaneColumns>(largest<T, Poison>(most)));
        if (writes) out[part_row * B::kPartColumns + place.column / B::kPartWide] = one;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          constexpr int kPerWord = 8 / kWords<T>;
          const int32_t one = lanes_max<B::kLaneRows, 8>(magnitude_bits<T, Poison>(most.word[j / kPerWord], j % kPerWord));
          if (writes) out[part_row * B::kPartColumns + place.column + j] = one;
        }
      }
    }
  }

  // Largest of a block's partial amaxes.
  template <class B>
  __device__ __forceinline__ static int32_t merged(const int32_t* parts, int down, int across) {
    int32_t most = 0;
#pragma unroll
    for (int i = 0; i < B::kPartsDown; ++i) {
#pragma unroll
      for (int j = 0; j < B::kPartsAcross; ++j) {
        most = max(most, parts[(down * B::kPartsDown + i) * B::kPartColumns + across * B::kPartsAcross + j]);
      }
    }
    return most;
  }

  // Scales of a direction's blocks to memory, from the partial amaxes of all threads; multipliers take the amaxes' place.
  template <Along A>
  __device__ __forceinline__ void scale_blocks() {
    using B = TileBlocks<E, Block, A>;
    int32_t* const amaxes = parts<A>();
    const int64_t grid_rows = A == Along::kRow ? a.x.rows : (a.window.row_phase + a.x.rows + Block - 1) / Block;
    const int64_t grid_columns = A == Along::kColumn ? a.x.columns : (a.window.column_phase + a.x.columns + Block - 1) / Block;
    // A tile begins on a block boundary where the direction has blocks, so phase + origin is a multiple of the block.
    const int64_t first_row = A == Along::kRow ? tile.row : (tile.row + a.window.row_phase) / Block;
    const int64_t first_column = A == Along::kColumn ? tile.column : (tile.column + a.window.column_phase) / Block;
    constexpr int kBlocks = B::kDown * B::kAcross;
#pragma unroll
    for (int start = 0; start < kBlocks; start += kTileThreads) {
      // Few blocks: the other direction's are made by the other threads.
      const int i = start + (A == Along::kColumn ? kTileThreads - 1 - threadIdx.x : threadIdx.x);
      if (kBlocks % kTileThreads != 0 && i >= kBlocks) break;
      // Neighbouring threads take neighbouring scales of the direction's output.
      const int down = A == Along::kColumn ? i % B::kDown : i / B::kAcross;
      const int across = A == Along::kColumn ? i / B::kDown : i % B::kAcross;
      const BlockScale<float> scale = block_scale<E, Block>(merged<B>(amaxes, down, across), a, tensor);
      // Only this thread reads the parts of its block.
      amaxes[down * B::kPartsDown * B::kPartColumns + across * B::kPartsAcross] = to_bits(scale.multiplier);
      const int64_t row = first_row + down, column = first_column + across;
      const bool inside = (kAligned || (row >= 0 && column >= 0)) && row < grid_rows && column < grid_columns;
      if (!inside) continue;
      if (A != Along::kColumn && a.row.codes != nullptr) {
        store_scale<Block>(a.row.scales, (tile.batch * grid_rows + row) * grid_columns + column, scale.stored);
      }
      if (A != Along::kRow && a.column.codes != nullptr) {
        store_scale<Block>(a.column.scales, (tile.batch * grid_columns + column) * grid_rows + row, scale.stored);
      }
    }
  }

  // Multiplier of the block that row r, column j of the tile is in.
  template <Along A>
  __device__ __forceinline__ float multiplier(int r, int j) const {
    if constexpr (Block == 0) {
      return tensor.multiplier;
    } else {
      using B = TileBlocks<E, Block, A>;
      return from_bits<float>(parts<A>()[r / B::kTall * B::kPartsDown * B::kPartColumns + j / B::kWide * B::kPartsAcross]);
    }
  }

  // A block's scale from the part of its amax that this thread has; Lanes and Step as for lanes_max. `amax_of` takes whether NaN poisons.
  // Every lane of the warp must come here.
  struct Scale {
    BlockScale<float> of;
    bool nan;
    __device__ __forceinline__ int32_t stored() const { return nan ? kNanMark<E, Block> : of.stored; }
  };

  template <class AmaxOf>
  __device__ __forceinline__ Scale scale_within_warp(AmaxOf amax_of, const TensorScale& t) const {
    bool nan = false;
    int32_t amax;
    if constexpr (E::kHasNan) {
      amax = amax_of(std::false_type{});
    } else {
      amax = amax_of(std::true_type{});
      nan = amax > kInfinity;
      if (__any_sync(0xFFFFFFFFu, nan)) amax = amax_of(std::false_type{});
    }
    return {block_scale<E, Block>(amax, a, t), nan};
  }

  // Largest magnitudes of the eight columns of a thread's piece, element by element.
  template <bool Poison>
  __device__ __forceinline__ Eight<T> over_rows() const {
    Eight<T> most = x[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kWords<T>; ++i) most.word[i] = larger_magnitude<T, Poison>(most.word[i], x[r].word[i]);
    }
    return most;
  }

  __device__ __forceinline__ Scale square_scale() const {
    using B = TileBlocks<E, Block, Along::kSquare>;
    const Scale scale = scale_within_warp(
        [&](auto poison) {
          constexpr bool kPoison = decltype(poison)::value;
          return lanes_max<B::kLaneRows, 8>(lanes_max<B::kLaneColumns>(largest<T, kPoison>(over_rows<kPoison>())));
        },
        tensor);
    const int64_t grid_rows = (a.window.row_phase + a.x.rows + Block - 1) / Block;
    const int64_t grid_columns = (a.window.column_phase + a.x.columns + Block - 1) / Block;
    const int64_t row = (tile.row + a.window.row_phase + place.row) / Block;
    const int64_t column = (tile.column + a.window.column_phase + place.column) / Block;
    const bool writes = place.lane_row % B::kLaneRows == 0 && place.lane_column % B::kLaneColumns == 0;
    if (writes && row < grid_rows && column < grid_columns) {
      if (a.row.codes != nullptr) store_scale<Block>(a.row.scales, (tile.batch * grid_rows + row) * grid_columns + column, scale.stored());
      if (a.column.codes != nullptr) {
        store_scale<Block>(a.column.scales, (tile.batch * grid_columns + column) * grid_rows + row, scale.stored());
      }
    }
    return scale;
  }

  // Whether the transposed codes are the codes transposed: one scale for both directions, and no random bytes.
  __device__ __forceinline__ bool transposes() const {
    if constexpr (R == Rounding::kStochastic) return false;
    return Square && E::kBits != 6 && (R == Rounding::kNearest || (a.row.key == nullptr && a.column.key == nullptr));
  }

  // `kept`: the codes of each row, for the transposed direction.
  template <Along A>
  __device__ __forceinline__ void encode_rows(const Scale& square, uint2 (&kept)[kRows]) {
    const int64_t column = tile.column + place.column, pitch = Packing<E::kBits>::row_bytes(a.x.columns);
    const bool inside_columns = (kAligned || column >= 0) && column < a.x.columns;
    const int bytes = packed_bytes<E::kBits>(static_cast<int>(max(min(a.x.columns - column, int64_t{8}), int64_t{0})));
    uint2 exponents{};
    if constexpr (kPacked) exponents = row_exponents();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile.row + place.row + r;
      float factor;
      bool nan = false;
      if constexpr (!kWithinWarp) {
        factor = multiplier<A>(place.row + r, place.column);
      } else if constexpr (kPacked) {
        factor = multiplier_of_line(exponents, r);
      } else if constexpr (A == Along::kSquare) {
        factor = square.of.multiplier, nan = square.nan;
      } else {
        constexpr int kLanes = Block / 8, kAcross = kTileColumns / Block;
        const Scale scale = scale_within_warp(
            [&](auto poison) { return lanes_max<kLanes>(largest<T, decltype(poison)::value>(x[r])); }, tensor);
        factor = scale.of.multiplier, nan = scale.nan;
        if (place.lane_column % kLanes == 0) {
          shared.row_scales[(place.row + r) * kAcross + place.column / Block] = scale.stored();
        }
      }
      const bool inside = a.row.codes != nullptr && inside_columns && (kAligned || row >= 0) && row < a.x.rows;
      if (A != Along::kSquare && !inside) continue;
      const uint64_t global_row = tile.batch * a.window.rows + a.window.row + row;
      const uint2 codes = encode_scaled<E, R>([&](int i) { return value<T>(x[r], i); }, factor, nan, a.row.key,
                                              global_row * a.window.columns + a.window.column + column);
      if constexpr (A == Along::kSquare) {
        kept[r] = codes;
        if (!inside) continue;
      }
      uint8_t* out = a.row.codes + (tile.batch * a.x.rows + row) * pitch + column / 8 * E::kBits;
      if constexpr (kAligned) {
        store_eight<E::kBits>(out, codes);
      } else {
        store_some<E::kBits>(out, codes, 0, bytes);
      }
    }
  }

  // Transposed codes, and the scales of 1-D blocks of both directions, on their way through shared memory.
  template <Along A>
  __device__ __forceinline__ void encode_columns(const Scale& square, const uint2 (&kept)[kRows]) {
    using B = TileBlocks<E, Block == 0 ? 128 : Block, Along::kColumn>;
    if constexpr (A == Along::kSquare && E::kBits != 6) {
      if (transposes()) {
        uint2 columns[kRows / 8][8];
#pragma unroll
        for (int h = 0; h < kRows / 8; ++h) transpose_eight<E::kBits>(kept + 8 * h, columns[h]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint2 codes[kRows / 8];
#pragma unroll
          for (int h = 0; h < kRows / 8; ++h) codes[h] = columns[h][j];
          shared.staging.put(place.column + j, place.row / kRows, codes);
        }
        return;
      }
      if constexpr (R == Rounding::kNearest) return;
    }
    uint2 exponents{};
    Eight<T> most, poisoned;
    if constexpr (kPacked) {
      exponents = column_exponents();
    } else if constexpr (kWithinWarp && A == Along::kColumn) {
      // Both are made at once, so that the columns below need no second look at the rows.
      if constexpr (E::kHasNan) {
        most = over_rows<false>();
      } else {
        poisoned = over_rows<true>();
        bool nan = false;
#pragma unroll
        for (int j = 0; j < 8; ++j) nan = nan || magnitude_of<true>(poisoned, j) > kInfinity;
        most = __any_sync(0xFFFFFFFFu, nan) ? over_rows<false>() : poisoned;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float factor;
      bool nan = false;
      if constexpr (!kWithinWarp) {
        factor = multiplier<A>(place.row, place.column + j);
      } else if constexpr (kPacked) {
        factor = multiplier_of_line(exponents, j);
      } else if constexpr (A == Along::kSquare) {
        factor = square.of.multiplier, nan = square.nan;
      } else {
        const Scale scale = scale_within_warp(
            [&](auto poison) {
              constexpr bool kPoison = decltype(poison)::value;
              return lanes_max<B::kLaneRows, 8>(magnitude_of<kPoison>(kPoison ? poisoned : most, j));
            },
            tensor_t);
        factor = scale.of.multiplier, nan = scale.nan;
        if (place.lane_row % B::kLaneRows == 0) {
          shared.column_scales[(place.column + j) * B::kDown + place.row / Block] = scale.stored();
        }
      }
      uint2 codes[kRows / 8];
#pragma unroll
      for (int h = 0; h < kRows / 8; ++h) {
        const uint64_t global_column = tile.batch * a.window.columns + a.window.column + tile.column + place.column + j;
        codes[h] = encode_scaled<E, R>([&](int i) { return value<T>(x[8 * h + i], j); }, factor, nan, a.column.key,
                                       global_column * a.window.rows + a.window.row + tile.row + place.row + 8 * h);
      }
      shared.staging.put(place.column + j, place.row / kRows, codes);
    }
  }

  // What encode_columns left in shared memory, to memory.
  template <Along A>
  __device__ __forceinline__ void copy_columns() const {
    using B = TileBlocks<E, Block == 0 ? 128 : Block, Along::kColumn>;
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.rows);
    if constexpr (kAligned) {
      uint8_t* out = a.column.codes + (tile.batch * a.x.columns + tile.column) * pitch + tile.row / 8 * E::kBits;
      shared.staging.copy_vectors(out, pitch, a.x.rows - tile.row, a.x.columns - tile.column);
    } else {
      shared.staging.copy_bytes(a.column.codes + tile.batch * a.x.columns * pitch, pitch, tile.row / 8 * E::kBits, tile.column,
                                a.x.columns);
    }
    if constexpr (kWithinWarp && A == Along::kColumn) {
      if (a.row.codes != nullptr) {
        copy_scales(shared.row_scales, static_cast<uint8_t*>(a.row.scales), kTileColumns / Block, tile.row, a.x.rows,
                    (tile.column + a.window.column_phase) / Block, (a.window.column_phase + a.x.columns + Block - 1) / Block);
      }
      copy_scales(shared.column_scales, static_cast<uint8_t*>(a.column.scales), B::kDown, tile.column, a.x.columns,
                  (tile.row + a.window.row_phase) / Block, (a.window.row_phase + a.x.rows + Block - 1) / Block);
    }
  }

  template <bool Poison>
  __device__ __forceinline__ static int32_t magnitude_of(const Eight<T>& most, int j) {
    constexpr int kPerWord = 8 / kWords<T>;
    return magnitude_bits<T, Poison>(most.word[j / kPerWord], j % kPerWord);
  }

  // Scales of a tile, `width` a line, to their place among `lines` lines of `grid`.
  __device__ __forceinline__ void copy_scales(const uint8_t* scales, uint8_t* out, int width, int64_t first_line, int64_t lines,
                                              int64_t first, int64_t grid) const {
    if (kAligned && width == 4 && grid % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 4 == 0) {
      for (int i = threadIdx.x; i < kRowScales / 4; i += kTileThreads) {
        const int64_t line = first_line + i;
        if (line >= lines || first >= grid) continue;
        *reinterpret_cast<uint32_t*>(out + (tile.batch * lines + line) * grid + first) = reinterpret_cast<const uint32_t*>(scales)[i];
      }
      return;
    }
    for (int i = threadIdx.x; i < kRowScales; i += kTileThreads) {
      const int64_t line = first_line + i / width, at = first + i % width;
      if (line < 0 || line >= lines || at >= grid) continue;
      out[(tile.batch * lines + line) * grid + at] = scales[i];
    }
  }

  // Scales of blocks that reach over warps. Ends with all threads in step.
  __device__ __forceinline__ void scale_over_warps() {
    if constexpr (Block != 0 && !kWithinWarp) {
      if constexpr (Square) {
        partial_amaxes<Along::kSquare, false>(parts<Along::kSquare>());
        __syncthreads();
        scale_blocks<Along::kSquare>();
      } else {
        if (a.row.codes != nullptr) partial_amaxes<Along::kRow, false>(parts<Along::kRow>());
        partial_amaxes<Along::kColumn, false>(parts<Along::kColumn>());
        __syncthreads();
        if (a.row.codes != nullptr) scale_blocks<Along::kRow>();
        scale_blocks<Along::kColumn>();
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void run() {
    Scale scale{};
    uint2 kept[kRows];
    scale_over_warps();
    if constexpr (Square) {
      if constexpr (kWithinWarp) scale = square_scale();
      encode_rows<Along::kSquare>(scale, kept);
    } else {
      if (a.row.codes != nullptr) encode_rows<Along::kRow>(scale, kept);
      if constexpr (Block == 16) {
        if (a.rotate_column && tile.row + place.row + 16 <= a.x.rows && (kAligned || tile.row + place.row >= 0)) {
          rotate_columns<T>(x);
        }
      }
    }
    if (a.column.codes == nullptr) return;
    constexpr Along kAlong = Square ? Along::kSquare : Along::kColumn;
    encode_columns<kAlong>(scale, kept);
    __syncthreads();
    copy_columns<kAlong>();
  }
};

template <class E, int Block, class T, bool Square, Rounding R>
__global__ void __launch_bounds__(kTileThreads, sizeof(typename T::Raw) == 2 ? (kDepth<E> == 8 ? 3 : 2) : (kDepth<E> == 8 ? 2 : 1))
    quantize_tiles(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  using Kernel = TileKernel<E, Block, T, Square, R>;
  __shared__ __align__(16) typename Kernel::Shared shared;
  // Down `strip` tiles, then across: tiles that are written together are neighbours in the codes of both directions.
  const uint32_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x - batch * matrix;
  const uint32_t top = in_matrix / (across * strip) * strip, in_strip = in_matrix - top * across, tall = min(down - top, strip);
  const TileOrigin tile{batch, static_cast<int64_t>(top + in_strip % tall) * kTileRows<E> - a.window.row_phase,
                        static_cast<int64_t>(in_strip / tall) * kTileColumns - a.window.column_phase};
  Kernel kernel{a, shared, TilePlace::of_thread<kDepth<E>>(), tile, {}, {}, {}};
  kernel.load(vectors);
  if constexpr (Block == 0 || Block == 16) {
    __shared__ TensorScale tensor[2];
    // Two warps, so that the divisions of both directions go on at once.
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
      const bool transposed = threadIdx.x != 0;
      const TensorScale t = tensor_scale<E, Block>(a, transposed ? a.amax_t : a.amax);
      tensor[transposed] = t;
      if (blockIdx.x == 0) {
        const Output& out = transposed ? a.column : a.row;
        if constexpr (Block == 0) {
          if (out.codes != nullptr) *static_cast<float*>(out.scales) = t.decode;
        } else {
          *(transposed ? a.tensor_scale_t : a.tensor_scale) = t.decode;
        }
      }
    }
    __syncthreads();
    kernel.tensor = tensor[0];
    kernel.tensor_t = tensor[1];
  }
  if constexpr (Block == 0) {
    if (a.recorded != nullptr) {
      int32_t most = 0;
#pragma unroll
      for (int r = 0; r < kDepth<E>; ++r) most = max(most, largest<T, false>(kernel.x[r]));
      most = lanes_max<32>(most);
      if (threadIdx.x % 32 == 0 && most > 0) atomicMax(a.recorded, most);
    }
  }
  kernel.run();
}

}  // namespace cuda
}  // namespace blockfp
