// Launches of second_pass.cuh.
#include "second_pass.cuh"

#include <algorithm>

#include "step_launches.h"

namespace blockfp {
namespace cuda {
namespace {

template <class E, SecondBlocks B>
struct SecondPass {
  static bool has(const StepEntry& e) {
    const int rows = B == SecondBlocks::kTensor ? 0 : (B == SecondBlocks::kRow16 ? 1 : 16);
    return e.element == E::kId && e.block_rows == rows;
  }
  // At least one, since an empty parameter has a scale too.
  static int64_t tiles(const StepEntry& e) {
    return std::max<int64_t>(1, e.batches * ceil_div(e.rows, kSecondTileRows) * ceil_div(e.columns, kStepColumns));
  }
  static bool vectors(const StepEntry& e) { return e.columns % 4 == 0 && aligned(e.weight); }
  static cudaError_t launch(const StepLaunch& launch, unsigned tiles, cudaStream_t stream) {
    second_pass<E, B><<<tiles, 32 * kSecondWarps, 0, stream>>>(launch);
    return cudaGetLastError();
  }
};

template <class Kernel>
cudaError_t launch_those(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  StepLaunches<Kernel> launches(stream);
  for (int64_t i = 0; i < count; ++i) {
    if (!Kernel::has(entries[i])) continue;
    if (cudaError_t error = launches.add(entries[i]); error != cudaSuccess) return error;
  }
  return launches.send();
}

}  // namespace

cudaError_t launch_second_pass(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  cudaError_t error = launch_those<SecondPass<E4M3, SecondBlocks::kTensor>>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<SecondPass<E5M2, SecondBlocks::kTensor>>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<SecondPass<E2M1, SecondBlocks::kRow16>>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<SecondPass<E2M1, SecondBlocks::kSquare16>>(entries, count, stream);
  return error;
}

}  // namespace cuda
}  // namespace blockfp
