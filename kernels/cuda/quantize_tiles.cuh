// Quantizes along the rows (transposed codes), along both axes in one read, and in square blocks.
#pragma once

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

  struct Shared {
    Staging<E> staging;
    int32_t amax[kMostParts];  // then the multipliers, negative where the block holds a NaN
    int32_t poison[E::kHasNan ? 1 : kMostParts];
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

  template <Along A, bool Poison>
  __device__ __forceinline__ void partial_amaxes(int32_t* out) const {
    using B = TileBlocks<E, Block, A>;
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

  // Amaxes, scales to memory, multipliers to shared memory. Ends with all threads in step.
  template <Along A>
  __device__ __forceinline__ void scale_blocks() {
    using B = TileBlocks<E, Block, A>;
    bool any_nan = false;
    if constexpr (E::kHasNan) {
      partial_amaxes<A, false>(shared.amax);
      __syncthreads();
    } else {
      partial_amaxes<A, true>(shared.poison);
      __syncthreads();
      bool nan = false;
      for (int i = threadIdx.x; i < B::kParts; i += kTileThreads) nan = nan || shared.poison[i] > kInfinity;
      any_nan = __syncthreads_or(nan);
      if (any_nan) {
        partial_amaxes<A, false>(shared.amax);
        __syncthreads();
      }
    }
    const int64_t grid_rows = A == Along::kRow ? a.x.rows : (a.window.row_phase + a.x.rows + Block - 1) / Block;
    const int64_t grid_columns = A == Along::kColumn ? a.x.columns : (a.window.column_phase + a.x.columns + Block - 1) / Block;
    // A tile begins on a block boundary where the direction has blocks, so phase + origin is a multiple of the block.
    const int64_t first_row = A == Along::kRow ? tile.row : (tile.row + a.window.row_phase) / Block;
    const int64_t first_column = A == Along::kColumn ? tile.column : (tile.column + a.window.column_phase) / Block;
    constexpr int kBlocks = B::kDown * B::kAcross;
#pragma unroll
    for (int start = 0; start < kBlocks; start += kTileThreads) {
      const int i = start + threadIdx.x;
      if (kBlocks % kTileThreads != 0 && i >= kBlocks) break;
      // Neighbouring threads take neighbouring scales of the direction's output.
      const int down = A == Along::kColumn ? i % B::kDown : i / B::kAcross;
      const int across = A == Along::kColumn ? i / B::kDown : i % B::kAcross;
      const int32_t poisoned = merged<B>(E::kHasNan ? shared.amax : shared.poison, down, across);
      const bool nan = !E::kHasNan && poisoned > kInfinity;
      const int32_t amax = nan ? merged<B>(shared.amax, down, across) : poisoned;
      const BlockScale<float> scale = block_scale<E, Block>(amax, a, A == Along::kColumn ? tensor_t : tensor);
      // Only this thread reads the parts of its block.
      shared.amax[down * B::kPartsDown * B::kPartColumns + across * B::kPartsAcross] =
          to_bits(scale.multiplier) | (nan ? ~kMagnitude : 0);
      const int64_t row = first_row + down, column = first_column + across;
      const bool inside = (kAligned || (row >= 0 && column >= 0)) && row < grid_rows && column < grid_columns;
      if (!inside) continue;
      const int32_t stored = nan ? kNanMark<E, Block> : scale.stored;
      if (A != Along::kColumn && a.row.codes != nullptr) {
        store_scale<Block>(a.row.scales, (tile.batch * grid_rows + row) * grid_columns + column, stored);
      }
      if (A != Along::kRow && a.column.codes != nullptr) {
        store_scale<Block>(a.column.scales, (tile.batch * grid_columns + column) * grid_rows + row, stored);
      }
    }
    __syncthreads();
  }

  // Multiplier of the block that row r, column j of the tile is in.
  template <Along A>
  __device__ __forceinline__ float multiplier(int r, int j) const {
    if constexpr (Block == 0) {
      return tensor.multiplier;
    } else {
      using B = TileBlocks<E, Block, A>;
      const int down = r / B::kTall, across = j / B::kWide;
      return from_bits<float>(shared.amax[down * B::kPartsDown * B::kPartColumns + across * B::kPartsAcross]);
    }
  }

  // A negative multiplier stands for a block with a NaN; index counts in the unsharded array as encoded.
  template <class Value>
  __device__ __forceinline__ uint2 encode(Value value_of, float multiplier, const uint32_t* key, uint64_t index) const {
    return encode_scaled<E, R>(value_of, fabsf(multiplier), multiplier < 0, key, index);
  }

  template <Along A>
  __device__ __forceinline__ void encode_rows() const {
    const int64_t column = tile.column + place.column, pitch = Packing<E::kBits>::row_bytes(a.x.columns);
    if ((!kAligned && column < 0) || column >= a.x.columns) return;
    const int bytes = packed_bytes<E::kBits>(static_cast<int>(min(a.x.columns - column, int64_t{8})));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile.row + place.row + r;
      if ((!kAligned && row < 0) || row >= a.x.rows) continue;
      const uint64_t global_row = tile.batch * a.window.rows + a.window.row + row;
      const uint2 codes = encode([&](int i) { return value<T>(x[r], i); }, multiplier<A>(place.row + r, place.column), a.row.key,
                                 global_row * a.window.columns + a.window.column + column);
      uint8_t* out = a.row.codes + (tile.batch * a.x.rows + row) * pitch + column / 8 * E::kBits;
      if constexpr (kAligned) {
        store_eight<E::kBits>(out, codes);
      } else {
        store_some<E::kBits>(out, codes, 0, bytes);
      }
    }
  }

  template <Along A>
  __device__ __forceinline__ void encode_columns() {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint2 codes[kRows / 8];
#pragma unroll
      for (int h = 0; h < kRows / 8; ++h) {
        const uint64_t global_column = tile.batch * a.window.columns + a.window.column + tile.column + place.column + j;
        codes[h] = encode([&](int i) { return value<T>(x[8 * h + i], j); }, multiplier<A>(place.row, place.column + j),
                          a.column.key, global_column * a.window.rows + a.window.row + tile.row + place.row + 8 * h);
      }
      shared.staging.put(place.column + j, place.row / kRows, codes);
    }
    __syncthreads();
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.rows);
    if constexpr (kAligned) {
      uint8_t* out = a.column.codes + (tile.batch * a.x.columns + tile.column) * pitch + tile.row / 8 * E::kBits;
      shared.staging.copy_vectors(out, pitch, a.x.rows - tile.row, a.x.columns - tile.column);
    } else {
      shared.staging.copy_bytes(a.column.codes + tile.batch * a.x.columns * pitch, pitch, tile.row / 8 * E::kBits, tile.column,
                                a.x.columns);
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Square) {
      if constexpr (Block != 0) scale_blocks<Along::kSquare>();
      if (a.row.codes != nullptr) encode_rows<Along::kSquare>();
      if (a.column.codes != nullptr) encode_columns<Along::kSquare>();
    } else {
      if (a.row.codes != nullptr) {
        scale_blocks<Along::kRow>();
        encode_rows<Along::kRow>();
        __syncthreads();
      }
      if constexpr (Block == 16) {
        if (a.rotate_column && tile.row + place.row + 16 <= a.x.rows && (kAligned || tile.row + place.row >= 0)) {
          rotate_columns<T>(x);
        }
      }
      scale_blocks<Along::kColumn>();
      encode_columns<Along::kColumn>();
    }
  }
};

template <class E, int Block, class T, bool Square, Rounding R>
__global__ void __launch_bounds__(kTileThreads, sizeof(typename T::Raw) == 2 || kDepth<E> == 8 ? 2 : 1)
    quantize_tiles(const __grid_constant__ QuantizeArguments a, int64_t across, int64_t down, bool vectors) {
  using Kernel = TileKernel<E, Block, T, Square, R>;
  __shared__ __align__(16) typename Kernel::Shared shared;
  const int64_t index = blockIdx.x, matrix = across * down;
  const int64_t batch = index / matrix, in_matrix = index % matrix;
  const TileOrigin tile{batch, in_matrix / across * kTileRows<E> - a.window.row_phase,
                        in_matrix % across * kTileColumns - a.window.column_phase};
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
