// Eight codes at a time, packed: rounding by the GPU's conversions, and by arithmetic where it has none.
//
// The bits are those of elements.h (tests compare the two). FP6 uses the 8-bit conversions: E3M2 is the low part of E5M2 and
// E2M3 of E4M3, including the spacing below the smallest normal, after multiplication by 2^-12 or 2^-6.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "blockfp/elements.h"
#include "blockfp/packing.h"
#include "blockfp/threefry.h"
#include "fp8.cuh"

namespace blockfp {
namespace cuda {

// Multiplies a block's multiplier, exactly, by the factor that encode_eight<E> expects.
template <class E>
__device__ __forceinline__ float prescaled(float multiplier) {
  if constexpr (E::kId == E3M2::kId) return multiply(multiplier, 0x1p-12f);
  if constexpr (E::kId == E2M3::kId) return multiply(multiplier, 0x1p-6f);
  return multiplier;
}

// Narrows four 8-bit codes of prescaled numbers to four 6-bit codes: 24 bits.
__device__ __forceinline__ uint32_t narrow_to_six(uint32_t codes) {
  const uint32_t above = (codes | (codes << 1)) & 0x40404040u;  // a magnitude beyond 31
  codes |= (above >> 1) - (above >> 6);
  const uint32_t six = (codes & 0x1F1F1F1Fu) | ((codes & 0x80808080u) >> 2);
  const uint32_t twelve = (six & 0x003F003Fu) | ((six & 0x3F003F00u) >> 2);
  return (twelve & 0xFFFu) | ((twelve >> 4) & 0xFFF000u);
}

__device__ __forceinline__ float saturated(float a, float b, float c) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
  return out;
}

// A float whose low bits are the E2M1 magnitude of |y|, with NaN as 0: the code is the concave function min(2 y, y + 2, y / 2 +
// 4, 7) rounded, computed as the sum of three saturating pieces and of a number whose last place is 1.
__device__ __forceinline__ float e2m1_magnitude(float y) {
  y = fabsf(y);
  const float first = __saturatef(__fmul_rn(y, 0.5f)), second = saturated(y, 0.5f, -1.0f), third = saturated(y, 0.5f, -2.0f);
  return __fadd_rn(__fmaf_rn(second, 2.0f, __fmaf_rn(first, 4.0f, 0x1.8p23f)), third);
}

// The larger magnitude of two numbers with the sign of the first; the second is positive.
__device__ __forceinline__ float larger_with_sign(float a, float b) {
#if __CUDA_ARCH__ >= 860
  float out;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return copysignf(fmaxf(fabsf(a), fabsf(b)), a);
#endif
}

// Sign bits of eight floats, each in the top bit of its nibble.
__device__ __forceinline__ uint32_t nibble_signs(const float* y) {
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(y[i]);
  const uint32_t even = __byte_perm(__byte_perm(bits[0], bits[2], 0x0073), __byte_perm(bits[4], bits[6], 0x0073), 0x5410);
  const uint32_t odd = __byte_perm(__byte_perm(bits[1], bits[3], 0x0073), __byte_perm(bits[5], bits[7], 0x0073), 0x5410);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// Codes of eight numbers (already multiplied by prescaled<E>), packed into 8, 6 or 4 bytes. A NaN of E2M1 needs mark_nan.
template <class E>
__device__ __forceinline__ uint2 encode_eight(const float (&y)[8]) {
  constexpr bool kWide = E::kMantissaBits == 2;
  if constexpr (E::kId == Int8::kId) {
    uint32_t r[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float inside = fmaxf(fminf(y[i], 127.0f / 64), -127.0f / 64);
      r[i] = __float_as_uint(__fmaf_rn(inside, 64.0f, 0x1.8p23f));
    }
    return {__byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410),
            __byte_perm(__byte_perm(r[4], r[5], 0x0040), __byte_perm(r[6], r[7], 0x0040), 0x5410)};
  } else if constexpr (E::kBits == 8) {
    return {convert_four<kWide>(y), convert_four<kWide>(y + 4)};
  } else if constexpr (E::kBits == 6) {
    const uint32_t low = narrow_to_six(convert_four<kWide>(y)), high = narrow_to_six(convert_four<kWide>(y + 4));
    return {low | (high << 24), high >> 8};
  } else {
    uint32_t word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) word = word * 16 + __float_as_uint(e2m1_magnitude(y[i]));
    // Eight times the base's bits, each at its position.
    constexpr uint32_t kBase = 0x4B400000u * 0x11111111u;
    return {word - kBase + nibble_signs(y), 0};
  }
}

