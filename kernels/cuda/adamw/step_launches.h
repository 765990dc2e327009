// Collects parameters until a launch is full, then launches it.
#pragma once

#include "adamw.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {

// Kernel: has tiles(entry), vectors(entry) and launch(StepLaunch, tiles, stream).
template <class Kernel>
class StepLaunches {
 public:
  explicit StepLaunches(cudaStream_t stream) : stream_(stream) {
    launch_.count = 0;
    launch_.first_tile[0] = 0;
  }

  cudaError_t add(const StepEntry& e) {
    const int64_t tiles = Kernel::tiles(e);
    if (tiles == 0) return cudaSuccess;
    if (tiles > kMostBlocks) return cudaErrorInvalidConfiguration;
    if (launch_.count == kStepMost || tiles_ + tiles > kMostBlocks) {
      if (cudaError_t error = send(); error != cudaSuccess) return error;
    }
    launch_.entry[launch_.count] = e;
    launch_.vectors[launch_.count] = Kernel::vectors(e);
    launch_.first_tile[launch_.count] = static_cast<uint32_t>(tiles_);
    tiles_ += tiles;
    launch_.first_tile[++launch_.count] = static_cast<uint32_t>(tiles_);
    return cudaSuccess;
  }

  cudaError_t send() {
    if (launch_.count == 0) return cudaSuccess;
    const cudaError_t error = Kernel::launch(launch_, static_cast<unsigned>(tiles_), stream_);
    launch_.count = 0;
    tiles_ = 0;
    return error;
  }

 private:
  cudaStream_t stream_;
  StepLaunch launch_;  // entries are written before they are read
  int64_t tiles_ = 0;
};

}  // namespace cuda
}  // namespace blockfp
