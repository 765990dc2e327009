// bfloat16 with AVX-512: two adjacent units at once, in about two thirds of the steps of two single units.
//
// 32 patterns of 16 bits are 16 lanes of 32 bits: a shift and a mask separate even and odd elements, and their results are
// combined as the halves of a word. Signs and NaN are applied to all 32 at once. Included by row_codes.h.
#pragma once

#include "lanes_cpu.h"

#if defined(__AVX512BW__)
namespace blockfp {
namespace BLOCKFP_ISA {

// Lanes with each of two units' factor.
BLOCKFP_HD F two_factors(float first, float second) {
  return bit_cast<F>(_mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(first), _mm512_set1_ps(second)));
}

// Codes of two units, rounded to nearest.
template <class E>
BLOCKFP_HD void encode_two_units(const uint16_t* x, float first, float second, uint8_t* out) {
  const __m512i raw = load<__m512i>(x);
  const I magnitude = bit_cast<I>(raw) & 0x7FFF7FFF;
  const F factor = two_factors(first, second);
  const F even = multiply(from_bits<F>(magnitude << 16), factor);
  const F odd = multiply(from_bits<F>(magnitude & 0x7FFF0000), factor);
  const I low = magnitude_nearest<E, F>(to_bits(even)), high = magnitude_nearest<E, F>(to_bits(odd));
  const I words = (low & 0xFF) | ((high << 8) & ~0xFF);
  __m256i codes = _mm512_cvtepi32_epi16(bit_cast<__m512i>(words));
  const __mmask32 negative = _mm512_movepi16_mask(raw);
  if constexpr (E::kComplement) {
    codes = _mm256_mask_sub_epi8(codes, negative, _mm256_setzero_si256(), codes);
  } else {
    codes = _mm256_mask_add_epi8(codes, negative, codes, _mm256_set1_epi8(static_cast<char>(1 << (E::kBits - 1))));
  }
  const __mmask32 nan = _mm512_cmpgt_epi16_mask(bit_cast<__m512i>(magnitude), _mm512_set1_epi16(Bf16::kRawInfinity));
  store(out, _mm256_mask_mov_epi8(codes, nan, _mm256_set1_epi8(E::kNanCode)));
}

// Rounds fp32 bits to bfloat16, in the upper half.
BLOCKFP_HD I narrow_in_place(I bits) { return bits + 0x7FFF + (shift_right<F>(bits, 16) & 1); }

// bfloat16 patterns of magnitude codes below the smallest normal, which a shift of the code doesn't give.
template <class E>
struct Subnormals {
  alignas(64) uint16_t patterns[32];

  constexpr Subnormals() : patterns{} {
    for (int code = 1; code < 1 << E::kMantissaBits; ++code) {
      int exponent = 0;
      while (code >> (exponent + 1)) ++exponent;
      const int field = 127 + E::kEmin - E::kMantissaBits + exponent;
      patterns[code] = static_cast<uint16_t>((field << 7) | ((code << (7 - exponent)) & 0x7F));
    }
  }
};

template <class E>
constexpr Subnormals<E> kSubnormals{};

// Values of two units. Neither factor is zero, subnormal, Inf or NaN.
template <class E>
BLOCKFP_HD void decode_two_units(const uint8_t* codes, float first, float second, uint16_t* out) {
  const auto all = [](int value) __attribute__((always_inline)) { return _mm512_set1_epi16(static_cast<short>(value)); };
  const __m512i code = _mm512_cvtepu8_epi16(load<__m256i>(codes));
  const __m512i magnitude = _mm512_and_si512(code, all((1 << (E::kBits - 1)) - 1));
  const __mmask32 subnormal = _mm512_cmplt_epi16_mask(magnitude, all(1 << E::kMantissaBits));
  __m512i pattern = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 7 - E::kMantissaBits), all((127 - E::kBias) << 7));
  pattern = _mm512_mask_permutexvar_epi16(pattern, subnormal, magnitude, load<__m512i>(kSubnormals<E>.patterns));
  if constexpr (E::kId == E5M2::kId) {
    pattern = _mm512_mask_mov_epi16(pattern, _mm512_cmpeq_epi16_mask(magnitude, all(0x7C)), all(Bf16::kRawInfinity));
  }
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 16 - E::kBits), all(0x8000));
  const I lanes = bit_cast<I>(_mm512_or_si512(pattern, sign));
  const F factor = two_factors(first, second);
  const I even = narrow_in_place(to_bits(multiply(from_bits<F>(lanes << 16), factor)));
  const I odd = narrow_in_place(to_bits(multiply(from_bits<F>(lanes & ~0xFFFF), factor)));
  __m512i values = bit_cast<__m512i>(shift_right<F>(even, 16) | (odd & ~0xFFFF));
  if constexpr (E::kHasNan) {
    const __mmask32 nan = _mm512_cmpgt_epi16_mask(magnitude, all(E::kId == E5M2::kId ? 0x7C : E::kMaxCode));
    values = _mm512_mask_mov_epi16(values, nan, all(0x7FC0));
  }
  store(out, values);
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
#endif
