// E2M1 with random bytes, sixteen elements at a time.
//
// A function that isn't inlined: copies for every sixteen elements of a tile would exceed the instruction cache. It computes
// two counters at once, because the rounds of one depend on each other.
#pragma once

#include "block_scale.cuh"
#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

// Parameters of two groups of eight. A group's counter is the index of its first element, over eight.
struct TwoGroups {
  float multiplier[2];
  uint32_t key[2];
  uint64_t counter[2];
  bool careful;  // some block of them contains a NaN, or is so large that its multiplier over 2^14 is inexact
};

template <class T, bool Careful>
__device__ __forceinline__ uint2 stochastic_groups(const Eight<T> (&x)[2], float multiplier0, float multiplier1, uint32_t key0,
                                                   uint32_t key1, uint64_t counter0, uint64_t counter1) {
  uint32_t codes[2];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const uint64_t counter = g == 0 ? counter0 : counter1;
    const auto random = threefry2x32<uint32_t>(key0, key1, counter >> 32, static_cast<uint32_t>(counter));
    const float multiplier = g == 0 ? multiplier0 : multiplier1;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float v = value<T>(x[g], i);
      y[i] = Careful ? multiply(multiply(v, multiplier), 0x1p-14f) : multiply(v, multiply(multiplier, 0x1p-14f));
    }
    codes[g] = encode_eight_stochastic(y, {random.w0, random.w1});
    if (Careful) codes[g] = mark_nan(codes[g], y);
  }
  return {codes[0], codes[1]};
}

// Words are passed by value: an array would be in memory for every caller.
template <class T, bool Careful>
__device__ __noinline__ uint2 stochastic_words(uint4 first, uint4 second, float multiplier0, float multiplier1, uint32_t key0,
                                               uint32_t key1, uint64_t counter0, uint64_t counter1) {
  const Eight<T> x[2] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
  return stochastic_groups<T, Careful>(x, multiplier0, multiplier1, key0, key1, counter0, counter1);
}

template <bool Careful>
__device__ __noinline__ uint2 stochastic_fp32(uint4 a, uint4 b, uint4 c, uint4 d, float multiplier0, float multiplier1, uint32_t key0,
                                              uint32_t key1, uint64_t counter0, uint64_t counter1) {
  const Eight<Fp32> x[2] = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w}};
  return stochastic_groups<Fp32, Careful>(x, multiplier0, multiplier1, key0, key1, counter0, counter1);
}

template <class T, bool Careful>
__device__ __forceinline__ uint2 encode_stochastic_groups(const Eight<T>& x, const Eight<T>& y, const TwoGroups& g) {
  const auto four = [](const Eight<T>& e, int i) { return uint4{e.word[i], e.word[i + 1], e.word[i + 2], e.word[i + 3]}; };
  if constexpr (T::kId == Fp32::kId) {
    return stochastic_fp32<Careful>(four(x, 0), four(x, 4), four(y, 0), four(y, 4), g.multiplier[0], g.multiplier[1], g.key[0], g.key[1],
                                    g.counter[0], g.counter[1]);
  } else {
    return stochastic_words<T, Careful>(four(x, 0), four(y, 0), g.multiplier[0], g.multiplier[1], g.key[0], g.key[1], g.counter[0],
                                        g.counter[1]);
  }
}

// Codes of two groups of eight, a word each.
template <class T>
__device__ __forceinline__ uint2 encode_stochastic_groups(const Eight<T>& x, const Eight<T>& y, const TwoGroups& g) {
  return g.careful ? encode_stochastic_groups<T, true>(x, y, g) : encode_stochastic_groups<T, false>(x, y, g);
}

}  // namespace cuda
}  // namespace blockfp
