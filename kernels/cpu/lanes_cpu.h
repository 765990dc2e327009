// The lane types of the instruction set that this file is compiled for, and operations with special instructions: 16 elements
// at a time ("a unit") are loaded as fp32, stored as codes, or compared for the largest magnitude.
//
// Included once by each of avx512.cc, avx2.cc and scalar.cc, outside of any namespace; BLOCKFP_ISA names theirs.
#pragma once

#include <cstring>

#include "blockfp/dtypes.h"
#include "blockfp/packing.h"

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace blockfp {

#if defined(__AVX512BW__)
typedef float FloatLanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t UIntLanes __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef float FloatLanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
typedef uint32_t UIntLanes __attribute__((vector_size(32)));
#endif

#if defined(__AVX512BW__) || defined(__AVX2__)
template <>
struct LaneTypes<FloatLanes> {
  using Int = IntLanes;
  using UInt = UIntLanes;
  BLOCKFP_HD static FloatLanes to_float(IntLanes x) { return __builtin_convertvector(x, FloatLanes); }
  BLOCKFP_HD static IntLanes truncate(FloatLanes x) { return __builtin_convertvector(x, IntLanes); }
};
#endif

namespace BLOCKFP_ISA {

constexpr int kUnit = 16;

#if defined(__AVX512BW__) || defined(__AVX2__)
using F = FloatLanes;
using I = IntLanes;
#else
using F = float;
using I = int32_t;
#endif
constexpr int kLanes = sizeof(F) / sizeof(float);
constexpr int kVectors = kUnit / kLanes;  // vectors of lanes in a unit

template <class V>
BLOCKFP_HD V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
BLOCKFP_HD void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// Loads kLanes unsigned bytes as integers.
BLOCKFP_HD I load_bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  return bit_cast<I>(_mm512_cvtepu8_epi32(load<__m128i>(p)));
#elif defined(__AVX2__)
  return bit_cast<I>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return *p;
#endif
}

// Loads kLanes unsigned 16-bit integers, at any address, as integers.
BLOCKFP_HD I load_halves(const uint8_t* p) {
#if defined(__AVX512BW__)
  return bit_cast<I>(_mm512_cvtepu16_epi32(load<__m256i>(p)));
#elif defined(__AVX2__)
  return bit_cast<I>(_mm256_cvtepu16_epi32(load<__m128i>(p)));
#else
  return load<uint16_t>(p);
#endif
}

// Looks up entries of a table of eight.
BLOCKFP_HD F look_up_eight(const float* table, I index) {
#if defined(__AVX512BW__)
  return bit_cast<F>(_mm512_permutexvar_ps(bit_cast<__m512i>(index), _mm512_broadcast_f32x8(load<__m256>(table))));
#elif defined(__AVX2__)
  return bit_cast<F>(_mm256_permutevar8x32_ps(load<__m256>(table), bit_cast<__m256i>(index)));
#else
  return table[index];
#endif
}

// Loads kLanes patterns of T as fp32.
template <class T>
BLOCKFP_HD F load_floats(const typename T::Raw* p) {
  if constexpr (T::kId == Fp32::kId) {
    return load<F>(p);
  } else {
#if defined(__AVX512BW__)
    __m256i raw = load<__m256i>(p);
    if constexpr (T::kId == Fp16::kId) return bit_cast<F>(_mm512_cvtph_ps(raw));
    return bit_cast<F>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#elif defined(__AVX2__)
    __m128i raw = load<__m128i>(p);
    if constexpr (T::kId == Fp16::kId) return bit_cast<F>(_mm256_cvtph_ps(raw));
    return bit_cast<F>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
#else
    return from_bits<F>(widen<T, F>(*p));
#endif
  }
}

// Stores the low bytes of one unit's codes.
BLOCKFP_HD void store_codes(const I (&codes)[kVectors], uint8_t* out) {
#if defined(__AVX512BW__)
  store(out, _mm512_cvtepi32_epi8(bit_cast<__m512i>(codes[0])));
#elif defined(__AVX2__)
  const __m256i byte = _mm256_set1_epi32(0xFF);
  __m256i words = _mm256_packus_epi32(_mm256_and_si256(bit_cast<__m256i>(codes[0]), byte),
                                      _mm256_and_si256(bit_cast<__m256i>(codes[1]), byte));
  words = _mm256_permute4x64_epi64(words, 0xD8);
  store(out, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  for (int i = 0; i < kUnit; ++i) out[i] = static_cast<uint8_t>(codes[i]);
#endif
}

// Stores kLanes fp32 values rounded once to T, with canonical NaN.
template <class T>
BLOCKFP_HD void store_floats(F x, typename T::Raw* out) {
  I bits = canonical<F>(to_bits(x));
  if constexpr (T::kId == Fp32::kId) {
    store(out, bits);
  } else {
#if defined(__AVX512BW__)
    if constexpr (T::kId == Fp16::kId) {
      store(out, _mm512_cvtps_ph(bit_cast<__m512>(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      store(out, _mm512_cvtepi32_epi16(bit_cast<__m512i>(narrow<T, F>(bits))));
    }
#elif defined(__AVX2__)
    if constexpr (T::kId == Fp16::kId) {
      store(out, _mm256_cvtps_ph(bit_cast<__m256>(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      __m256i words = bit_cast<__m256i>(narrow<T, F>(bits));
      store(out, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
#else
    *out = static_cast<uint16_t>(narrow<T, F>(bits));
#endif
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
