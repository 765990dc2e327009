// Adam's moments as they are kept: fp32, bf16 or FP8 with a scale for each 128, rounded stochastically, and their random bytes.
#pragma once

#include "blockfp/adamw.h"
#include "four_elements.cuh"

namespace blockfp {
namespace cuda {

__device__ __forceinline__ Words<uint32_t> key_of(const StepEntry& e, uint32_t what) {
  const int32_t step = e.step_at != nullptr ? static_cast<int32_t>(*e.step_at) : e.step;
  return rounding_key(e.key0, e.key1, static_cast<uint32_t>(step), e.parameter, what);
}

// Random bytes of elements index .. index + 3, little-endian, for any index.
static __device__ __noinline__ uint32_t random_four(const StepEntry& e, uint32_t what, uint64_t index) {
  const Words<uint32_t> key = key_of(e, what);
  const uint64_t counter = index >> 3;
  const auto words = threefry2x32<uint32_t>(key.w0, key.w1, counter >> 32, static_cast<uint32_t>(counter));
  const auto next = threefry2x32<uint32_t>(key.w0, key.w1, (counter + 1) >> 32, static_cast<uint32_t>(counter + 1));
  const int skip = index & 7;
  if (skip < 4) return __funnelshift_r(words.w0, words.w1, 8 * skip);
  return __funnelshift_r(words.w1, next.w0, 8 * (skip - 4));
}

struct RandomPair {
  uint32_t first, second;  // four bytes for each moment
};

// Two neighbouring lanes share the counter of eight elements: each draws for one moment (`key`: the first's in even lanes, the second's
// in odd ones) and gives the other its half. Where rows don't begin at multiples of eight, every lane draws for itself.
__device__ __forceinline__ RandomPair random_pair(const StepEntry& e, const Words<uint32_t>& key, uint64_t index, bool eights) {
  if (!eights) return {random_four(e, kRoundFirst, index), random_four(e, kRoundSecond, index)};
  const uint64_t counter = index >> 3;
  const auto own = threefry2x32<uint32_t>(key.w0, key.w1, counter >> 32, static_cast<uint32_t>(counter));
  const bool odd = threadIdx.x % 2;
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? own.w0 : own.w1, 1);
  return {odd ? other : own.w0, odd ? own.w1 : other};
}

template <Moments M>
constexpr int kMomentBytes = M == Moments::kFp32 ? 4 : (M == Moments::kBf16 ? 2 : 1);

// A moment in fp32, from what it is kept in.
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

// fp8_scale for powers of two and E4M3, without its divisions: 448 is 1.75 * 2^8, so the exponent of 448 / amax follows from that of the
// amax and from whether its mantissa is above 1.75.
__device__ __forceinline__ BlockScale<float> moment_scale(int32_t amax) {
  int32_t exponent = 127 + 127 + 8 - (amax >> 23) - ((amax & 0x7FFFFF) > 0x600000 ? 1 : 0);
  exponent = min(exponent, 254);
  if (amax == 0 || amax == kInfinity) exponent = 127;
  return {max((254 - exponent) << 23, 0x400000), from_bits<float>(exponent << 23)};
}

// encode_moment in fewer steps. At 2^-120 of its size a number's fp32 pattern is E4M3's code, its own 20 bits behind the point: fp32's
// subnormals begin where E4M3's do. Cut off rather than rounded, they keep the nine bits that decide.
template <bool Second>
__device__ __forceinline__ uint32_t moment_code(float x, float multiplier, uint32_t random_byte) {
  const float y = multiply(x, multiplier);
  const uint32_t pattern = __float_as_uint(__fmul_rz(fabsf(y), 0x1p-120f));
  uint32_t code = min((pattern + (2 * random_byte + 1) * 2048) >> 20, static_cast<uint32_t>(E4M3::kMaxCode));
  if (y != y) code = E4M3::kNanCode;
  if constexpr (Second) {
    return x > 0.0f ? max(code, 1u) : code;
  } else {
    return code | (__float_as_uint(y) >> 24 & 0x80);
  }
}

// The way back; every lane of the warp comes here with its part of the same row. FP8's scale goes to `scale`.
template <Moments M, bool Second>
__device__ __forceinline__ Raw kept_moment(Four v, uint32_t random, float& scale) {
  if constexpr (M == Moments::kFp32) return raw_of(v);
  Raw out{};
  if constexpr (M == Moments::kBf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pattern = narrow_stochastic<float>(v.x[i], (random >> (8 * i)) & 0xFF);
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
      out.word[0] |= moment_code<Second>(v.x[i], s.multiplier, (random >> (8 * i)) & 0xFF) << (8 * i);
    }
    scale = from_bits<float>(s.stored);
  }
  return out;
}

}  // namespace cuda
}  // namespace blockfp