// Bits of `a` where the mask is 1, of `b` elsewhere.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

// This factor maps E2M1's subnormal spacing to four of E4M3's, so that conversions to E4M3 give four times E2M1's codes.
constexpr float kE2m1Down = 0x1p-6f;

// E2M1 codes of eight numbers of magnitude below 7, passed times kE2m1Down.
__device__ __forceinline__ uint32_t encode_below_seven(const float (&y)[8]) {
  float nearest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float power = larger_with_sign(from_bits<float>(to_bits(y[i]) & ~0x7FFFFF), kE2m1Down);
    // A sum whose last place is E2M1's spacing at y. Subtracting slightly less (by a fourth of the power) leaves a remainder
    // that the conversion drops, except for the sign, which it keeps if the nearest code is 0.
    nearest[i] = __fmaf_rn(power, -(0x1p22f - 0.25f), __fmaf_rn(power, 0x1p22f, y[i]));
  }
  const float even[4] = {nearest[0], nearest[2], nearest[4], nearest[6]}, odd[4] = {nearest[1], nearest[3], nearest[5], nearest[7]};
  const uint32_t low = convert_four<false>(even), high = convert_four<false>(odd);
  return select_bits(0x0F0F0F0Fu, select_bits(0x07070707u, low >> 2, low >> 4), select_bits(0x70707070u, high << 2, high));
}

// Two bfloat16 numbers of magnitude below 8 as E2M1 codes with signs, each in the low bits of its half; bits above the low byte
// are arbitrary. Computes e2m1_magnitude in fp16, which represents all relevant bits of such numbers and whose last place from
// 1024 on is 1.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t y) {
  const auto half = [](float x) { return __float2half2_rn(x); };
  // Reduces the exponents' bias by 112; magnitudes below 2^-15 count as 2^-15.
  const uint32_t least = 0x38003800u;
  const uint32_t magnitude = bit_cast<uint32_t>(__hmax2(__habs2(bit_cast<__nv_bfloat162>(y)), bit_cast<__nv_bfloat162>(least)));
  const __half2 h = bit_cast<__half2>(magnitude * 8 - least * 8);
  const __half2 first = __hmul2_sat(h, half(0.5f)), second = __hfma2_sat(h, half(0.5f), half(-1.0f));
  const __half2 third = __hfma2_sat(h, half(0.5f), half(-2.0f));
  const __half2 sum = __hadd2_rn(__hfma2(second, half(2.0f), __hfma2(first, half(4.0f), half(1536.0f))), third);
  return bit_cast<uint32_t>(sum) | ((y >> 12) & 0x00080008u);
}

// Packs the low bytes of both halves of four words to eight nibbles each: the lower halves' in `low`, the upper halves' in
// `high`.
__device__ __forceinline__ void low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t& low, uint32_t& high) {
  const uint32_t ab = __byte_perm(a, b, 0x6240), cd = __byte_perm(c, d, 0x6240);
  low = __byte_perm(ab, cd, 0x5410), high = __byte_perm(ab, cd, 0x7632);
}

// Two numbers as fp16, rounded toward zero; `low` in the lower half.
__device__ __forceinline__ uint32_t halves_toward_zero(float low, float high) {
  uint32_t out;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// The same with random bytes (eight, little-endian) for E2M1, of numbers that were divided by 2^14.
//
// fp16 numbers below 2^-14 are evenly spaced, as E2M1's are below 1: y / 2^14 in fp16, toward zero, is E2M1's code followed by
// the nine fraction bits that decide. Element i shares a word with element i + 4, in 16-bit fields of code, fraction and three
// zeros. Products are used rather than shifts, because the pipeline of integer products is idle here.
__device__ __forceinline__ uint32_t encode_eight_stochastic(const float (&y)[8], uint2 random) {
  const uint32_t bytes[2] = {__byte_perm(random.x, random.y, 0x5410), __byte_perm(random.x, random.y, 0x7632)};
  uint32_t nibble[4];  // sign and code in the top bits of each field
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t halves = halves_toward_zero(y[i], y[i + 4]);
    // 0x0E00 is the largest code; NaN becomes it too.
    const __half2 largest = bit_cast<__half2>(0x0E000E00u);
    const uint32_t magnitude = bit_cast<uint32_t>(__hmin2(__habs2(bit_cast<__half2>(halves)), largest));
    const uint32_t byte = (i % 2 == 0 ? bytes[i / 2] : bytes[i / 2] >> 8) & 0x00FF00FFu;
    // Adds 2 u + 1, for the random byte u, in eighths.
    nibble[i] = (byte * 16 + (magnitude * 8 + 0x00080008u)) | (halves & 0x80008000u);
  }
  const uint32_t low = (nibble[1] & 0xF000F000u) | ((nibble[0] >> 4) & 0x0FFF0FFFu);
  const uint32_t high = (nibble[3] & 0xF000F000u) | ((nibble[2] >> 4) & 0x0FFF0FFFu);
  return __byte_perm(low, high, 0x7351);
}

