// The keys of a layer's gradients: folds the step, a rank, the direction and the group into a key, one after another.
#include "blockfp/threefry.h"
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kFoldThreads = 64;

__device__ __forceinline__ Words<uint32_t> fold_in(Words<uint32_t> key, uint32_t data) {
  return threefry2x32<uint32_t>(key.w0, key.w1, 0u, data);
}

// out: [max(groups, 1)][2 directions] keys. A null step, and negative rank or groups, aren't folded in. With `advance` there is
// a single thread block, which increments the step after all threads have read it.
template <class Word>
__global__ void fold_keys(const Word* key, int64_t* step, int64_t rank, int64_t groups, bool advance, Words<uint32_t>* out) {
  const int64_t count = 2 * (groups < 0 ? 1 : groups), now = step == nullptr ? 0 : *step;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kFoldThreads) + threadIdx.x; i < count; i += gridDim.x * kFoldThreads) {
    Words<uint32_t> folded{static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1])};
    if (step != nullptr) folded = fold_in(folded, static_cast<uint32_t>(now));
    if (rank >= 0) folded = fold_in(folded, static_cast<uint32_t>(rank));
    folded = fold_in(folded, static_cast<uint32_t>(i % 2));
    out[i] = groups < 0 ? folded : fold_in(folded, static_cast<uint32_t>(i / 2));
  }
  if (!advance) return;
  __syncthreads();
  if (threadIdx.x == 0) *step = now + 1;
}

cudaError_t launch_fold_keys(const void* key, bool wide, int64_t* step, int64_t rank, int64_t groups, bool advance, void* out,
                             cudaStream_t stream) {
  const int64_t blocks = advance ? 1 : ceil_div(2 * (groups < 0 ? 1 : groups), kFoldThreads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  auto* keys = static_cast<Words<uint32_t>*>(out);
  if (wide) {
    fold_keys<<<blocks, kFoldThreads, 0, stream>>>(static_cast<const int64_t*>(key), step, rank, groups, advance, keys);
  } else {
    fold_keys<<<blocks, kFoldThreads, 0, stream>>>(static_cast<const int32_t*>(key), step, rank, groups, advance, keys);
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
