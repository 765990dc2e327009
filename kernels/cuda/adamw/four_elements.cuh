// Four adjacent elements of a row, which a lane of the optimizer's kernels holds: loading, conversion, storing.
#pragma once

#include "blockfp/scales.h"
#include "codes.cuh"
#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

struct Four {
  float x[4];
};

// Four elements as stored: one, two or four words for 1, 2 or 4 bytes per element.
struct Raw {
  uint32_t word[4];
};

// Loads elements at .. at + count - 1 of an array, followed by zeros. It only loads and doesn't use the result, so that several
// loads can be in flight. With Vectors, count is 4 or 0.
template <int Bytes, bool Vectors>
__device__ __forceinline__ Raw load_raw(const void* data, int64_t at, int count) {
  Raw out{};
  const char* p = static_cast<const char*>(data) + at * Bytes;
  if constexpr (Vectors) {
    if (count > 0) {
      if constexpr (Bytes == 4) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
        out = {{v.x, v.y, v.z, v.w}};
      } else if constexpr (Bytes == 2) {
        const uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
        out.word[0] = v.x, out.word[1] = v.y;
      } else {
        out.word[0] = __ldcs(reinterpret_cast<const uint32_t*>(p));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      if constexpr (Bytes == 4) out.word[i] = reinterpret_cast<const uint32_t*>(p)[i];
      if constexpr (Bytes == 2) out.word[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[i]) << (16 * (i % 2));
      if constexpr (Bytes == 1) out.word[0] |= static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(p)[i]) << (8 * i);
    }
  }
  return out;
}

template <int Bytes, bool Vectors>
__device__ __forceinline__ void store_raw(void* data, int64_t at, int count, const Raw& raw) {
  char* p = static_cast<char*>(data) + at * Bytes;
  if constexpr (Vectors) {
    if (count > 0) {
      if constexpr (Bytes == 4) __stcs(reinterpret_cast<uint4*>(p), make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
      if constexpr (Bytes == 2) __stcs(reinterpret_cast<uint2*>(p), make_uint2(raw.word[0], raw.word[1]));
      if constexpr (Bytes == 1) __stcs(reinterpret_cast<uint32_t*>(p), raw.word[0]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      if constexpr (Bytes == 4) reinterpret_cast<uint32_t*>(p)[i] = raw.word[i];
      if constexpr (Bytes == 2) reinterpret_cast<uint16_t*>(p)[i] = raw.word[i / 2] >> (16 * (i % 2));
      if constexpr (Bytes == 1) p[i] = raw.word[0] >> (8 * i);
    }
  }
}

template <class T>
__device__ __forceinline__ Four floats_of(const Raw& raw) {
  Four out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (T::kId == Fp32::kId) {
      out.x[i] = __uint_as_float(raw.word[i]);
    } else if constexpr (T::kId == Bf16::kId) {
      out.x[i] = __uint_as_float(i % 2 ? raw.word[i / 2] & 0xFFFF0000u : raw.word[i / 2] << 16);
    } else {
      const __half2 pair = bit_cast<__half2>(raw.word[i / 2]);
      out.x[i] = i % 2 ? __high2float(pair) : __low2float(pair);
    }
  }
  return out;
}

__device__ __forceinline__ Raw raw_of(const Four& v) {
  return {{__float_as_uint(v.x[0]), __float_as_uint(v.x[1]), __float_as_uint(v.x[2]), __float_as_uint(v.x[3])}};
}

// Values of four E4M3 codes.
__device__ __forceinline__ Four values_of_e4m3(uint32_t codes) {
  Raw halves{};
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(halves.word[0]), "=r"(halves.word[1])
      : "r"(codes));
#else
  halves.word[0] = halves_of<false>(codes & 0xFFFF), halves.word[1] = halves_of<false>(codes >> 16);
#endif
  return floats_of<Fp16>(halves);
}

// The largest magnitude of four; NaN counts as 0.
__device__ __forceinline__ int32_t largest_of(const Four& v) {
  int32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t magnitude = __float_as_int(v.x[i]) & kMagnitude;
    most = max(most, magnitude > kInfinity ? 0 : magnitude);
  }
  return most;
}

__device__ __forceinline__ bool any_nan(const Four& v) {
  return v.x[0] != v.x[0] || v.x[1] != v.x[1] || v.x[2] != v.x[2] || v.x[3] != v.x[3];
}

}  // namespace cuda
}  // namespace blockfp
