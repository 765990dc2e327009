// The random Hadamard transform of columns held by a thread.
#pragma once

#include <cuda_bf16.h>

#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

// Elements 2 pair and 2 pair + 1: magnitudes below 2^-100 become zero with their sign. fp16 has no such magnitudes.
template <class T>
__device__ __forceinline__ void drop_smallest(Eight<T>& x, int pair) {
  if constexpr (T::kId == Fp32::kId) {
#pragma unroll
    for (int i = 2 * pair; i < 2 * pair + 2; ++i) {
      const float v = __uint_as_float(x.word[i]);
      x.word[i] = __float_as_uint(fabsf(v) < 0x1p-100f ? __fmul_rn(v, 0.0f) : v);
    }
  } else if constexpr (T::kId == Bf16::kId) {
    const __nv_bfloat162 both = bit_cast<__nv_bfloat162>(x.word[pair]), least = bit_cast<__nv_bfloat162>(0x0D800D80u);
    // True if not less, or NaN.
    x.word[pair] &= __hgeu2_mask(__habs2(both), least) | 0x80008000u;
  }
}

// Stores elements 2 pair and 2 pair + 1, rounded to T.
template <class T>
__device__ __forceinline__ void store_pair(Eight<T>& x, int pair, float low, float high) {
  if constexpr (T::kId == Fp32::kId) {
    x.word[2 * pair] = __float_as_uint(low), x.word[2 * pair + 1] = __float_as_uint(high);
  } else if constexpr (T::kId == Bf16::kId) {
    x.word[pair] = bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
  } else {
    x.word[pair] = bit_cast<uint32_t>(__floats2half2_rn(low, high));
  }
}

// The random Hadamard transform of each column of sixteen rows, rounded to T. Same values as hadamard.h; sign changes cost
// nothing here.
template <class T>
__device__ __forceinline__ void rotate_columns(Eight<T> (&x)[16]) {
  constexpr uint32_t kFlips = 0xD7E8;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
    for (int r = 0; r < 16; ++r) drop_smallest<T>(x[r], pair);
    float z[2][16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        const float v = value<T>(x[r], 2 * pair + half);
        z[half][r] = (kFlips >> r) & 1 ? -v : v;
      }
#pragma unroll
      for (int h = 1; h < 16; h *= 2) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i & h) continue;
          const float a = z[half][i], b = z[half][i + h];
          z[half][i] = __fadd_rn(a, b);
          z[half][i + h] = __fadd_rn(a, -b);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) store_pair<T>(x[r], pair, __fmul_rn(z[0][r], 0.25f), __fmul_rn(z[1][r], 0.25f));
  }
}

// The same for columns held by two lanes, eight rows each: this lane and the one `Step` lanes on, or before, with the other
// rows. Every lane of the warp must call it; x only changes where `wanted` is true, which must be equal in both lanes.
template <class T, int Step = 8>
__device__ __forceinline__ void rotate_columns(Eight<T> (&x)[8], bool wanted) {
  constexpr uint32_t kFlips = 0xD7E8;
  const bool below = threadIdx.x & Step;
  const uint32_t flips = below ? kFlips >> 8 : kFlips;
  const float sign = below ? -1.0f : 1.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    Eight<T> own[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      own[r] = x[r];
      drop_smallest<T>(own[r], pair);
      if constexpr (T::kId == Fp32::kId) {
        const uint32_t flip = flips << (31 - r) & 0x80000000u;
        own[r].word[2 * pair] ^= flip, own[r].word[2 * pair + 1] ^= flip;
      } else {
        own[r].word[pair] ^= (flips >> r & 1) * 0x80008000u;
      }
    }
    float z[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < 8; ++r) z[half][r] = value<T>(own[r], 2 * pair + half);
#pragma unroll
      for (int h = 1; h < 8; h *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i & h) continue;
          const float a = z[half][i], b = z[half][i + h];
          z[half][i] = __fadd_rn(a, b);
          z[half][i + h] = __fadd_rn(a, -b);
        }
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        // The product is exact, so that it and the sum can be one step.
        z[half][r] = __fmaf_rn(z[half][r], sign, __shfl_xor_sync(0xFFFFFFFFu, z[half][r], Step));
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      if (wanted) store_pair<T>(x[r], pair, __fmul_rn(z[0][r], 0.25f), __fmul_rn(z[1][r], 0.25f));
    }
  }
}

}  // namespace cuda
}  // namespace blockfp
