// Launches of eden.cuh.
#include "eden.cuh"

#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

// Calls body with the blocks of threads, and how many lie side by side and how many below each other; one where x is empty.
template <class Body>
cudaError_t over_groups(const Matrices& x, Body body) {
  const int64_t spans = std::max(ceil_div(x.columns, kEdenColumns), int64_t{1});
  const int64_t groups = std::max(ceil_div(x.rows, kEdenGroup), int64_t{1}), blocks = spans * groups * std::max(x.batches, int64_t{1});
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  body(static_cast<uint32_t>(blocks), static_cast<uint32_t>(spans), static_cast<uint32_t>(groups));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_amax_eden(const EdenAmaxArguments& a, cudaStream_t stream) {
  for (int32_t* word : {a.plain, a.rotated}) {
    if (word == nullptr) continue;
    if (cudaError_t error = cudaMemsetAsync(word, 0, sizeof(int32_t), stream); error != cudaSuccess) return error;
  }
  if (a.x.batches * a.x.rows * a.x.columns == 0) return cudaSuccess;
  return over_groups(a.x, [&](uint32_t blocks, uint32_t spans, uint32_t groups) {
    with_dtype(a.x.dtype, [&](auto dtype) {
      amax_eden<decltype(dtype)><<<blocks, kEdenThreads, 0, stream>>>(a, spans, groups);
      return 0;
    });
  });
}

cudaError_t launch_quantize_eden(const EdenArguments& arguments, cudaStream_t stream) {
  EdenArguments a = arguments;
  // An empty array still has a scale of its tensor.
  if (a.x.batches * a.x.rows * a.x.columns == 0) a.x.rows = 0;
  // Every lane has all its rows, or none.
  const bool vectors = a.x.rows % kEdenRows == 0 && aligned(a.codes) && aligned(a.scales, 4);
  return over_groups(a.x, [&](uint32_t blocks, uint32_t spans, uint32_t groups) {
    with_dtype(a.x.dtype, [&](auto dtype) {
      quantize_eden<decltype(dtype)><<<blocks, kEdenThreads, 0, stream>>>(a, spans, groups, vectors);
      return 0;
    });
  });
}

}  // namespace cuda
}  // namespace blockfp
