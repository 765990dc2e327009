// Eight adjacent elements in registers: loading, values, and largest magnitude.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "blockfp/dtypes.h"
#include "runs.cuh"

namespace blockfp {
namespace cuda {

// Registers that hold eight elements of T, two or one per word.
template <class T>
constexpr int kWords = 2 * sizeof(typename T::Raw);

template <class T>
struct Eight {
  uint32_t word[kWords<T>];
};

template <class T>
__device__ __forceinline__ Eight<T> load_vector(const typename T::Raw* x) {
  Eight<T> out;
#pragma unroll
  for (int i = 0; i < kWords<T>; i += 4) {
    const uint4 part = __ldg(reinterpret_cast<const uint4*>(x) + i / 4);
    out.word[i] = part.x, out.word[i + 1] = part.y, out.word[i + 2] = part.z, out.word[i + 3] = part.w;
  }
  return out;
}

template <class T>
__device__ __forceinline__ Eight<T> zeros() {
  Eight<T> out;
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i) out.word[i] = 0;
  return out;
}

// Sets elements from `count` on to zero.
template <class T>
__device__ __forceinline__ void keep_first(Eight<T>& x, int count) {
  constexpr int kPerWord = 8 / kWords<T>;
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i) {
    const int left = count - i * kPerWord;
    if (left < kPerWord) x.word[i] &= left > 0 ? 0xFFFFu : 0;
  }
}

// Loads the first `count` elements of x[0 .. 7], at any element boundary; the rest is arbitrary, but zero if count is 0.
template <class T>
__device__ __forceinline__ Eight<T> load_unmasked(const typename T::Raw* x, int count) {
  Eight<T> out;
  load_run<kWords<T>, 16, sizeof(typename T::Raw)>(x, count * static_cast<int>(sizeof(typename T::Raw)), out.word);
  return out;
}

// The same, with zeros for the rest.
template <class T>
__device__ __forceinline__ Eight<T> load_anywhere(const typename T::Raw* x, int count) {
  Eight<T> out = load_unmasked<T>(x, count);
  if (count < 8) keep_first(out, count);
  return out;
}

// Value of element i, a compile-time constant after unrolling.
template <class T>
__device__ __forceinline__ float value(const Eight<T>& x, int i) {
  if constexpr (T::kId == Fp32::kId) {
    return __uint_as_float(x.word[i]);
  } else if constexpr (T::kId == Bf16::kId) {
    const uint32_t word = x.word[i / 2];
    return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
  } else {
    const __half2 pair = bit_cast<__half2>(x.word[i / 2]);
    return i % 2 ? __high2float(pair) : __low2float(pair);
  }
}

template <class T>
__device__ __forceinline__ void set_value(Eight<T>& x, int i, float y) {
  const int32_t raw = narrow<T, float>(canonical<float>(to_bits(y)));
  if constexpr (T::kId == Fp32::kId) {
    x.word[i] = raw;
  } else {
    const uint32_t keep = i % 2 ? 0x0000FFFFu : 0xFFFF0000u;
    x.word[i / 2] = (x.word[i / 2] & keep) | (static_cast<uint32_t>(raw & 0xFFFF) << (16 * (i % 2)));
  }
}

// Elementwise largest magnitudes of two words; the result's sign bits are arbitrary. With Poison, a NaN stays NaN; without, the
// other operand is used.
template <class T, bool Poison>
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ < 860
  if constexpr (T::kId == Fp32::kId) {
    const float x = fabsf(__uint_as_float(a)), y = fabsf(__uint_as_float(b));
    return Poison && (x != x || y != y) ? kMagnitude : __float_as_uint(fmaxf(x, y));
  } else if constexpr (T::kId == Bf16::kId) {
    const __nv_bfloat162 x = __habs2(bit_cast<__nv_bfloat162>(a)), y = __habs2(bit_cast<__nv_bfloat162>(b));
    return bit_cast<uint32_t>(Poison ? __hmax2_nan(x, y) : __hmax2(x, y));
  } else {
    const __half2 x = __habs2(bit_cast<__half2>(a)), y = __habs2(bit_cast<__half2>(b));
    return bit_cast<uint32_t>(Poison ? __hmax2_nan(x, y) : __hmax2(x, y));
  }
#else
  uint32_t out;
  if constexpr (T::kId == Fp32::kId) {
    if constexpr (Poison) {
      asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    } else {
      asm("max.xorsign.abs.f32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    }
  } else if constexpr (T::kId == Bf16::kId) {
    if constexpr (Poison) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    } else {
      asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    }
  } else {
    if constexpr (Poison) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    } else {
      asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    }
  }
  return out;
#endif
}

// fp32 bits of the magnitude of element `half` of a word. NaN is above kInfinity with Poison and counts as 0 without.
template <class T, bool Poison>
__device__ __forceinline__ int32_t magnitude_bits(uint32_t word, int half) {
  int32_t bits;
  if constexpr (T::kId == Fp32::kId) {
    bits = word & kMagnitude;
  } else if constexpr (T::kId == Bf16::kId) {
    bits = (half ? word & 0x7FFF0000u : (word << 16) & 0x7FFF0000u);
  } else {
    const __half2 pair = bit_cast<__half2>(word);
    bits = __float_as_int(half ? __high2float(pair) : __low2float(pair)) & kMagnitude;
  }
  if constexpr (!Poison) bits = bits > kInfinity ? 0 : bits;
  return bits;
}

// fp32 bits of the largest magnitude of eight elements, given as words.
template <class T, bool Poison>
__device__ __forceinline__ int32_t largest_of(const uint32_t (&words)[kWords<T>]) {
  uint32_t word = words[0];
#pragma unroll
  for (int i = 1; i < kWords<T>; ++i) word = larger_magnitude<T, Poison>(word, words[i]);
  if constexpr (T::kId != Fp32::kId) word = larger_magnitude<T, Poison>(word, __byte_perm(word, word, 0x1032));
  return magnitude_bits<T, Poison>(word, 0);
}

template <class T, bool Poison>
__device__ __forceinline__ int32_t largest(const Eight<T>& x) {
  return largest_of<T, Poison>(x.word);
}

// Maximum over groups of `Lanes` lanes that are `Step` apart.
template <int Lanes, int Step = 1>
__device__ __forceinline__ int32_t lanes_max(int32_t x) {
#pragma unroll
  for (int distance = Step; distance < Lanes * Step; distance *= 2) {
    x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  }
  return x;
}

// Raises `recorded` to the amax of a warp's lanes, all of which must call it. Most warps already find a larger value there and
// skip the atomic, of which an address takes one at a time.
__device__ __forceinline__ void raise_amax(int32_t* recorded, int32_t amax) {
  amax = lanes_max<32>(amax);
  if (threadIdx.x % 32 == 0 && amax > __ldcg(recorded)) atomicMax(recorded, amax);
}

}  // namespace cuda
}  // namespace blockfp
