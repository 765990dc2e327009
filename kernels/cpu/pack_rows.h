// Packs rows of codes, one per byte, into 4 or 6 bits, and unpacks them.
//
// Included by each instruction set's file, after lanes_cpu.h.
#pragma once

#include "lanes_cpu.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Packs n codes; doesn't write past the row.
template <int Bits>
BLOCKFP_HD void pack_row(const uint8_t* codes, int64_t n, uint8_t* out) {
  constexpr int kGroup = Packing<Bits>::kGroup, kBytes = Packing<Bits>::kGroupBytes;
  int64_t i = 0;
#if defined(__AVX512BW__) || defined(__AVX2__)
  if constexpr (Bits == 4) {
    const __m128i weights = _mm_set1_epi16(0x1001);
    for (; i + 32 <= n; i += 32, out += 16) {
      __m128i low = _mm_maddubs_epi16(load<__m128i>(codes + i), weights);
      __m128i high = _mm_maddubs_epi16(load<__m128i>(codes + i + 16), weights);
      store(out, _mm_packus_epi16(low, high));
    }
  } else {
    const __m128i pairs = _mm_set1_epi16(0x4001), fours = _mm_set1_epi32(0x10000001);
    const __m128i three_of_four = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    // Stores 16 bytes for 12: at least 4 more bytes of this row follow.
    for (; i + 24 <= n; i += 16, out += 12) {
      __m128i words = _mm_madd_epi16(_mm_maddubs_epi16(load<__m128i>(codes + i), pairs), fours);
      store(out, _mm_shuffle_epi8(words, three_of_four));
    }
  }
#endif
  for (; i < n; i += kGroup, out += kBytes) {
    uint8_t group[kGroup] = {};
    for (int k = 0; k < kGroup && i + k < n; ++k) group[k] = codes[i + k];
    const uint32_t word = pack_group<Bits>(group);
    for (int b = 0; b < kBytes; ++b) out[b] = static_cast<uint8_t>(word >> (8 * b));
  }
}

// Unpacks n codes; may write up to 3 bytes more.
template <int Bits>
BLOCKFP_HD void unpack_row(const uint8_t* packed, int64_t n, uint8_t* codes) {
  constexpr int kGroup = Packing<Bits>::kGroup, kBytes = Packing<Bits>::kGroupBytes;
  int64_t i = 0;
#if defined(__AVX512BW__) || defined(__AVX2__)
  if constexpr (Bits == 4) {
    const __m128i nibble = _mm_set1_epi8(0xF);
    for (; i + 32 <= n; i += 32, packed += 16) {
      __m128i bytes = load<__m128i>(packed);
      __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
      store(codes + i, _mm_unpacklo_epi8(even, odd));
      store(codes + i + 16, _mm_unpackhi_epi8(even, odd));
    }
  } else {
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    // Loads 16 bytes for 12: at least 4 more bytes of this row follow.
    for (; i + 24 <= n; i += 16, packed += 12) {
      __m128i words = _mm_shuffle_epi8(load<__m128i>(packed), spread);
      __m128i first = _mm_and_si128(words, _mm_set1_epi32(0x3F));
      __m128i second = _mm_and_si128(_mm_slli_epi32(words, 2), _mm_set1_epi32(0x3F00));
      __m128i third = _mm_and_si128(_mm_slli_epi32(words, 4), _mm_set1_epi32(0x3F0000));
      __m128i fourth = _mm_and_si128(_mm_slli_epi32(words, 6), _mm_set1_epi32(0x3F000000));
      store(codes + i, _mm_or_si128(_mm_or_si128(first, second), _mm_or_si128(third, fourth)));
    }
  }
#endif
  for (; i < n; i += kGroup, packed += kBytes) {
    uint32_t word = 0;
    for (int b = 0; b < kBytes; ++b) word |= static_cast<uint32_t>(packed[b]) << (8 * b);
    unpack_group<Bits>(word, codes + i);
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
