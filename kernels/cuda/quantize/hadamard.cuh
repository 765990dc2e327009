// The random Hadamard transform of columns that lie in a thread.
#pragma once

#include <cuda_bf16.h>

#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

// Elements 2 pair and 2 pair + 1: a magnitude below 2^-100 becomes zero of its sign. fp16 has nothing so small.
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
    // Not less, or a NaN.
    x.word[pair] &= __hgeu2_mask(__habs2(both), least) | 0x80008000u;
  }
}

// The random Hadamard transform of each column of sixteen rows, rounded to T. Values as in hadamard.h; signs are free here.
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
    for (int r = 0; r < 16; ++r) {
      const float low = __fmul_rn(z[0][r], 0.25f), high = __fmul_rn(z[1][r], 0.25f);
      if constexpr (T::kId == Fp32::kId) {
        x[r].word[2 * pair] = __float_as_uint(low), x[r].word[2 * pair + 1] = __float_as_uint(high);
      } else if constexpr (T::kId == Bf16::kId) {
        x[r].word[pair] = bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
      } else {
        x[r].word[pair] = bit_cast<uint32_t>(__floats2half2_rn(low, high));
      }
    }
  }
}

}  // namespace cuda
}  // namespace blockfp
