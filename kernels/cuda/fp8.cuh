// Conversions between FP8 and wider floats: the GPU's own from compute capability 8.9 on, before that arithmetic with the same
// bits.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "blockfp/elements.h"

namespace blockfp {
namespace cuda {

// Codes of two numbers, `low` in the lower byte; saturating, NaN as 0x7F. Wide: E5M2, else E4M3.
template <bool Wide>
__device__ __forceinline__ uint32_t convert_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t out;
  if constexpr (Wide) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  }
  return out;
#else
  using E = std::conditional_t<Wide, E5M2, E4M3>;
  return (encode_nearest<E, float>(low) & 0xFF) | (encode_nearest<E, float>(high) & 0xFF) << 8;
#endif
}

// Codes of four numbers, the first in the lowest byte.
template <bool Wide>
__device__ __forceinline__ uint32_t convert_four(const float* y) {
#if __CUDA_ARCH__ >= 890
  uint32_t out;
  // The second conversion takes the first one's word as input; written as one piece, combining them costs no instruction.
  if constexpr (Wide) {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
  } else {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
  }
  return out;
#else
  return convert_pair<Wide>(y[0], y[1]) | convert_pair<Wide>(y[2], y[3]) << 16;
#endif
}

// Converts two codes, one in each half of a word, to fp16; exact, NaN as 0x7FFF.
template <bool Wide>
__device__ __forceinline__ uint32_t halves_of_spread(uint32_t codes) {
  if constexpr (Wide) {
    // E5M2 is the upper byte of fp16.
    const uint32_t nan = __vcmpgtu2(codes & 0x007F007Fu, 0x007C007Cu);
    return (codes << 8 & ~nan) | (0x7FFF7FFFu & nan);
  } else {
    // Moved into fp16's fields, the code represents 2^-8 of its value, also for subnormals.
    const uint32_t nan = __vcmpeq2(codes & 0x007F007Fu, 0x007F007Fu);
    const uint32_t placed = (codes & 0x00800080u) << 8 | (codes & 0x007F007Fu) << 7;
    const uint32_t halves = bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(placed), __float2half2_rn(256.0f)));
    return (halves & ~nan) | (0x7FFF7FFFu & nan);
  }
}

// Converts two codes to fp16, the lower byte to the lower half; exact.
template <bool Wide>
__device__ __forceinline__ uint32_t halves_of(uint16_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  if constexpr (Wide) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  }
  return halves;
#else
  return halves_of_spread<Wide>((pair & 0xFFu) | (pair & 0xFF00u) << 8);
#endif
}

}  // namespace cuda
}  // namespace blockfp
