// The largest magnitude pattern of adjacent elements. Included by each instruction set's file, after lanes_cpu.h.
//
// Patterns without their sign bits, as integers, order like the magnitudes, with NaN above Inf.
#pragma once

#include "lanes_cpu.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Largest magnitude pattern of n elements; NaN counts by its bits. `Ahead` prefetches following memory, for passes that do
// nothing else.
template <class T, bool Ahead = false>
BLOCKFP_HD uint32_t largest_pattern(const typename T::Raw* p, int64_t n) {
  [[maybe_unused]] constexpr int64_t kAhead = 4096 / sizeof(typename T::Raw);
  uint32_t most = 0;
  int64_t i = 0;
#if defined(__AVX512BW__) || defined(__AVX2__)
  if (n >= kUnit) {
    __m128i eighth;
    if constexpr (T::kId == Fp32::kId) {
      const __m256i mask = _mm256_set1_epi32(T::kRawMagnitude);
#if defined(__AVX512BW__)
      __m512i whole = _mm512_setzero_si512();
      for (; i + kUnit <= n; i += kUnit) {
        if constexpr (Ahead) __builtin_prefetch(p + i + kAhead);
        whole = _mm512_max_epi32(whole, _mm512_and_si512(load<__m512i>(p + i), _mm512_set1_epi32(T::kRawMagnitude)));
      }
      __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(whole), _mm512_extracti64x4_epi64(whole, 1));
      half = _mm256_and_si256(half, mask);
#else
      __m256i half = _mm256_setzero_si256(), other = half;
      for (; i + kUnit <= n; i += kUnit) {
        if constexpr (Ahead) __builtin_prefetch(p + i + kAhead);
        half = _mm256_max_epi32(half, _mm256_and_si256(load<__m256i>(p + i), mask));
        other = _mm256_max_epi32(other, _mm256_and_si256(load<__m256i>(p + i + 8), mask));
      }
      half = _mm256_max_epi32(half, other);
#endif
      eighth = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      eighth = _mm_max_epi32(eighth, _mm_shuffle_epi32(eighth, 0x4E));
      eighth = _mm_max_epi32(eighth, _mm_shuffle_epi32(eighth, 0xB1));
      most = static_cast<uint32_t>(_mm_cvtsi128_si32(eighth));
    } else {
      const __m256i mask = _mm256_set1_epi16(T::kRawMagnitude);
      __m256i half = _mm256_setzero_si256();
      for (; i + kUnit <= n; i += kUnit) {
        if constexpr (Ahead) __builtin_prefetch(p + i + kAhead);
        half = _mm256_max_epu16(half, _mm256_and_si256(load<__m256i>(p + i), mask));
      }
      eighth = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      // The only horizontal instruction is a minimum.
      eighth = _mm_minpos_epu16(_mm_xor_si128(eighth, _mm_set1_epi16(-1)));
      most = static_cast<uint32_t>(~_mm_cvtsi128_si32(eighth)) & 0xFFFF;
    }
  }
#endif
  for (; i < n; ++i) {
    const uint32_t magnitude = p[i] & T::kRawMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

#if defined(__AVX512BW__) || defined(__AVX2__)
// Eight partial maxima of a block of 16-bit patterns, whose length is a multiple of 16.
template <class T>
BLOCKFP_HD __m128i eighths_of_block(const uint16_t* p, int64_t length) {
  __m256i half;
#if defined(__AVX512BW__)
  if (length >= 32) {
    const __m512i mask = _mm512_set1_epi16(T::kRawMagnitude);
    __m512i whole = _mm512_and_si512(load<__m512i>(p), mask);
    for (int64_t i = 32; i < length; i += 32) {
      whole = _mm512_max_epu16(whole, _mm512_and_si512(load<__m512i>(p + i), mask));
    }
    half = _mm256_max_epu16(_mm512_castsi512_si256(whole), _mm512_extracti64x4_epi64(whole, 1));
  } else
#endif
  {
    const __m256i mask = _mm256_set1_epi16(T::kRawMagnitude);
    half = _mm256_and_si256(load<__m256i>(p), mask);
    for (int64_t i = 16; i < length; i += 16) half = _mm256_max_epu16(half, _mm256_and_si256(load<__m256i>(p + i), mask));
  }
  return _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Writes the amax bits of eight adjacent blocks of 16-bit elements to amax[0..7]; returns false, and writes nothing, if one
// contains a NaN.
//
// The eight maxima are reduced together: each step interleaves two vectors and halves the partial maxima of each block.
template <class T>
BLOCKFP_HD bool amax_of_eight(const uint16_t* p, int64_t length, int32_t* amax) {
  __m128i step[8];
  for (int b = 0; b < 8; ++b) step[b] = eighths_of_block<T>(p + b * length, length);
  for (int b = 0; b < 4; ++b) {
    const __m128i even = step[2 * b], odd = step[2 * b + 1];
    step[b] = _mm_max_epu16(_mm_unpacklo_epi16(even, odd), _mm_unpackhi_epi16(even, odd));
  }
  for (int b = 0; b < 2; ++b) {
    const __m128i even = step[2 * b], odd = step[2 * b + 1];
    step[b] = _mm_max_epu16(_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd));
  }
  const __m128i most = _mm_max_epu16(_mm_unpacklo_epi64(step[0], step[1]), _mm_unpackhi_epi64(step[0], step[1]));
  if (_mm_movemask_epi8(_mm_cmpgt_epi16(most, _mm_set1_epi16(T::kRawInfinity))) != 0) return false;
  if constexpr (T::kId == Fp16::kId) {
    store(amax, _mm256_cvtph_ps(most));
  } else {
    store(amax, _mm256_slli_epi32(_mm256_cvtepu16_epi32(most), 16));
  }
  return true;
}
#endif

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