// Codes of any element by elements.h, with random bytes. Arguments are passed by value: an array would be in memory for every
// caller.
template <class E>
__device__ __noinline__ uint2 encode_eight_slowly(float4 first, float4 second, uint2 random) {
  const float y[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint64_t out = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const int32_t byte = ((i < 4 ? random.x : random.y) >> (8 * (i % 4))) & 0xFF;
    out = (out << E::kBits) | (encode_stochastic<E, float>(y[i], byte) & 0xFF);
  }
  return {static_cast<uint32_t>(out), static_cast<uint32_t>(out >> 32)};
}

// Writes E2M1's code for NaN where the conversions above have written another.
__device__ __forceinline__ uint32_t mark_nan(uint32_t codes, const float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (y[i] != y[i]) codes = (codes & ~(0xFu << (4 * i))) | (static_cast<uint32_t>(E2M1::kNanCode) << (4 * i));
  }
  return codes;
}

// Random bytes of elements index .. index + 7 of the unsharded array, little-endian.
static __device__ __noinline__ uint2 random_eight(const uint32_t* key, uint64_t index) {
  const uint32_t k0 = __ldg(key), k1 = __ldg(key + 1);
  const uint64_t counter = index >> 3;
  const auto words = threefry2x32<uint32_t>(k0, k1, counter >> 32, static_cast<uint32_t>(counter));
  const int skip = index & 7;
  if (skip == 0) return {words.w0, words.w1};
  const auto next = threefry2x32<uint32_t>(k0, k1, (counter + 1) >> 32, static_cast<uint32_t>(counter + 1));
  const uint32_t word[4] = {words.w0, words.w1, next.w0, next.w1};
  const int bits = 8 * (skip & 3);
  const uint32_t a = skip < 4 ? word[0] : word[1], b = skip < 4 ? word[1] : word[2], c = skip < 4 ? word[2] : word[3];
  return {__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits)};
}

// How a kernel rounds: kNearest and kStochastic are compile-time choices; kGeneral chooses at run time. For rows in groups,
// whose pieces may end inside a group, kGroups rounds to nearest and kGroupsGeneral chooses at run time.
enum class Rounding { kNearest, kStochastic, kGeneral, kGroups, kGroupsGeneral };

template <Rounding R>
constexpr bool kToNearest = R == Rounding::kNearest || R == Rounding::kGroups;
template <Rounding R>
constexpr bool kTold = R == Rounding::kGeneral || R == Rounding::kGroupsGeneral;
template <Rounding R>
constexpr bool kVectorRows = R != Rounding::kGeneral && R != Rounding::kGroupsGeneral;  // whether rows of codes begin at vector boundaries
template <Rounding R>
constexpr bool kOfGroups = R == Rounding::kGroups || R == Rounding::kGroupsGeneral;

// E2M1 codes including rare cases: a NaN, or magnitudes beyond the largest code. By value, as above.
static __device__ __noinline__ uint32_t encode_carefully(float4 first, float4 second) {
  const float y[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  return mark_nan(encode_eight<E2M1>(y).x, y);
}

// How E2M1 codes of a block are computed: with `kBounded` the caller knows for each block whether it needs care.
enum class Range { kAny, kBounded };

// Codes of eight numbers times a block's multiplier; `key` and `index` are only used for rounding chosen at run time.
//
// `care`: a block of these elements contains a NaN; for a bounded range, also if a number times the multiplier may be 7 or
// more, or if the multiplier is so small that kE2m1Down times it is inexact.
template <class E, Rounding R, Range Bounds = Range::kAny, class Value>
__device__ __forceinline__ uint2 encode_scaled(Value value_of, float multiplier, bool care, const uint32_t* key, uint64_t index) {
  static_assert(R != Rounding::kStochastic, "see stochastic_e2m1.cuh");
  const bool stochastic = kTold<R> && key != nullptr;
  const float factor = stochastic ? multiplier : prescaled<E>(multiplier);
  float y[8];
  if (E::kId == E2M1::kId && Bounds == Range::kBounded && !stochastic && !care) {
    const float down = multiply(multiplier, kE2m1Down);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply(value_of(i), down);
    return {encode_below_seven(y), 0};
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = multiply(value_of(i), factor);
  const float4 first{y[0], y[1], y[2], y[3]}, second{y[4], y[5], y[6], y[7]};
  if (stochastic) return encode_eight_slowly<E>(first, second, random_eight(key, index));
  if constexpr (E::kId == E2M1::kId) {
    if (care) return {encode_carefully(first, second), 0};
  }
  return encode_eight<E>(y);
}

// Transposes four words of four bytes.
__device__ __forceinline__ void transpose_four(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410), out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410), out[3] = __byte_perm(c, d, 0x7632);
}

