// Launches of adamw.cuh: one for all parameters that share a way of keeping moments and a kind of blocks.
#include "adamw.cuh"

#include <algorithm>

#include "launch.h"

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

// What a kernel is launched with: gathered until it is full, then sent off.
template <Moments M, Blocks B>
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {
    launch_.count = 0;
    launch_.first_tile[0] = 0;
  }

  cudaError_t add(const StepEntry& e) {
    const int64_t tiles = e.batches * ceil_div(e.rows, kStepTileRows<B>) * ceil_div(e.columns, kStepColumns);
    if (tiles == 0) return cudaSuccess;
    if (tiles > kMostBlocks) return cudaErrorInvalidConfiguration;
    if (launch_.count == kStepMost || tiles_ + tiles > kMostBlocks) {
      if (cudaError_t error = send(); error != cudaSuccess) return error;
    }
    launch_.entry[launch_.count] = e;
    launch_.vectors[launch_.count] = vectors_fit(e);
    launch_.first_tile[launch_.count] = static_cast<uint32_t>(tiles_);
    tiles_ += tiles;
    launch_.first_tile[++launch_.count] = static_cast<uint32_t>(tiles_);
    return cudaSuccess;
  }

  cudaError_t send() {
    if (launch_.count == 0) return cudaSuccess;
    constexpr int kShared = kStepShared<B>;
    if constexpr (kShared > 48 << 10) {
      const cudaError_t error = cudaFuncSetAttribute(adamw<M, B>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      if (error != cudaSuccess) return error;
    }
    adamw<M, B><<<tiles_, 32 * kStepWarps<B>, kShared, stream_>>>(launch_);
    launch_.count = 0;
    tiles_ = 0;
    return cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
  StepLaunch launch_;  // its entries are written before they are read
  int64_t tiles_ = 0;
};

template <Moments M, Blocks B>
cudaError_t launch_those(const StepEntry* entries, int64_t count, cudaStream_t stream) {
  Launches<M, B> launches(stream);
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
