// Launches of fold_keys.cuh.
#include "fold_keys.cuh"

#include "launch.h"

namespace blockfp {
namespace cuda {

cudaError_t launch_fold_keys(const void* key, bool wide, const int64_t* step, int64_t rank, int64_t groups, void* out,
                             cudaStream_t stream) {
  const int64_t blocks = ceil_div(2 * (groups < 0 ? 1 : groups), kFoldThreads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  auto* keys = static_cast<Words<uint32_t>*>(out);
  if (wide) {
    fold_keys<<<blocks, kFoldThreads, 0, stream>>>(static_cast<const int64_t*>(key), step, rank, groups, keys);
  } else {
    fold_keys<<<blocks, kFoldThreads, 0, stream>>>(static_cast<const int32_t*>(key), step, rank, groups, keys);
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
