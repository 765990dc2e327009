// Quantizes along the last axis in one pass: each thread holds one or two groups of eight adjacent elements, and adjacent lanes
// share a block.
#pragma once

#include <type_traits>

#include "block_scale.cuh"
#include "four_over_six.cuh"
#include "runs.cuh"
#include "sources.cuh"
#include "stochastic_e2m1.cuh"

namespace blockfp {
namespace cuda {

// Flat: contiguous, aligned, whole blocks, random index from 0; the row of an element is never needed. General: everything
// else; blocks still begin at multiples of eight columns.
constexpr int kRowThreads = 256;

// Pieces that a thread reads before it writes the first, so that enough loads are in flight.
template <class E, class T>
constexpr int kRowUnroll = sizeof(typename T::Raw) == 2 && E::kBits != 6 ? 2 : 1;

// Groups of eight per thread: two if codes are smaller than a byte, so that scales and stores cost less.
template <class E>
constexpr int kRowGroups = E::kBits == 8 ? 1 : 2;

// Elements of thread `lane` of a warp in a row pass, and their scales.
template <class E, int Block, class T>
struct RowPiece {
  static constexpr int kGroups = kRowGroups<E>;
  static constexpr int kLanes = Block == 0 ? 1 : (Block / (8 * kGroups) > 1 ? Block / (8 * kGroups) : 1);  // lanes per block
  Eight<T> x[kGroups];

  template <bool Poison>
  __device__ __forceinline__ int32_t amax() const {
    int32_t most = largest<T, Poison>(x[0]);
    if constexpr (kGroups == 2) most = max(most, largest<T, Poison>(x[1]));
    return lanes_max<kLanes>(most);
  }

  // The block's amax, and whether it contains a NaN. Every lane of the warp must call it.
  __device__ __forceinline__ int32_t amax_and_nan(bool& nan) const {
    nan = false;
    if constexpr (Block == 0) return 0;
    return amax_within_warp<E>([this](auto poison) { return amax<decltype(poison)::value>(); }, nan);
  }

