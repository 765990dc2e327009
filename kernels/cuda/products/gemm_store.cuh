// The end of a product: adds a bias to the sums in a warpgroup's registers and stores them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "blockfp/dtypes.h"
#include "gemm.h"

namespace blockfp {
namespace cuda {

__device__ __forceinline__ float value_at(const void* x, int dtype, int64_t i) {
  if (dtype == Fp32::kId) return static_cast<const float*>(x)[i];
  const uint32_t raw = static_cast<const uint16_t*>(x)[i];
  return dtype == Bf16::kId ? __uint_as_float(raw << 16) : __half2float(__ushort_as_half(raw));
}

template <class T>
__device__ __forceinline__ typename T::Raw rounded(float x) {
  if constexpr (T::kId == Fp32::kId) return __float_as_uint(x);
  if constexpr (T::kId == Fp16::kId) return __half_as_ushort(__float2half_rn(x));
  if constexpr (T::kId == Bf16::kId) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Two 16-bit values, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t rounded_pair(float x, float y) {
  uint32_t pair;
  if constexpr (T::kId == Fp16::kId) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  }
  return pair;
}

// Position of a thread's sums, laid out as in hopper.cuh: first row and column of its warpgroup's 64 rows, and the end of the
// rows that belong to it. Rows count those of p.out as a whole.
struct Place {
  int64_t row, end_row;
  int column;
};

// Stores eight 16-bit values at a time. Of four spans of eight columns, a thread has two columns each; the four lanes of a row
// exchange them so that each has all of one span.
template <class T, int Sums>
__device__ __forceinline__ void store_eights(const GemmArguments& p, const float (&sums)[Sums], Place at) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  const bool odd = quarter & 1, high = quarter & 2;
  const int64_t row = at.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int column = at.column + quarter * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t* const out = static_cast<uint16_t*>(p.out) + (row + half * 8) * p.n + column;
    const int count = row + half * 8 < at.end_row ? p.n - column : 0;
#pragma unroll
    for (int span = 0; span < Sums / 4; span += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (span + i) * 4 + half * 2;
        x[i] = rounded_pair<T>(sums[first], sums[first + 1]);
      }
      // Exchange with the neighbour: then x[0], x[1] are of span `odd`, and x[2], x[3] of span 2 + `odd`.
      const uint32_t near = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), far = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
      x[0] = odd ? near : x[0], x[1] = odd ? x[1] : near;
      x[2] = odd ? far : x[2], x[3] = odd ? x[3] : far;
      const uint32_t third = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2), fourth = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
      const uint4 eight = high ? make_uint4(third, fourth, x[2], x[3]) : make_uint4(x[0], x[1], third, fourth);
      if (span * 8 < count) *reinterpret_cast<uint4*>(out + span * 8) = eight;
    }
  }
}

// Stores four values at a time, adding to out if p.accumulate. Of two spans of eight columns, a thread has two columns each;
// neighbours exchange them so that each has four of one.
template <class T, int Sums>
__device__ __forceinline__ void store_fours(const GemmArguments& p, const float (&sums)[Sums], Place at) {
  using Raw = typename T::Raw;
  struct alignas(4 * sizeof(Raw)) Four {
    Raw raw[4];
  };
  const int lane = threadIdx.x % 32, odd = lane & 1;
  const int64_t row = at.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int column = at.column + odd * 8 + lane / 2 % 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Raw* const out = static_cast<Raw*>(p.out) + (row + half * 8) * p.n + column;
    const int count = row + half * 8 < at.end_row ? p.n - column : 0;
#pragma unroll
    for (int i = half * 2; i < Sums; i += 8) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float taken = __shfl_xor_sync(~0u, odd ? sums[i + j] : sums[i + 4 + j], 1);
        x[j] = odd ? taken : sums[i + j], x[j + 2] = odd ? sums[i + 4 + j] : taken;
      }
      if (i / 8 * 16 >= count) continue;
      Four* const to = reinterpret_cast<Four*>(out + i / 8 * 16);
      Four four{};
      if (p.accumulate) four = *to;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.raw[j] = rounded<T>(p.accumulate ? __fadd_rn(x[j], value_at(&four.raw[j], T::kId, 0)) : x[j]);
      *to = four;
    }
  }
}

// Stores value by value, for rows of any length.
template <class T, int Sums>
__device__ __forceinline__ void store_ones(const GemmArguments& p, const float (&sums)[Sums], Place at) {
  using Raw = typename T::Raw;
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int column = at.column + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < Sums; ++i) {
    const int half = i / 2 % 2, on = i / 4 * 8 + i % 2;
    if (row + half * 8 < at.end_row && column + on < p.n) {
      Raw* const to = static_cast<Raw*>(p.out) + (row + half * 8) * p.n + column + on;
      *to = rounded<T>(p.accumulate ? __fadd_rn(sums[i], value_at(to, T::kId, 0)) : sums[i]);
    }
  }
}

template <class T, int Sums>
__device__ __forceinline__ void store(const GemmArguments& p, const float (&sums)[Sums], Place at) {
  const int vector = T::kId == Fp32::kId || p.accumulate ? 4 : 8;
  const bool fits = p.n % vector == 0 && reinterpret_cast<uint64_t>(p.out) % (vector * sizeof(typename T::Raw)) == 0;
  if (!fits) {
    store_ones<T>(p, sums, at);
  } else if (vector == 4) {
    store_fours<T>(p, sums, at);
  } else if constexpr (T::kId != Fp32::kId) {
    store_eights<T>(p, sums, at);
  }
}

template <int Sums>
__device__ __forceinline__ void store(const GemmArguments& p, const float (&sums)[Sums], Place at) {
  if (p.dtype == Bf16::kId) {
    store<Bf16>(p, sums, at);
  } else if (p.dtype == Fp16::kId) {
    store<Fp16>(p, sums, at);
  } else {
    store<Fp32>(p, sums, at);
  }
}

template <int Sums>
__device__ __forceinline__ void add_bias(const GemmArguments& p, float (&sums)[Sums], int group, int column) {
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < Sums; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = column + i * 2 + j;
      const float bias = c < p.n ? value_at(p.bias, p.bias_dtype, static_cast<int64_t>(group) * p.n + c) : 0;
      sums[i + j] = __fadd_rn(sums[i + j], bias), sums[i + 2 + j] = __fadd_rn(sums[i + 2 + j], bias);
    }
  }
}

}  // namespace cuda
}  // namespace blockfp
