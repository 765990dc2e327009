// Standalone activations and their gradients: a thread computes eight adjacent elements.
#include "gated.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Row and column of this thread's eight elements; false past the end of x.
__device__ __forceinline__ bool own_eight(const Matrices& x, int64_t& row, int64_t& column) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, across = x.columns / 8;
  row = index / across, column = (index - row * across) * 8;
  return row < x.rows;
}

template <class T, Activation A>
__global__ void __launch_bounds__(kThreads) activation(const __grid_constant__ Matrices x, const __grid_constant__ Gated gated,
                                                       typename T::Raw* out) {
  int64_t row, column;
  if (!own_eight(x, row, column)) return;
  GateAndUp<T> parts;
  parts.load(x, gated, row, column);
  store_vector<T>(out + row * x.columns + column, parts.template made<A>(gated));
}

template <class T, Activation A>
__global__ void __launch_bounds__(kThreads)
    activation_gradient(const __grid_constant__ Matrices gradient, const __grid_constant__ Matrices x, const __grid_constant__ Gated gated,
                        const __grid_constant__ Matrices d_x, const __grid_constant__ Gated d_gated) {
  int64_t row, column;
  if (!own_eight(x, row, column)) return;
  Eight<T> dy = load_vector<T>(static_cast<const typename T::Raw*>(gradient.data) + row * gradient.row_stride + column);
  GateAndUp<T> parts;
  parts.load(x, gated, row, column);
  Eight<T> d_up = zeros<T>();
  if (gated.up != nullptr) {
    d_up = times<T>(dy, activation_of<A, T>(parts.gate));
    dy = times<T>(dy, parts.up);
  }
  store_gate_and_up<T>(d_x, d_gated, row, column, activation_gradient_of<A, T>(dy, parts.gate), d_up);
}

// Calls body with a 16-bit dtype and an activation, as instances of their types.
template <class Body>
cudaError_t with_both(int dtype, Activation kind, Body body) {
  const auto with = [&](auto t) {
    switch (kind) {
      case Activation::kSilu: return body(t, OfActivation<Activation::kSilu>{});
      case Activation::kGeluTanh: return body(t, OfActivation<Activation::kGeluTanh>{});
      case Activation::kGeluErf: return body(t, OfActivation<Activation::kGeluErf>{});
      default: return body(t, OfActivation<Activation::kRelu2>{});
    }
  };
  return dtype == Bf16::kId ? with(Bf16{}) : with(Fp16{});
}

// Number of thread blocks for x; 0 if x is empty.
int64_t blocks_for(const Matrices& x) { return ceil_div(x.rows * (x.columns / 8), kThreads); }

}  // namespace

cudaError_t launch_activation(const Matrices& x, const Gated& gated, void* out, cudaStream_t stream) {
  const int64_t blocks = blocks_for(x);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  return with_both(x.dtype, gated.activation, [&](auto t, auto kind) {
    using T = decltype(t);
    activation<T, decltype(kind)::value><<<blocks, kThreads, 0, stream>>>(x, gated, static_cast<typename T::Raw*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_activation_gradient(const Matrices& gradient, const Matrices& x, const Gated& gated, const Matrices& d_x,
                                       const Gated& d_gated, cudaStream_t stream) {
  const int64_t blocks = blocks_for(x);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  return with_both(x.dtype, gated.activation, [&](auto t, auto kind) {
    activation_gradient<decltype(t), decltype(kind)::value><<<blocks, kThreads, 0, stream>>>(gradient, x, gated, d_x, d_gated);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace blockfp
