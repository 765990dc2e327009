// Dequantizes whole blocks of contiguous codes, so that no group needs its position. A group is one 16-byte store, so that the
// stores of a warp are adjacent.
//
// Flat: blocks along the rows, or one scale; the matrix is one long row. Square: a thread's rows are in one block, whose scale
// it reads once.
#pragma once

#include "dequantize.cuh"

namespace blockfp {
namespace cuda {

// Elements of a group: eight 16-bit or four 32-bit ones.
template <class T>
constexpr int kGroupSize = 16 / sizeof(typename T::Raw);

// Groups that a thread reads before it writes the first.
template <class E, class T>
constexpr int kFlatGroups = T::kId == Fp32::kId || E::kBits == 6 ? 4 : 2;

// The value of a stored scale for blocks of this length.
template <int Block>
__device__ __forceinline__ float block_value(const void* scales, const float* tensor_scale, int64_t block) {
  if constexpr (Block == 0 || Block == 128) {
    return __ldg(static_cast<const float*>(scales) + block);
  } else if constexpr (Block == 16) {
    const float whole = tensor_scale == nullptr ? 1.0f : __ldg(tensor_scale);
    return multiply(e4m3_value(__ldg(static_cast<const uint8_t*>(scales) + block)), whole);
  } else {
    const uint32_t byte = __ldg(static_cast<const uint8_t*>(scales) + block);
    return __uint_as_float(byte == 0xFF ? kNan : max(byte << 23, 0x400000u));
  }
}

// Codes of group `group`. Six-bit groups straddle words and are assembled from two words.
template <int Bits, int Size>
__device__ __forceinline__ uint2 load_group(const uint8_t* codes, uint32_t group) {
  if constexpr (Bits * Size == 64) {
    return __ldg(reinterpret_cast<const uint2*>(codes) + group);
  } else if constexpr (Bits * Size == 32) {
    return {__ldg(reinterpret_cast<const uint32_t*>(codes) + group), 0};
  } else if constexpr (Bits * Size == 16) {
    return {__ldg(reinterpret_cast<const uint16_t*>(codes) + group), 0};
  } else {
    constexpr uint32_t kBytes = Bits * Size / 8;
    const uint32_t first = group * kBytes, inside = first % 4;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(codes) + first / 4;
    const uint32_t low = __ldg(words), high = inside + kBytes > 4 ? __ldg(words + 1) : 0;
    return {__funnelshift_r(low, high, 8 * inside), high >> (8 * inside)};
  }
}

template <class E, class T, int Block, bool Square>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_flat(const __grid_constant__ DequantizeArguments a, uint32_t spans, int64_t groups) {
  constexpr int kSize = kGroupSize<T>, kGroups = kFlatGroups<E, T>;
  constexpr int kInBlock = Block == 0 ? 1 : Block / kSize;  // adjacent groups of a block
  // Flat: one span, and `groups` counts the whole array. Square: `groups` counts a row, and the threads' spans are adjacent.
  const uint32_t band = Square ? blockIdx.x / spans : blockIdx.x, span = Square ? blockIdx.x - band * spans : 0;
  const int64_t first = Square ? static_cast<int64_t>(band) * kGroups * groups + span * kDequantizeThreads
                               : static_cast<int64_t>(band) * (kDequantizeThreads * kGroups);
  const int64_t left = Square ? groups - static_cast<int64_t>(span) * kDequantizeThreads : groups - first;
  const int64_t step = Square ? groups : kDequantizeThreads;
  const uint32_t inside = static_cast<uint32_t>(min(left, int64_t{1} << 30));
  const auto is_inside = [&](int u) { return threadIdx.x + (Square ? 0 : u * kDequantizeThreads) < inside; };
  uint2 codes[kGroups];
  float scale[Square || Block == 0 ? 1 : kGroups];
#pragma unroll
  for (int u = 0; u < kGroups; ++u) {
    codes[u] = {};
    const uint8_t* from = a.codes + (first + u * step) * (E::kBits * kSize) / 8;
    if (is_inside(u)) codes[u] = load_group<E::kBits, kSize>(from, threadIdx.x);
  }
#pragma unroll
  for (int u = 0; u < (Square || Block == 0 ? 1 : kGroups); ++u) {
    scale[u] = 0.0f;
    if (!is_inside(u)) continue;
    const int64_t row = Square ? static_cast<int64_t>(band / (Block == 0 ? 1 : Block / kGroups)) * (groups / kInBlock) : 0;
    const int64_t before = Square ? static_cast<int64_t>(span) * kDequantizeThreads : first + u * step;
    scale[u] = block_value<Block>(a.scales, a.tensor_scale, Block == 0 ? 0 : row + before / kInBlock + threadIdx.x / kInBlock);
  }
#pragma unroll
  for (int u = 0; u < kGroups; ++u) {
    if (!is_inside(u)) continue;
    float y[8];
    decode_eight<E>(codes[u], y);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = multiply(y[i], scale[Square || Block == 0 ? 0 : u]);
    StoredValues<T, kSize>(y).store_vectors(static_cast<typename T::Raw*>(a.out) + (first + u * step + threadIdx.x) * kSize);
  }
}

}  // namespace cuda
}  // namespace blockfp
