// Storage of Adam's moments: fp32, bf16 or FP8 with a scale per 128 elements, rounded stochastically; and their random bytes.
#pragma once

#include "blockfp/adamw.h"
#include "four_elements.cuh"

namespace blockfp {
namespace cuda {

__device__ __forceinline__ Words<uint32_t> key_of(const StepEntry& e, uint32_t what) {
  const int32_t step = e.step_at != nullptr ? static_cast<int32_t>(*e.step_at) : e.step;
  return rounding_key(e.key0, e.key1, static_cast<uint32_t>(step), e.parameter, what);
}

// Two random bytes for each of four adjacent elements, little-endian.
using RandomFour = Words<uint32_t>;

__device__ __forceinline__ uint32_t random_of(const RandomFour& random, int i) {
  return (i < 2 ? random.w0 : random.w1) >> (16 * (i % 2)) & 0xFFFF;
}

__device__ __forceinline__ RandomFour random_counter(const Words<uint32_t>& key, uint64_t counter) {
  return threefry2x32<uint32_t>(key.w0, key.w1, counter >> 32, static_cast<uint32_t>(counter));
}

// The random bytes of elements index .. index + 3, for any index.
static __device__ __noinline__ RandomFour random_four(uint32_t key0, uint32_t key1, uint64_t index) {
  const Words<uint32_t> key{key0, key1};
  const RandomFour own = random_counter(key, index >> 2), next = random_counter(key, (index >> 2) + 1);
  const int skip = 16 * (index & 1);
  if ((index & 2) == 0) return {__funnelshift_r(own.w0, own.w1, skip), __funnelshift_r(own.w1, next.w0, skip)};
  return {__funnelshift_r(own.w1, next.w0, skip), __funnelshift_r(next.w0, next.w1, skip)};
}

struct MomentKeys {
  Words<uint32_t> first, second;
};

struct RandomPair {
  RandomFour first, second;  // for each moment
};

// Four elements share a counter if rows begin at multiples of four (`fours`).
__device__ __forceinline__ RandomPair random_pair(const MomentKeys& keys, uint64_t index, bool fours) {
  if (fours) return {random_counter(keys.first, index >> 2), random_counter(keys.second, index >> 2)};
  return {random_four(keys.first.w0, keys.first.w1, index), random_four(keys.second.w0, keys.second.w1, index)};
}

template <Moments M>
constexpr int kMomentBytes = M == Moments::kFp32 ? 4 : (M == Moments::kBf16 ? 2 : 1);

// Converts a stored moment to fp32.
template <Moments M, bool Second>
__device__ __forceinline__ Four moment_of(const Raw& raw, float scale) {
  if constexpr (M == Moments::kFp32) return floats_of<Fp32>(raw);
  if constexpr (M == Moments::kBf16) return floats_of<Bf16>(raw);
  Four out = values_of_e4m3(raw.word[0]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.x[i] = multiply(out.x[i], scale);
    if constexpr (Second) out.x[i] = multiply(out.x[i], out.x[i]);
  }
  return out;
}

// fp8_scale for powers of two and E4M3, without its divisions: 448 is 1.75 * 2^8, so the exponent of 448 / amax follows from
// the amax's and from whether its mantissa is above 1.75.
__device__ __forceinline__ BlockScale<float> moment_scale(int32_t amax) {
  int32_t exponent = 127 + 127 + 8 - (amax >> 23) - ((amax & 0x7FFFFF) > 0x600000 ? 1 : 0);
  exponent = min(exponent, 254);
  if (amax == 0 || amax == kInfinity) exponent = 127;
  return {max((254 - exponent) << 23, 0x400000), from_bits<float>(exponent << 23)};
}

// encode_moment in fewer steps. Scaled by 2^-120, a number's fp32 pattern is E4M3's code followed by 20 fraction bits: fp32's
// subnormals begin where E4M3's do. The scaled pattern is truncated, not rounded, and keeps the 17 bits that decide.
template <bool Second>
__device__ __forceinline__ uint32_t moment_code(float x, float multiplier, uint32_t random) {
  const float y = multiply(x, multiplier);
  const uint32_t pattern = __float_as_uint(__fmul_rz(fabsf(y), 0x1p-120f));
  uint32_t code = min((pattern + (2 * random + 1) * 8) >> 20, static_cast<uint32_t>(E4M3::kMaxCode));
  if (y != y) code = E4M3::kNanCode;
  if constexpr (Second) {
    return x > 0.0f ? max(code, 1u) : code;
  } else {
    return code | (__float_as_uint(y) >> 24 & 0x80);
  }
}

// Converts a moment to its storage; every lane of the warp must call it with its part of the same row. FP8's scale is written
// to `scale`.
template <Moments M, bool Second>
__device__ __forceinline__ Raw kept_moment(Four v, const RandomFour& random, float& scale) {
  if constexpr (M == Moments::kFp32) return raw_of(v);
  Raw out{};
  if constexpr (M == Moments::kBf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pattern = narrow_stochastic<float>(v.x[i], random_of(random, i));
      out.word[i / 2] |= (pattern & 0xFFFF) << (16 * (i % 2));
    }
  } else {
    if constexpr (Second) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[i] = square_root(v.x[i]);
    }
    const BlockScale<float> s = moment_scale(__reduce_max_sync(0xFFFFFFFFu, largest_of(v)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.word[0] |= moment_code<Second>(v.x[i], s.multiplier, random_of(random, i)) << (8 * i);
    }
    scale = from_bits<float>(s.stored);
  }
  return out;
}

}  // namespace cuda
}  // namespace blockfp
