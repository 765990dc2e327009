// Elements that an RMSNorm makes, in registers.
//
// The bits are those of PyTorch's fused kernel: weight * (scale * x) in fp32, rounded once to T. Whether they are is asked at run time
// (torch_backend/custom_ops/norm_kernels.py), because another PyTorch may compute otherwise.
#pragma once

#include "arguments.h"
#include "rounded.cuh"

namespace blockfp {
namespace cuda {

// Eight neighbours from `column` on of row `row` of one matrix, whose rows are aligned for vectors.
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const Matrices& x, int64_t row, int64_t column) {
  return load_vector<T>(static_cast<const typename T::Raw*>(x.data) + row * x.row_stride + column);
}

// The weights of eight columns; ones where there are none, which change no bit.
template <class T>
__device__ __forceinline__ Eight<T> norm_weights(const void* weight, int64_t column) {
  if (weight != nullptr) return load_vector<T>(static_cast<const typename T::Raw*>(weight) + column);
  return rounded<T>([](int) { return 1.0f; });
}

template <class T>
__device__ __forceinline__ Eight<T> normed_of(const Eight<T>& x, float scale, const Eight<T>& weights) {
  return rounded<T>([&](int i) { return __fmul_rn(value<T>(weights, i), __fmul_rn(scale, value<T>(x, i))); });
}

}  // namespace cuda
}  // namespace blockfp