  // Codes of the thread's groups, the first of which begins at element `index`; `care` is as for encode_scaled.
  template <Rounding R>
  __device__ __forceinline__ void encode(float multiplier, bool care, const uint32_t* key, uint64_t index, uint2 (&codes)[kGroups]) const {
    if constexpr (R == Rounding::kStochastic) {
      const TwoGroups groups{{multiplier, multiplier}, {__ldg(key), __ldg(key + 1)}, {index / 8, index / 8 + 1}, care};
      const uint2 both = encode_stochastic_groups<T>(x[0], x[1], groups);
      codes[0] = {both.x, 0}, codes[1] = {both.y, 0};
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        codes[g] = encode_scaled<E, R, kRange<Block>>([&](int i) { return value<T>(x[g], i); }, multiplier, care, key, index + 8 * g);
      }
    }
  }
};

// Scale and codes of a piece whose first element is `index`; `Chooses`: by 4-over-6.
template <bool Chooses, Rounding R, int Block, class E, class T, class Codes>
__device__ __forceinline__ BlockScale<float> quantize_piece(const RowPiece<E, Block, T>& piece, int32_t amax, bool nan,
                                                            const QuantizeArguments& a, const TensorScale& tensor, uint64_t index,
                                                            Codes& codes) {
  const auto encode = [&](float multiplier) {
    const bool care = nan || exceeds_range<Block>(amax, multiplier) || (Block == 16 && is_huge(tensor));
    piece.template encode<R>(multiplier, care, a.row.key, index, codes);
  };
  BlockScale<float> scale;
  if constexpr (Chooses) {
    static_assert(Block == 16, "a thread holds a block");
    if constexpr (R == Rounding::kNearest) return choose_and_encode<T>(piece.x, amax, a, tensor, codes, encode);
    scale = choose_scale<T>(piece.x, amax, a, tensor);
  } else {
    scale = block_scale<E, Block>(amax, a, tensor);
  }
  encode(scale.multiplier);
  return scale;
}

// Does nothing with two levels, where the tensor's amax shows an Inf.
template <int Block, class E, class T>
__device__ __forceinline__ void record_row(const QuantizeArguments& a, const RowPiece<E, Block, T>& piece, int32_t amax) {
  if constexpr (Block == 0) {
    if (a.recorded != nullptr) raise_amax(a.recorded, largest<T, false>(piece.x[0]));
  } else if constexpr (Block != 16) {
    if (a.recorded != nullptr && amax == kInfinity) *a.recorded = kInfinity;
  }
}

// One thread computes the tensor scale's division, while the other threads' loads are in flight.
template <class E, int Block>
__device__ __forceinline__ TensorScale shared_tensor_scale(const QuantizeArguments& a) {
  if constexpr (Block == 32 || Block == 128) return {1.0f, 1.0f, 1.0f};
  __shared__ TensorScale shared;
  if (threadIdx.x == 0) {
    shared = tensor_scale<E, Block>(a, a.amax);
    if (blockIdx.x == 0) {
      if constexpr (Block == 0) {
        const float stored = stored_tensor_scale(a, shared.decode);
        if (a.row.scales != nullptr) *static_cast<float*>(a.row.scales) = stored;
        if (a.column.scales != nullptr) *static_cast<float*>(a.column.scales) = stored;
      } else {
        const float stored = stored_tensor_scale(a, shared.decode);
        if (a.tensor_scale != nullptr) *a.tensor_scale = stored;
        // For an empty array; only then does this kernel have a transposed direction.
        if (a.tensor_scale_t != nullptr) *a.tensor_scale_t = stored;
      }
    }
  }
  __syncthreads();
  return shared;
}

// Index of a scale from the number of its block, of rows of `blocks` whole ones each.
template <int Block>
__device__ __forceinline__ int64_t place_of_block(const QuantizeArguments& a, int64_t number, uint32_t blocks) {
  if (Block != 128 || !a.row.ordered) return number;
  // No GPU's memory holds 2^32 blocks.
  const uint32_t row = static_cast<uint32_t>(number) / blocks;
  return ordered_place(static_cast<uint32_t>(number) - row * blocks, row, a.x.rows);
}

template <class E, int Block, class T, Rounding R, int Unroll, class Source, bool Chooses>
__global__ void __launch_bounds__(kRowThreads) quantize_rows_flat(const __grid_constant__ QuantizeArguments a, int64_t pieces) {
  using Piece = RowPiece<E, Block, T>;
  constexpr int kElements = 8 * Piece::kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kRowThreads * Unroll) + threadIdx.x;
  Piece piece[Unroll];
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t index = first + u * kRowThreads;
#pragma unroll
    for (int g = 0; g < Piece::kGroups; ++g) piece[u].x[g] = zeros<T>();
    if (index < pieces) Source::template load_line<T>(a, index * kElements, piece[u].x);
  }
  const TensorScale tensor = shared_tensor_scale<E, Block>(a);
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t index = first + u * kRowThreads;
    bool nan;
    const int32_t amax = piece[u].amax_and_nan(nan);
    record_row<Block>(a, piece[u], amax);
    uint2 codes[Piece::kGroups];
    const BlockScale<float> scale = quantize_piece<Chooses, R>(piece[u], amax, nan, a, tensor, index * kElements, codes);
    if (index >= pieces) continue;
    store_groups<E>(a.row.codes + index * E::kBits * Piece::kGroups, codes);
    if (Block != 0 && threadIdx.x % Piece::kLanes == 0) {
      const int64_t at = place_of_block<Block>(a, index / Piece::kLanes, static_cast<uint32_t>(a.x.columns / Block));
      store_scale<Block>(a.row.scales, at, nan ? kNanMark<E, Block> : scale.stored);
    }
  }
}

// Rows that a thread reads before it writes the first.
constexpr int kRowsAtOnce = 4;

