// Helpers of launches.
#pragma once

#include "arguments.h"

namespace blockfp {
namespace cuda {

constexpr int64_t kMostBlocks = 0x7FFFFFFF;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool aligned(const void* pointer, int bytes = 16) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline bool is_contiguous(const Matrices& x) {
  return x.column_stride == 1 && (x.row_stride == x.columns || x.rows == 1) &&
         (x.batches == 1 || x.batch_stride == x.rows * x.columns);
}

// Whether every eighth element of every row can be read as a 16-byte vector.
inline bool vectors_fit(const Matrices& x) {
  const int bytes = dtype_bytes(x.dtype);
  return aligned(x.data) && x.row_stride * bytes % 16 == 0 && (x.batches == 1 || x.batch_stride * bytes % 16 == 0);
}

// Waits for the end of the preceding kernel, for one that launch_early started.
__device__ __forceinline__ void wait_for_preceding() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that begins with wait_for_preceding: from compute capability 9.0 on, its launch needn't wait as well.
template <class... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                         const Parameters&... parameters) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = &early, config.numAttrs = major >= 9;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace cuda
}  // namespace blockfp
