// Codes for scales that are determined elsewhere: from amaxes reduced over ranks, given directly, or derived from the previous
// scales of a weight without a master. Any strides, origin and element; each element has its block's multiplier.
#include <algorithm>

#include "amax.cuh"
#include "blockfp/kept_scales.h"
#include "codes.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kEncodeThreads = 256;

// Stored scale and multiplier of a block, from its amax or its given scale.
template <class E>
__device__ BlockScale<float> known_scale(const EncodeArguments& a, int64_t block) {
  using R = ScaleRule;
  const R rule = a.format.rule;
  if (a.blocks != nullptr) {
    const int32_t amax = a.blocks[block];
    const int32_t largest = a.format.block_rows == 0 ? kFp32Max : a.largest_bits;
    switch (rule) {
      case R::kFp32:
        return fp8_scale<E, R::kFp32, float>(amax, a.eps_bits, largest);
      case R::kPow2:
        return fp8_scale<E, R::kPow2, float>(amax, a.eps_bits, largest);
      case R::kE8m0Ceil:
        return e8m0_scale<E, R::kE8m0Ceil, float>(amax);
      case R::kE8m0Floor:
        return e8m0_scale<E, R::kE8m0Floor, float>(amax);
      default: {
        const float multiplier = tensor_multiplier<E>(*a.amax, rule);
        return e4m3_scale<E, float>(amax, multiplier, divide(1.0f, multiplier), rule);
      }
    }
  }
  const bool bytes = a.format.scale_bits() == 8;
  const int32_t stored = bytes ? static_cast<const uint8_t*>(a.scales)[block] : static_cast<const int32_t*>(a.scales)[block];
  return {0, stored_multiplier(rule, stored, a.tensor_scale == nullptr ? 1.0f : *a.tensor_scale)};
}

// Random numbers of consecutive elements, `Random` bytes each.
template <int Random>
struct RandomRun {
  static constexpr int kServed = 8 / Random;  // elements of a counter
  uint64_t counter = ~uint64_t{0};
  Words<uint32_t> words;

  __device__ __forceinline__ int32_t at(const uint32_t* key, uint64_t index) {
    if (index / kServed != counter) {
      counter = index / kServed;
      words = threefry2x32<uint32_t>(key[0], key[1], counter >> 32, static_cast<uint32_t>(counter));
    }
    const int byte = static_cast<int>(index % kServed) * Random;
    return (byte < 4 ? words.w0 : words.w1) >> (8 * (byte % 4)) & ((1 << 8 * Random) - 1);
  }
};

// A thread has eight columns of a row. `Random`: bytes per element, 0 rounds to nearest.
template <class E, class T, int Random>
__global__ void __launch_bounds__(kEncodeThreads) encode(const __grid_constant__ EncodeArguments a, int64_t grid_rows,
                                                         int64_t grid_columns) {
  using P = Packing<E::kBits>;
  constexpr int kColumns = 8;
  const int64_t runs = (a.x.columns + kColumns - 1) / kColumns;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kEncodeThreads + threadIdx.x;
  if (index >= a.x.batches * a.x.rows * runs) return;
  const int64_t line = index / runs, first = index % runs * kColumns, batch = line / a.x.rows, row = line % a.x.rows;
  const int count = static_cast<int>(min(a.x.columns - first, int64_t{kColumns}));
  const int64_t down = a.format.block_rows == 0 ? 0 : (a.window.row_phase + row) / a.format.block_rows;
  const uint64_t before = (batch * a.window.rows + a.window.row + row) * a.window.columns + a.window.column;
  int64_t end = first;  // of the columns that share a scale
  float multiplier = 1.0f;
  uint64_t word = 0;
  [[maybe_unused]] RandomRun<Random == 0 ? 1 : Random> random;
  for (int i = 0; i < count; ++i) {
    const int64_t column = first + i;
    if (column == end) {
      int64_t block = 0;  // of the single scale of all matrices
      end = a.x.columns;
      if (a.format.block_rows != 0) {
        const int64_t across = (a.window.column_phase + column) / a.format.block_columns;
        end = (across + 1) * a.format.block_columns - a.window.column_phase;
        block = (batch * grid_rows + down) * grid_columns + across;
      }
      multiplier = known_scale<E>(a, block).multiplier;
    }
    const float y = multiply(from_bits<float>(element_bits<T>(a.x, batch, row, column)), multiplier);
    int32_t code;
    if constexpr (Random == 0) {
      code = encode_nearest<E, float>(y);
    } else {
      code = encode_stochastic<E, float, 8 * Random>(y, random.at(a.key, before + column));
    }
    word |= static_cast<uint64_t>(code & 0xFF) << (E::kBits * i);
  }
  uint8_t* out = a.codes + line * P::row_bytes(a.x.columns) + first / P::kGroup * P::kGroupBytes;
  const int bytes = (count + P::kGroup - 1) / P::kGroup * P::kGroupBytes;
  for (int i = 0; i < bytes; ++i) out[i] = word >> (8 * i);
}

