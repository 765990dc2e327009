// The scales of the rows of an RMSNorm, and with them its amax or its output: a warp has a row.
//
// The sum of squares has the order of PyTorch's fused kernel, whose 128 threads take four neighbours in turn and are then summed as a
// tree. A lane here is four of those threads: neighbouring ones at each of two places, for which it reads eight neighbours.
#include "launch.h"
#include "normed.cuh"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // eights that a lane has under way, of an even number of places

enum class Then { kNothing, kAmax, kWrite };

// One over the root mean square of this warp's row, in every lane.
template <class T>
__device__ __forceinline__ float scale_of_row(const Matrices& x, int64_t row, int lane, float eps) {
  const int64_t eights = x.columns / 8;
  float sums[2][2] = {};
  const auto add = [&](const Eight<T>& part, int place) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[place][j / 4] = __fmaf_rn(value<T>(part, j), value<T>(part, j), sums[place][j / 4]);
  };
  int64_t first = lane;
  for (; first - lane + 32 * kLoads <= eights; first += 32 * kLoads) {
    Eight<T> part[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) part[i] = load_eight<T>(x, row, 8 * (first + 32 * i));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) add(part[i], i % 2);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (first + 32 * i < eights) add(load_eight<T>(x, row, 8 * (first + 32 * i)), i % 2);
  }
  float places[2];
#pragma unroll
  for (int place = 0; place < 2; ++place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) {
        sums[place][half] = __fadd_rn(sums[place][half], __shfl_xor_sync(0xFFFFFFFFu, sums[place][half], distance));
      }
    }
    places[place] = __fadd_rn(sums[place][0], sums[place][1]);
  }
  float sum = __fadd_rn(places[0], places[1]);
  sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 16));
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(x.columns)), eps));
}

// The last rows come first, so that what the cache still holds at the end is what a cast reads first.
template <class T, Then Next>
__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ Matrices x, const void* weight, float eps, float* scales,
                                                      int32_t* amax, typename T::Raw* out) {
  const int lane = threadIdx.x % 32;
  const int64_t row = x.rows - 1 - (static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32);
  int32_t most = 0;
  if (row >= 0) {
    const float scale = scale_of_row<T>(x, row, lane, eps);
    if (lane == 0) scales[row] = scale;
    if constexpr (Next != Then::kNothing) {
#pragma unroll 4
      for (int64_t column = 8 * lane; column < x.columns; column += 256) {
        const Eight<T> made = normed_of<T>(load_eight<T>(x, row, column), scale, norm_weights<T>(weight, column));
        if constexpr (Next == Then::kAmax) most = max(most, largest<T, false>(made));
        if constexpr (Next == Then::kWrite) store_vector<T>(out + row * x.columns + column, made);
      }
    }
  }
  if constexpr (Next == Then::kAmax) {
    __shared__ int32_t warps[kThreads / 32];
    most = lanes_max<32>(most);
    if (lane == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    most = lanes_max<32>(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : 0);
    if (threadIdx.x == 0 && most > *static_cast<volatile int32_t*>(amax)) atomicMax(amax, most);
  }
}

template <class T>
cudaError_t norm(const Matrices& x, const void* weight, float eps, float* scales, int32_t* amax, void* out, cudaStream_t stream) {
  const int64_t blocks = ceil_div(x.rows, kThreads / 32);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  auto* made = static_cast<typename T::Raw*>(out);
  if (amax != nullptr) {
    if (cudaError_t error = cudaMemsetAsync(amax, 0, sizeof(int32_t), stream); error != cudaSuccess) return error;
    norm_rows<T, Then::kAmax><<<blocks, kThreads, 0, stream>>>(x, weight, eps, scales, amax, made);
  } else if (out != nullptr) {
    norm_rows<T, Then::kWrite><<<blocks, kThreads, 0, stream>>>(x, weight, eps, scales, amax, made);
  } else {
    norm_rows<T, Then::kNothing><<<blocks, kThreads, 0, stream>>>(x, weight, eps, scales, amax, made);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_norm(const Matrices& x, const void* weight, float eps, float* scales, int32_t* amax, void* out, cudaStream_t stream) {
  return x.dtype == Bf16::kId ? norm<Bf16>(x, weight, eps, scales, amax, out, stream)
                              : norm<Fp16>(x, weight, eps, scales, amax, out, stream);
}

}  // namespace cuda
}  // namespace blockfp
