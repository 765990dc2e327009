// Rounds elements that a kernel computes in fp32 to their dtype, eight at a time, and stores them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

// Two floats rounded to T, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  static_assert(kWords<T> == 4, "two elements in a word");
  if constexpr (T::kId == Bf16::kId) return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
  return bit_cast<uint32_t>(__floats2half2_rn(low, high));
}

// Eight results of a function of the element's index, rounded to T.
template <class T, class Value>
__device__ __forceinline__ Eight<T> rounded(Value value_of) {
  Eight<T> out;
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i) out.word[i] = rounded_pair<T>(value_of(2 * i), value_of(2 * i + 1));
  return out;
}

// Stores sixteen bytes per four words.
template <class T>
__device__ __forceinline__ void store_vector(typename T::Raw* out, const Eight<T>& x) {
  *reinterpret_cast<uint4*>(out) = {x.word[0], x.word[1], x.word[2], x.word[3]};
}

}  // namespace cuda
}  // namespace blockfp