// A block's stored scale, derived from its previous one.
template <class E>
__device__ int32_t kept_scale(const EncodeArguments& a, int64_t block, const KeptTensorScale& tensor) {
  const int32_t amax = a.blocks[block];
  if (a.format.scale_bits() == 32) return kept_fp32_scale<E>(static_cast<const int32_t*>(a.scales)[block], amax);
  const int32_t stored = static_cast<const uint8_t*>(a.scales)[block];
  return a.format.two_levels() ? kept_e4m3_scale<E>(stored, amax, tensor) : kept_e8m0_scale<E>(stored, amax);
}

// Stored scales from given amaxes, a thread per block.
template <class E>
__global__ void __launch_bounds__(kEncodeThreads) encode_scales(const __grid_constant__ EncodeArguments a, int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kEncodeThreads + threadIdx.x;
  const bool two_levels = a.format.two_levels();
  KeptTensorScale kept{};
  if (a.keeps && two_levels) kept = kept_tensor_scale<E>(to_bits(*a.kept_tensor_scale), *a.amax);
  if (block == 0 && two_levels) *a.tensor_scale = a.keeps ? from_bits<float>(kept.after) : divide(1.0f, tensor_multiplier<E>(*a.amax, a.format.rule));
  if (block >= blocks) return;
  int32_t stored = a.keeps ? kept_scale<E>(a, block, kept) : known_scale<E>(a, block).stored;
  if (a.format.scale_bits() == 32) {
    static_cast<int32_t*>(a.scales)[block] = stored;
    return;
  }
  if (a.nan != nullptr && a.nan[block] > 0) stored = two_levels ? 0x7F : 0xFF;
  static_cast<uint8_t*>(a.scales)[block] = stored;
}

template <class E, class T>
void launch_codes(const EncodeArguments& a, int64_t launched, int64_t grid_rows, int64_t grid_columns, cudaStream_t stream) {
  if (a.key == nullptr) {
    encode<E, T, 0><<<launched, kEncodeThreads, 0, stream>>>(a, grid_rows, grid_columns);
  } else if (!a.keeps) {
    encode<E, T, 1><<<launched, kEncodeThreads, 0, stream>>>(a, grid_rows, grid_columns);
  } else if constexpr (T::kId == Fp32::kId) {
    encode<E, T, 2><<<launched, kEncodeThreads, 0, stream>>>(a, grid_rows, grid_columns);
  }
}

cudaError_t launch_encode(const EncodeArguments& a, cudaStream_t stream) {
  const bool per_tensor = a.format.per_tensor();
  const bool empty = a.x.batches * a.x.rows * a.x.columns == 0;
  const int64_t grid_rows = per_tensor ? 1 : ceil_div(a.window.row_phase + a.x.rows, a.format.block_rows);
  const int64_t grid_columns = per_tensor ? 1 : ceil_div(a.window.column_phase + a.x.columns, a.format.block_columns);
  const int64_t blocks = per_tensor ? 1 : (empty ? 0 : a.x.batches * grid_rows * grid_columns);
  return with_element(a.format.element, [&](auto element) {
    using E = decltype(element);
    if (a.blocks != nullptr || a.amax != nullptr) {  // an empty x has no blocks, but a tensor scale
      const int64_t launched = ceil_div(std::max(blocks, int64_t{1}), kEncodeThreads);
      if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
      encode_scales<E><<<launched, kEncodeThreads, 0, stream>>>(a, blocks);
    }
    if (empty) return cudaGetLastError();
    const int64_t launched = ceil_div(a.x.batches * a.x.rows * ceil_div(a.x.columns, 8), kEncodeThreads);
    if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
    EncodeArguments by_scales = a;
    if (a.keeps) by_scales.blocks = nullptr;  // its scales have been written
    with_dtype(a.x.dtype, [&](auto dtype) {
      launch_codes<E, decltype(dtype)>(by_scales, launched, grid_rows, grid_columns, stream);
      return 0;
    });
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace blockfp
