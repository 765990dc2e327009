// Codes for scales that are decided elsewhere: from amaxes reduced over ranks, or carried along. Any strides, any origin, any
// element: a thread encodes one group of codes that share bytes, each element with its own block's multiplier.
#include <algorithm>

#include "amax.cuh"
#include "codes.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kEncodeThreads = 256;

// Stored scale and multiplier of a block, from its amax or from the scale that is given.
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
        const float multiplier = tensor_multiplier<E>(*a.amax);
        return e4m3_scale<E, float>(amax, multiplier, divide(1.0f, multiplier));
      }
    }
  }
  if (rule == R::kE8m0Ceil || rule == R::kE8m0Floor) {
    const int32_t stored = min(static_cast<const uint8_t*>(a.scales)[block], 254);
    return {stored, from_bits<float>(stored == 254 ? 0x400000 : (254 - stored) << 23)};
  }
  const float decode = rule == R::kE4m3
                           ? decode_scale<R::kE4m3, float>(static_cast<const uint8_t*>(a.scales)[block], *a.tensor_scale)
                           : static_cast<const float*>(a.scales)[block];
  const int32_t magnitude = to_bits(decode) & kMagnitude;
  const float safe = from_bits<float>(magnitude >= kInfinity ? kFp32Max : magnitude);
  return {0, from_bits<float>(min(to_bits(divide(1.0f, safe)), kFp32Max))};
}

template <class E, class T>
__global__ void __launch_bounds__(kEncodeThreads) encode(const __grid_constant__ EncodeArguments a, int64_t grid_rows,
                                                         int64_t grid_columns) {
  using P = Packing<E::kBits>;
  const int64_t groups = (a.x.columns + P::kGroup - 1) / P::kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kEncodeThreads + threadIdx.x;
  if (index >= a.x.batches * a.x.rows * groups) return;
  const int64_t line = index / groups, group = index % groups, batch = line / a.x.rows, row = line % a.x.rows;
  uint32_t word = 0;
  for (int i = 0; i < P::kGroup; ++i) {
    const int64_t column = group * P::kGroup + i;
    if (column >= a.x.columns) break;
    int64_t block = 0;
    if (a.format.block_rows != 0) {
      const int64_t down = (a.window.row_phase + row) / a.format.block_rows;
      block = (batch * grid_rows + down) * grid_columns + (a.window.column_phase + column) / a.format.block_columns;
    }
    const float y = multiply(from_bits<float>(element_bits<T>(a.x, batch, row, column)), known_scale<E>(a, block).multiplier);
    int32_t code;
    if (a.key != nullptr) {
      const uint64_t global_row = batch * a.window.rows + a.window.row + row;
      const int32_t byte = random_byte(a.key[0], a.key[1], global_row * a.window.columns + a.window.column + column);
      code = encode_stochastic<E, float>(y, byte);
    } else {
      code = encode_nearest<E, float>(y);
    }
    word |= static_cast<uint32_t>(code & 0xFF) << (E::kBits * i);
  }
  uint8_t* out = a.codes + (line * groups + group) * P::kGroupBytes;
  for (int i = 0; i < P::kGroupBytes; ++i) out[i] = word >> (8 * i);
}

// The stored scales of given amaxes, a thread a block.
template <class E>
__global__ void __launch_bounds__(kEncodeThreads) encode_scales(const __grid_constant__ EncodeArguments a, int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kEncodeThreads + threadIdx.x;
  if (block == 0 && a.format.rule == ScaleRule::kE4m3) *a.tensor_scale = divide(1.0f, tensor_multiplier<E>(*a.amax));
  if (block >= blocks) return;
  int32_t stored = known_scale<E>(a, block).stored;
  if (a.format.rule == ScaleRule::kFp32 || a.format.rule == ScaleRule::kPow2) {
    static_cast<int32_t*>(a.scales)[block] = stored;
    return;
  }
  if (a.nan != nullptr && a.nan[block] > 0) stored = a.format.rule == ScaleRule::kE4m3 ? 0x7F : 0xFF;
  static_cast<uint8_t*>(a.scales)[block] = stored;
}

cudaError_t launch_encode(const EncodeArguments& a, cudaStream_t stream) {
  const bool per_tensor = a.format.per_tensor();
  const bool empty = a.x.batches * a.x.rows * a.x.columns == 0;
  const int64_t grid_rows = per_tensor ? 1 : ceil_div(a.window.row_phase + a.x.rows, a.format.block_rows);
  const int64_t grid_columns = per_tensor ? 1 : ceil_div(a.window.column_phase + a.x.columns, a.format.block_columns);
  const int64_t blocks = per_tensor ? 1 : (empty ? 0 : a.x.batches * grid_rows * grid_columns);
  return with_element(a.format.element, [&](auto element) {
    using E = decltype(element);
    if (a.blocks != nullptr) {
      const int64_t launched = ceil_div(std::max(blocks, int64_t{1}), kEncodeThreads);
      if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
      encode_scales<E><<<launched, kEncodeThreads, 0, stream>>>(a, blocks);
    }
    if (empty) return cudaGetLastError();
    const int64_t groups = a.x.batches * a.x.rows * ceil_div(a.x.columns, Packing<E::kBits>::kGroup);
    const int64_t launched = ceil_div(groups, kEncodeThreads);
    if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
    with_dtype(a.x.dtype, [&](auto dtype) {
      encode<E, decltype(dtype)><<<launched, kEncodeThreads, 0, stream>>>(a, grid_rows, grid_columns);
      return 0;
    });
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace blockfp