// Transposes eight rows of eight 8- or 4-bit codes, which takes far fewer steps than encoding again.
template <int Bits>
__device__ __forceinline__ void transpose_eight(const uint2* rows, uint2 (&columns)[8]) {
  static_assert(Bits == 8 || Bits == 4, "6-bit codes are encoded again");
  if constexpr (Bits == 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2* r = rows + 4 * half;
      uint32_t low[4], high[4];
      transpose_four({r[0].x, r[1].x, r[2].x, r[3].x}, low);
      transpose_four({r[0].y, r[1].y, r[2].y, r[3].y}, high);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        (half == 0 ? columns[j].x : columns[j].y) = low[j];
        (half == 0 ? columns[j + 4].x : columns[j + 4].y) = high[j];
      }
    }
  } else {
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t swapped = ((rows[i].x >> 4) ^ rows[i + 1].x) & 0x0F0F0F0Fu;
      w[i] = rows[i].x ^ (swapped << 4), w[i + 1] = rows[i + 1].x ^ swapped;
    }
    uint32_t even[4], odd[4];
    // Bytes are now pairs of rows: w[2 k] has the even columns of rows 2 k and 2 k + 1, w[2 k + 1] the odd ones.
    transpose_four({w[0], w[2], w[4], w[6]}, even);
    transpose_four({w[1], w[3], w[5], w[7]}, odd);
#pragma unroll
    for (int k = 0; k < 4; ++k) columns[2 * k] = {even[k], 0}, columns[2 * k + 1] = {odd[k], 0};
  }
}

// Bytes of `count` codes that begin a group.
template <int Bits>
__device__ __forceinline__ int packed_bytes(int count) {
  return Bits == 8 ? count : (Bits == 4 ? (count + 1) / 2 : (count + 3) / 4 * 3);
}

// Stores eight codes at an address aligned to 8 bytes, or to 4 for 4-bit and 2 for 6-bit codes.
template <int Bits>
__device__ __forceinline__ void store_eight(uint8_t* out, uint2 codes) {
  if constexpr (Bits == 8) {
    *reinterpret_cast<uint2*>(out) = codes;
  } else if constexpr (Bits == 4) {
    *reinterpret_cast<uint32_t*>(out) = codes.x;
  } else {
    uint16_t* halves = reinterpret_cast<uint16_t*>(out);
    halves[0] = codes.x, halves[1] = codes.x >> 16, halves[2] = codes.y;
  }
}

// Packs a group of eight 8-bit codes, or two groups of smaller codes, to 2 or 3 words.
template <class E, int Words>
__device__ __forceinline__ void pack_groups(const uint2* codes, uint32_t (&words)[Words]) {
  static_assert(Words == (E::kBits == 6 ? 3 : 2), "eight or sixteen codes");
  words[0] = codes[0].x;
  if constexpr (E::kBits == 8) words[1] = codes[0].y;
  if constexpr (E::kBits == 4) words[1] = codes[1].x;
  if constexpr (E::kBits == 6) words[1] = codes[0].y | (codes[1].x << 16), words[2] = (codes[1].x >> 16) | (codes[1].y << 16);
}

// Stores such groups at an address aligned to 8, 8 or 4 bytes.
template <class E>
__device__ __forceinline__ void store_groups(uint8_t* out, const uint2* codes) {
  uint32_t words[E::kBits == 6 ? 3 : 2];
  pack_groups<E>(codes, words);
  if constexpr (E::kBits == 6) {
#pragma unroll
    for (int i = 0; i < 3; ++i) reinterpret_cast<uint32_t*>(out)[i] = words[i];
  } else {
    *reinterpret_cast<uint2*>(out) = {words[0], words[1]};
  }
}

}  // namespace cuda
}  // namespace blockfp