// 2^shift adjacent threads have a row, the other threads the rows below.
template <class E, int Block, class T, bool Chooses>
__global__ void __launch_bounds__(kRowThreads) quantize_rows_general(const __grid_constant__ QuantizeArguments a, int shift,
                                                                     uint32_t spans, int64_t grid_columns, bool vectors) {
  using Piece = RowPiece<E, Block, T>;
  using Raw = typename T::Raw;
  constexpr int kElements = 8 * Piece::kGroups, kWordsOfPiece = kElements * E::kBits / 32;
  __shared__ RunEnds<kWordsOfPiece, kRowThreads> ends[kRowsAtOnce];
  const uint32_t band = blockIdx.x / spans, span = blockIdx.x - band * spans;
  const int rows_below = kRowThreads >> shift, count = 1 << shift, index = threadIdx.x & (count - 1);
  const int64_t first_row = static_cast<int64_t>(band) * (rows_below * kRowsAtOnce) + (threadIdx.x >> shift);
  const int64_t run = static_cast<int64_t>(span) << shift, lines = a.x.batches * a.x.rows;
  const int64_t column = (run + index) * kElements - a.window.column_phase;
  const auto batch_of = [&](int64_t row) { return a.x.batches == 1 || row >= lines ? 0 : row / a.x.rows; };
  // A phase is a multiple of eight, so a group either begins inside x or is outside it.
  int in_group[Piece::kGroups];
#pragma unroll
  for (int g = 0; g < Piece::kGroups; ++g) {
    const int64_t at = column + 8 * g;
    in_group[g] = at < 0 ? 0 : static_cast<int>(max(min(a.x.columns - at, int64_t{8}), int64_t{0}));
  }
  Piece piece[kRowsAtOnce];
  const auto load = [&](auto aligned) {
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const int64_t row = first_row + u * rows_below, batch = batch_of(row);
      const Raw* x = static_cast<const Raw*>(a.x.data) + batch * a.x.batch_stride + (row - batch * a.x.rows) * a.x.row_stride + column;
#pragma unroll
      for (int g = 0; g < Piece::kGroups; ++g) {
        const int wanted = row < lines ? in_group[g] : 0;
        if constexpr (decltype(aligned)::value) {
          piece[u].x[g] = wanted != 0 ? load_vector<T>(x + 8 * g) : zeros<T>();
        } else {
          piece[u].x[g] = load_unmasked<T>(x + 8 * g, wanted);
        }
      }
    }
  };
  // Either loop has no branches, so that many loads are in flight.
  if (vectors && a.x.columns % 8 == 0) {
    load(std::true_type{});
  } else {
    load(std::false_type{});
#pragma unroll
    for (int g = 0; g < Piece::kGroups; ++g) {
      if (in_group[g] == 8) continue;
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) keep_first(piece[u].x[g], in_group[g]);
    }
  }
  const TensorScale tensor = shared_tensor_scale<E, Block>(a);
  uint32_t words[kRowsAtOnce][kWordsOfPiece];
#pragma unroll
  for (int u = 0; u < kRowsAtOnce; ++u) {
    const int64_t row = first_row + u * rows_below;
    bool nan;
    const int32_t amax = piece[u].amax_and_nan(nan);
    record_row<Block>(a, piece[u], amax);
    const int64_t batch = batch_of(row);
    const uint64_t global_row = batch * a.window.rows + a.window.row + row - batch * a.x.rows;
    const uint64_t element = global_row * a.window.columns + a.window.column + column;
    uint2 codes[Piece::kGroups];
    const BlockScale<float> scale = quantize_piece<Chooses, Rounding::kGeneral>(piece[u], amax, nan, a, tensor, element, codes);
    pack_groups<E>(codes, words[u]);
    ends[u].put(words[u]);
    if (Block != 0 && row < lines && column < a.x.columns) {
      const int64_t block = (run + index) / Piece::kLanes;
      // The first lane of a block may be before x.
      const int64_t begin = max(block * Block - a.window.column_phase, int64_t{0});
      if (begin >= column && begin < column + kElements) {
        const int64_t at = Block == 128 && a.row.ordered ? ordered_place(block, row, lines) : row * grid_columns + block;
        store_scale<Block>(a.row.scales, at, nan ? kNanMark<E, Block> : scale.stored);
      }
    }
  }
  __syncthreads();
  const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.columns);
  const int64_t begin = (run * kElements - a.window.column_phase) / 8 * E::kBits;  // of the first thread's codes in their row
  const int first = static_cast<int>(max(-begin, int64_t{0}));
  const int last = static_cast<int>(max(min(pitch - begin, int64_t{4 * kWordsOfPiece} << shift), int64_t{0}));
#pragma unroll
  for (int u = 0; u < kRowsAtOnce; ++u) {
    const int64_t row = first_row + u * rows_below;
    if (row < lines) store_run<1>(ends[u], a.row.codes + row * pitch + begin, words[u], index, count, first, last);
  }
}

}  // namespace cuda
}  // namespace blockfp
