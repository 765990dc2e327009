// NaN for all scales of an operand that holds an Inf, after the kernel that has found it.
#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kSpoilThreads = 256;

__device__ __forceinline__ void spoil(const Output& out) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kSpoilThreads) + threadIdx.x; i < out.scale_bytes; i += gridDim.x * kSpoilThreads) {
    // Four such bytes are a NaN, too.
    static_cast<uint8_t*>(out.scales)[i] = 0xFF;
  }
}

__global__ void __launch_bounds__(kSpoilThreads) spoil_scales(const int32_t* overflow, const __grid_constant__ Output row,
                                                              const __grid_constant__ Output column) {
  if (*overflow != kInfinity) return;
  spoil(row);
  spoil(column);
}

cudaError_t launch_spoil(const QuantizeArguments& a, cudaStream_t stream) {
  if (!a.mark || a.recorded == nullptr) return cudaSuccess;
  constexpr int64_t kMost = 264;  // that go on to the next bytes
  const int64_t bytes = std::max(a.row.scale_bytes, a.column.scale_bytes);
  const int64_t blocks = std::min(std::max(ceil_div(bytes, kSpoilThreads), int64_t{1}), kMost);
  spoil_scales<<<blocks, kSpoilThreads, 0, stream>>>(a.recorded, a.row, a.column);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
