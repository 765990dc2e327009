// Launches of amax.cuh.
#include "amax.cuh"

#include <algorithm>

#include "blockfp/hadamard.h"
#include "launch.h"

namespace blockfp {
namespace cuda {

// Thread blocks that fill any GPU; each continues with further rows.
constexpr int64_t kFilling = 1056;

cudaError_t launch_amax(const Matrices& x, int32_t* out, cudaStream_t stream, const float* unless) {
  if (cudaError_t error = cudaMemsetAsync(out, 0, sizeof(int32_t), stream); error != cudaSuccess) return error;
  const int64_t elements = x.batches * x.rows * x.columns;
  if (elements == 0) return cudaSuccess;
  return with_dtype(x.dtype, [&](auto dtype) {
    using T = decltype(dtype);
    if (is_contiguous(x) && unless == nullptr) {
      constexpr int kUnroll = 4;
      const int64_t blocks = ceil_div(elements, 8 * kAmaxThreads * kUnroll);
      if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
      amax_flat<T, kUnroll><<<blocks, kAmaxThreads, 0, stream>>>(static_cast<const typename T::Raw*>(x.data), elements, aligned(x.data), out);
    } else {
      const int64_t blocks = std::min(ceil_div(x.batches * x.rows, kAmaxThreads / 32), kFilling);
      amax_general<T><<<blocks, kAmaxThreads, 0, stream>>>(x, out, unless);
    }
    return cudaGetLastError();
  });
}

namespace {

// Launches amax_rotated; `launch` takes the numbers of thread blocks, of eights along a row, and of groups of sixteen rows.
template <class Launch>
cudaError_t rotated(const Matrices& x, int32_t* out, cudaStream_t stream, Launch launch) {
  if (cudaError_t error = cudaMemsetAsync(out, 0, 2 * sizeof(int32_t), stream); error != cudaSuccess) return error;
  if (x.batches * x.rows * x.columns == 0) return cudaSuccess;
  const int64_t across = ceil_div(x.columns, 8), groups = ceil_div(x.rows, kHadamardGroup);
  const int64_t blocks = ceil_div(x.batches * across * groups, kRotatedThreads);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  launch(blocks, across, groups);
  return cudaGetLastError();
}

template <class T>
cudaError_t amax_of_gated(const Matrices& x, const Gated& gated, bool also_rotated, int32_t* out, cudaStream_t stream,
                          const float* unless) {
  if (also_rotated) {
    return rotated(x, out, stream, [&](int64_t blocks, int64_t across, int64_t groups) {
      amax_rotated<T><<<blocks, kRotatedThreads, 0, stream>>>(x, GatedEights{gated}, across, groups, out);
    });
  }
  constexpr int kUnroll = 2;
  const int64_t eights = x.rows * (x.columns / 8), all = ceil_div(eights, kAmaxThreads * kUnroll);
  const int64_t blocks = unless == nullptr ? all : std::min(all, kFilling);
  if (cudaError_t error = cudaMemsetAsync(out, 0, sizeof(int32_t), stream); error != cudaSuccess || eights == 0) return error;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  amax_gated<T, kUnroll><<<blocks, kAmaxThreads, 0, stream>>>(x, gated, eights, out, unless);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_amax_rotated(const Matrices& x, int32_t* out, cudaStream_t stream) {
  return with_dtype(x.dtype, [&](auto dtype) {
    return rotated(x, out, stream, [&](int64_t blocks, int64_t across, int64_t groups) {
      amax_rotated<decltype(dtype)><<<blocks, kRotatedThreads, 0, stream>>>(x, PlainEights{vectors_fit(x)}, across, groups, out);
    });
  });
}

cudaError_t launch_amax_gated(const Matrices& x, const Gated& gated, bool rotated, int32_t* out, cudaStream_t stream,
                              const float* unless) {
  return x.dtype == Bf16::kId ? amax_of_gated<Bf16>(x, gated, rotated, out, stream, unless)
                              : amax_of_gated<Fp16>(x, gated, rotated, out, stream, unless);
}

// Raises a history's newest entry to an amax unless that is Inf.
__global__ void record_amax_in_history(const int32_t* amax, float* history) {
  if (*amax < kInfinity && __int_as_float(*amax) > *history) *history = __int_as_float(*amax);
}

cudaError_t launch_record_amax(const int32_t* amax, float* history, cudaStream_t stream) {
  record_amax_in_history<<<1, 1, 0, stream>>>(amax, history);
  return cudaGetLastError();
}

cudaError_t launch_amax_blocks(const AmaxBlocksArguments& a, cudaStream_t stream) {
  if (a.tensor != nullptr) {
    if (cudaError_t error = cudaMemsetAsync(a.tensor, 0, sizeof(int32_t), stream); error != cudaSuccess) return error;
  }
  if (a.x.batches * a.x.rows * a.x.columns == 0) return cudaSuccess;
  const int64_t grid_rows = ceil_div(a.window.row_phase + a.x.rows, a.format.block_rows);
  const int64_t grid_columns = ceil_div(a.window.column_phase + a.x.columns, a.format.block_columns);
  const int64_t blocks = ceil_div(a.x.batches * grid_rows * grid_columns, kAmaxThreads / 32);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  return with_dtype(a.x.dtype, [&](auto dtype) {
    amax_blocks<decltype(dtype)><<<blocks, kAmaxThreads, 0, stream>>>(a, grid_rows, grid_columns);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace blockfp
