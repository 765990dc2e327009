// Dequantizing whole blocks of contiguous codes: no group of eight asks where it lies.
//
// Flat: blocks along the rows, or one scale: the matrix is one long row. Square: a thread's rows lie in one block, whose scale it reads once.
#pragma once

#include "dequantize.cuh"

namespace blockfp {
namespace cuda {

// Groups of eight that a thread reads before it writes the first.
constexpr int kFlatGroups = 2;

// The value of a stored scale, for scales of blocks of this many elements.
template <int Block>
__device__ __forceinline__ float block_value(const DequantizeArguments& a, int64_t block) {
  if constexpr (Block == 0 || Block == 128) {
    return __ldg(static_cast<const float*>(a.scales) + block);
  } else if constexpr (Block == 16) {
    return multiply(e4m3_value(__ldg(static_cast<const uint8_t*>(a.scales) + block)), __ldg(a.tensor_scale));
  } else {
    const uint32_t byte = __ldg(static_cast<const uint8_t*>(a.scales) + block);
    return __uint_as_float(byte == 0xFF ? kNan : max(byte << 23, 0x400000u));
  }
}

// Codes of group `group`. Six-bit groups begin at every other word, and are put together from the two words that hold them.
template <int Bits>
__device__ __forceinline__ uint2 load_group(const uint8_t* codes, int64_t group) {
  if constexpr (Bits == 8) {
    return __ldg(reinterpret_cast<const uint2*>(codes) + group);
  } else if constexpr (Bits == 4) {
    return {__ldg(reinterpret_cast<const uint32_t*>(codes) + group), 0};
  } else {
    const bool odd = group & 1;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(codes) + (group >> 1) * 3 + odd;
    const uint32_t low = __ldg(words), high = __ldg(words + 1);
    return odd ? uint2{__funnelshift_r(low, high, 16), high >> 16} : uint2{low, high & 0xFFFFu};
  }
}

template <class E, class T, int Block, bool Square>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_flat(const __grid_constant__ DequantizeArguments a, uint32_t spans, int64_t groups) {
  // Flat: one span, and `groups` counts the array. Square: `groups` counts a row, and spans of the threads lie side by side.
  const uint32_t band = Square ? blockIdx.x / spans : blockIdx.x;
  const int64_t in_row = Square ? static_cast<int64_t>(blockIdx.x - band * spans) * kDequantizeThreads + threadIdx.x : 0;
  const int64_t first = Square ? static_cast<int64_t>(band) * kFlatGroups * groups + in_row
                               : static_cast<int64_t>(band) * (kDequantizeThreads * kFlatGroups) + threadIdx.x;
  const int64_t step = Square ? groups : kDequantizeThreads;
  constexpr int kShift = Block == 16 ? 1 : (Block == 32 ? 2 : 4);  // groups of a block, side by side
  uint2 codes[kFlatGroups];
  float scale[kFlatGroups];
  bool inside[kFlatGroups];
#pragma unroll
  for (int u = 0; u < kFlatGroups; ++u) {
    const int64_t group = first + u * step;
    inside[u] = Square ? in_row < groups : group < groups;
    codes[u] = {};
    scale[u] = 0.0f;
    if (!inside[u]) continue;
    codes[u] = load_group<E::kBits>(a.codes, group);
    if (Block == 0 || Square) continue;
    scale[u] = block_value<Block>(a, group >> kShift);
  }
  if (Block == 0) {
    scale[0] = block_value<Block>(a, 0);
  } else if (Square) {
    if (inside[0]) scale[0] = block_value<Block>(a, static_cast<int64_t>(band / (Block / kFlatGroups)) * (groups >> kShift) + (in_row >> kShift));
  }
#pragma unroll
  for (int u = 0; u < kFlatGroups; ++u) {
    float y[8];
    decode_eight<E>(codes[u], y);
    const float by = scale[Block == 0 || Square ? 0 : u];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply(y[i], by);
    store_values<T>(static_cast<typename T::Raw*>(a.out) + (first + u * step) * 8, y, inside[u] ? 8 : 0, true);
  }
}

}  // namespace cuda
}  // namespace blockfp
