// Sets all scales of an operand that contains an Inf, and all codes of an aligned one, to NaN, after the kernel that has
// detected it.
#include <algorithm>

#include "../aligned.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kSpoilThreads = 256;

__device__ __forceinline__ void spoil(const Output& out) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kSpoilThreads) + threadIdx.x; i < out.scale_bytes; i += gridDim.x * kSpoilThreads) {
    // Four such bytes are a NaN as fp32, too.
    static_cast<uint8_t*>(out.scales)[i] = 0xFF;
  }
}

// Sets aligned codes, line by line per thread block, and all scales to NaN.
__device__ __forceinline__ void spoil(const AlignedOutput& out, int64_t matrices, int64_t lines, int64_t length) {
  if (out.codes == nullptr) return;
  const int64_t pitch = (length + kAlignedUnit - 1) / kAlignedUnit * kAlignedUnit;
  for (int64_t line = blockIdx.x; line < matrices * lines; line += gridDim.x) {
    for (int64_t i = threadIdx.x; i < length; i += kSpoilThreads) out.codes[line * pitch + i] = AlignedElement<E4M3>::kNanCode;
  }
  const int64_t scales = matrices * ((length + 127) / 128) * ((lines + 3) / 4 * 4);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kSpoilThreads) + threadIdx.x; i < scales; i += gridDim.x * kSpoilThreads) {
    out.scales[i] = shared_scale(0);
  }
}

__global__ void __launch_bounds__(kSpoilThreads) spoil_scales(const __grid_constant__ QuantizeArguments a) {
  wait_for_preceding();
  if (*a.recorded != kInfinity) return;
  spoil(a.row);
  spoil(a.column);
  spoil(a.aligned_row, a.x.batches, a.x.rows, a.x.columns);
  spoil(a.aligned_column, a.x.batches, a.x.columns, a.x.rows);
}

cudaError_t launch_spoil(const QuantizeArguments& a, cudaStream_t stream) {
  if (!a.mark || a.recorded == nullptr) return cudaSuccess;
  constexpr int64_t kMost = 264;  // thread blocks, each looping over further bytes
  const bool aligned = a.aligned_row.codes != nullptr || a.aligned_column.codes != nullptr;
  const int64_t bytes = aligned ? a.x.batches * a.x.rows * a.x.columns : std::max(a.row.scale_bytes, a.column.scale_bytes);
  const int64_t blocks = std::min(std::max(ceil_div(bytes, kSpoilThreads), int64_t{1}), kMost);
  return launch_early(spoil_scales, blocks, kSpoilThreads, 0, stream, a);
}

}  // namespace cuda
}  // namespace blockfp
