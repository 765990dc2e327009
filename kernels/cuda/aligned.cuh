// Arithmetic of aligned MX operands, with the bits of blockfp/definition/alignment.py: align.cu shifts stored codes, and
// quantize/quantize_aligned.cuh shifts codes that it has just computed.
#pragma once

#include <type_traits>

#include "blockfp/elements.h"

namespace blockfp {
namespace cuda {

// The element that codes of E are aligned to.
template <class E>
using AlignedElement = std::conditional_t<E::kId == E5M2::kId, E5M2, E4M3>;

// `widened` codes represent 2^-lift times their value.
template <class E>
constexpr int kLift = AlignedElement<E>::kBias - E::kBias;

// Below any exponent.
constexpr int kNone = -1024;

constexpr int kAlignedUnit = 16;  // rows are padded to a multiple of this many codes

// An FP8 code's exponent, plus 1 if its significand is above 1.75, which E4M3's largest exponent can't represent.
template <class Target>
__device__ __forceinline__ int exponent_of(int magnitude) {
  constexpr int kBits = Target::kMantissaBits, kLast = (1 << kBits) - 1;
  if (magnitude == 0) return kNone;
  if (magnitude <= kLast) return 31 - __clz(magnitude) + Target::kEmin - kBits;
  const bool carry = kBits == 3 && (magnitude & kLast) == kLast;
  return (magnitude >> kBits) - Target::kBias + carry;
}

// The stored exponent that blocks share, given the largest of theirs; and its scale.
template <class Target>
__device__ __forceinline__ int shared_exponent(int highest) {
  return max(highest - Target::kEmax, 0);
}
__device__ __forceinline__ float shared_scale(int shared) {
  return __uint_as_float(shared == 0 ? 0x400000u : static_cast<uint32_t>(shared) << 23);
}

// 2^exponent in fp16, for exponents -24 .. 15.
__device__ __forceinline__ uint32_t half_of_power(int exponent) { return exponent >= -14 ? (exponent + 15) << 10 : 1u << (exponent + 24); }

// Spreads four 6-bit codes (24 bits) to the low bits of bytes.
__device__ __forceinline__ uint32_t spread_six(uint32_t codes) {
  return (codes & 0x3Fu) | ((codes & 0xFC0u) << 2) | ((codes & 0x3F000u) << 4) | ((codes & 0xFC0000u) << 6);
}

// Spreads eight packed codes to the low bits of bytes.
template <class E>
__device__ __forceinline__ uint2 bytes_of_eight(uint2 packed) {
  if constexpr (E::kBits == 8) return packed;
  if constexpr (E::kBits == 6) return {spread_six(packed.x), spread_six((packed.x >> 24) | (packed.y << 8))};
  const uint32_t even = packed.x & 0x0F0F0F0Fu, odd = (packed.x >> 4) & 0x0F0F0F0Fu;
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

// Converts codes of E in the low bits of four bytes to E4M3 codes of 2^-lift times their value, by moving bits; also for
// subnormals.
template <class E>
__device__ __forceinline__ uint32_t widened(uint32_t codes) {
  if constexpr (E::kBits == 8) return codes;
  constexpr uint32_t kOnes = 0x01010101u, kSign = 1u << (E::kBits - 1);
  return ((codes & (kSign * kOnes)) << (8 - E::kBits)) | ((codes & ((kSign - 1) * kOnes)) << (3 - E::kMantissaBits));
}

// The first `count` of four bytes; count may be above 4 or negative.
__device__ __forceinline__ uint32_t first_bytes(uint32_t bytes, int count) {
  const int left = min(max(count, 0), 4);
  return left == 4 ? bytes : bytes & ((1u << (8 * left)) - 1);
}

// Multiplies four FP8 codes by a power of two, rounded to nearest. The power is a list of fp16 factors, each in both halves of
// a word; what the fp16 products lose is far below what rounds to the smallest code.
template <class Target, int Count>
__device__ __forceinline__ uint32_t shifted(uint32_t codes, const uint32_t (&factors)[Count]) {
#if __CUDA_ARCH__ >= 890
  uint32_t a, b, out;
  if constexpr (Target::kId == E4M3::kId) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e5m2x2 %0, low; cvt.rn.f16x2.e5m2x2 %1, high;}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    asm("mul.rn.f16x2 %0, %0, %2; mul.rn.f16x2 %1, %1, %2;" : "+r"(a), "+r"(b) : "r"(factors[i]));
  }
  if constexpr (Target::kId == E4M3::kId) {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f16x2 low, %1; cvt.rn.satfinite.e4m3x2.f16x2 high, %2; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "r"(a), "r"(b));
  } else {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f16x2 low, %1; cvt.rn.satfinite.e5m2x2.f16x2 high, %2; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "r"(a), "r"(b));
  }
  return out;
#else
  return codes;  // only devices with FP8 matrix units multiply such operands
#endif
}

}  // namespace cuda
}  // namespace blockfp
