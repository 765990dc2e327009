// Launches adamw.cuh, once for all parameters with the same moment storage and kind of blocks.
#include "step_launches.h"

namespace blockfp {
namespace cuda {
namespace {

Blocks blocks_of(const StepEntry& e) {
  if (e.output != static_cast<int>(StepOutput::kCodes)) return Blocks::kNothing;
  if (e.block_rows == 1) return Blocks::kRows;
  return e.block_rows == 32 ? Blocks::kSquare32 : Blocks::kSquare128;
}

bool vectors_fit(const StepEntry& e) {
  const bool copy = e.output == static_cast<int>(StepOutput::kCopy);
  return e.columns % 4 == 0 && aligned(e.gradient) && aligned(e.weight) && aligned(e.first) && aligned(e.second) &&
         (!copy || aligned(e.out, 8));
}

// The kernel for one moment storage and one kind of blocks.
template <Moments M, Blocks B>
struct Step {
  static int64_t tiles(const StepEntry& e) {
    return e.batches * ceil_div(e.rows, kStepTileRows<B>) * ceil_div(e.columns, kStepColumns);
  }
  static bool vectors(const StepEntry& e) { return vectors_fit(e); }
  static cudaError_t launch(const StepLaunch& launch, unsigned tiles, cudaStream_t stream) {
    constexpr int kShared = kStepShared<B>;
    if constexpr (kShared > 48 << 10) {
      const cudaError_t error = cudaFuncSetAttribute(adamw<M, B>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      if (error != cudaSuccess) return error;
    }
    adamw<M, B><<<tiles, 32 * kStepWarps<B>, kShared, stream>>>(launch);
    return cudaGetLastError();
  }
};

template <Moments M, Blocks B>
cudaError_t launch_those(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  StepLaunches<Step<M, B>> launches(stream);
  for (int64_t i = 0; i < count; ++i) {
    if (entries[i].moments != static_cast<int>(M) || blocks_of(entries[i]) != B) continue;
    if (cudaError_t error = launches.add(entries[i]); error != cudaSuccess) return error;
  }
  return launches.send();
}

template <Moments M>
cudaError_t launch_with(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  cudaError_t error = launch_those<M, Blocks::kSquare128>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<M, Blocks::kSquare32>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<M, Blocks::kRows>(entries, count, stream);
  if (error == cudaSuccess) error = launch_those<M, Blocks::kNothing>(entries, count, stream);
  return error;
}

}  // namespace

cudaError_t launch_adamw(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  cudaError_t error = launch_with<Moments::kFp32>(entries, count, stream);
  if (error == cudaSuccess) error = launch_with<Moments::kBf16>(entries, count, stream);
  if (error == cudaSuccess) error = launch_with<Moments::kFp8>(entries, count, stream);
  return error;
}

}  // namespace cuda
}  // namespace blockfp
