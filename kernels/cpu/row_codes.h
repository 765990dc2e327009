// One row of a matrix: codes from the blocks' multipliers, values from codes, and random bytes.
//
// A row is divided into units of 16 elements, counted from the start of the unsharded row (`phase` is this row's offset in its
// block), so that a unit is never in two blocks. Included by each instruction set's file, after lanes_cpu.h.
#pragma once

#include "blockfp/scales.h"
#include "blockfp/threefry.h"
#include "lanes_cpu.h"
#include "bf16_avx512.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Codes of a unit, all in one block. Here and below, `Random` is the number of random bytes per element: 0 rounds to nearest,
// else 1 or 2.
template <class E, class T, int Random>
BLOCKFP_HD void encode_unit(const typename T::Raw* x, float multiplier, const uint8_t* random, uint8_t* out) {
  const F factor = splat<F>(multiplier);
  I codes[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const F y = multiply(load_floats<T>(x + v * kLanes), factor);
    if constexpr (Random == 1) {
      codes[v] = encode_stochastic<E, F>(y, load_bytes(random + v * kLanes));
    } else if constexpr (Random == 2) {
      codes[v] = encode_stochastic<E, F, 16>(y, load_halves(random + 2 * v * kLanes));
    } else {
      codes[v] = encode_nearest<E, F>(y);
    }
  }
  store_codes(codes, out);
}

template <class E, class T, int Random>
BLOCKFP_HD void encode_part(const typename T::Raw* x, int64_t n, float multiplier, const uint8_t* random, uint8_t* out) {
  typename T::Raw padded[kUnit] = {};
  uint8_t bytes[kUnit * 2] = {}, codes[kUnit];
  for (int64_t i = 0; i < n; ++i) padded[i] = x[i];
  for (int64_t i = 0; i < n * Random; ++i) bytes[i] = random[i];
  encode_unit<E, T, Random>(padded, multiplier, bytes, codes);
  for (int64_t i = 0; i < n; ++i) out[i] = codes[i];
}

// Codes of n elements, one per byte. Element i has the multiplier of block (phase + i) >> shift. `ahead` is a row that is read
// soon: encoding is bound by arithmetic, so prefetching it is free.
template <class E, class T, int Random>
BLOCKFP_HD void encode_row(const typename T::Raw* x, int64_t n, const float* multipliers, int64_t phase, int shift,
                           const typename T::Raw* ahead, const uint8_t* random, uint8_t* out) {
  const int64_t before_unit = -phase & (kUnit - 1), head = before_unit < n ? before_unit : n;
  int64_t i = head;
  if (head > 0) encode_part<E, T, Random>(x, head, multipliers[phase >> shift], random, out);
#if defined(__AVX512BW__)
  if constexpr (T::kId == Bf16::kId && Random == 0) {
    for (; i + 2 * kUnit <= n; i += 2 * kUnit) {
      __builtin_prefetch(ahead + i);
      const int64_t column = phase + i;
      encode_two_units<E>(x + i, multipliers[column >> shift], multipliers[(column + kUnit) >> shift], out + i);
    }
  }
#endif
  for (; i + kUnit <= n; i += kUnit) {
    __builtin_prefetch(ahead + i);
    encode_unit<E, T, Random>(x + i, multipliers[(phase + i) >> shift], Random > 0 ? random + i * Random : nullptr, out + i);
  }
  if (i < n) {
    encode_part<E, T, Random>(x + i, n - i, multipliers[(phase + i) >> shift], Random > 0 ? random + i * Random : nullptr, out + i);
  }
}

// A decode scale as two factors, applied one after the other: multiplying by a subnormal scale takes microcode for every
// element, and all-zero blocks have one. The first factor is exact.
struct Factors {
  float first, second;
};

BLOCKFP_HD Factors split_scale(float scale) {
  if (to_bits(scale) == 0x400000) return {0.5f, bit_cast<float>(0x800000)};
  return {1.0f, scale};
}

BLOCKFP_HD bool is_ordinary(float scale) {
  const int32_t field = to_bits(scale) & kInfinity;
  return field != 0 && field != kInfinity;
}

template <class E, class T>
BLOCKFP_HD void decode_unit(const uint8_t* codes, Factors factors, typename T::Raw* out) {
  const F first = splat<F>(factors.first), second = splat<F>(factors.second);
  for (int v = 0; v < kVectors; ++v) {
    const F value = decode<E, F>(load_bytes(codes + v * kLanes));
    store_floats<T>(multiply(multiply(value, first), second), out + v * kLanes);
  }
}

template <class E, class T>
BLOCKFP_HD void decode_part(const uint8_t* codes, int64_t n, Factors factors, typename T::Raw* out) {
  uint8_t padded[kUnit] = {};
  typename T::Raw values[kUnit];
  for (int64_t i = 0; i < n; ++i) padded[i] = codes[i];
  decode_unit<E, T>(padded, factors, values);
  for (int64_t i = 0; i < n; ++i) out[i] = values[i];
}

// Values of n codes, one per byte; factors are indexed like the multipliers of encode_row. `ordinary`: no factor is zero,
// subnormal, Inf or NaN.
template <class E, class T>
BLOCKFP_HD void decode_row(const uint8_t* codes, int64_t n, const Factors* factors,
                           [[maybe_unused]] bool ordinary, int64_t phase, int shift, typename T::Raw* out) {
  const int64_t before_unit = -phase & (kUnit - 1), head = before_unit < n ? before_unit : n;
  int64_t i = head;
  if (head > 0) decode_part<E, T>(codes, head, factors[phase >> shift], out);
#if defined(__AVX512BW__)
  if constexpr (T::kId == Bf16::kId && !E::kComplement) {
    for (; ordinary && i + 2 * kUnit <= n; i += 2 * kUnit) {
      const int64_t column = phase + i;
      decode_two_units<E>(codes + i, factors[column >> shift].second, factors[(column + kUnit) >> shift].second, out + i);
    }
  }
#endif
  for (; i + kUnit <= n; i += kUnit) decode_unit<E, T>(codes + i, factors[(phase + i) >> shift], out + i);
  if (i < n) decode_part<E, T>(codes + i, n - i, factors[(phase + i) >> shift], out + i);
}

// Random bytes of elements index .. index + n of the unsharded array, `Random` each. Returns their start in `buffer`, which has
// room for n * Random + 8 + 8 * kLanes bytes.
template <int Random>
BLOCKFP_HD const uint8_t* random_row(uint32_t k0, uint32_t k1, uint64_t index, int64_t n, uint8_t* buffer) {
  using U = UInt<F>;
  constexpr int kServed = 8 / Random;  // elements of a counter
  const uint64_t begin = index / kServed, end = (index + n + kServed - 1) / kServed;
  uint8_t* out = buffer;
  for (uint64_t counter = begin; counter < end; counter += kLanes, out += 8 * kLanes) {
    uint32_t low[kLanes], high[kLanes], words[2 * kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = static_cast<uint32_t>(counter + lane);
      high[lane] = static_cast<uint32_t>((counter + lane) >> 32);
    }
    const Words<U> w = threefry2x32<U>(k0, k1, load<U>(high), load<U>(low));
    store(low, w.w0);
    store(high, w.w1);
    for (int lane = 0; lane < kLanes; ++lane) {
      words[2 * lane] = low[lane];
      words[2 * lane + 1] = high[lane];
    }
    __builtin_memcpy(out, words, sizeof(words));
  }
  return buffer + index % kServed * Random;
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
