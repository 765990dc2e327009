// Looks up functions of the CUDA driver, so that this library loads without a driver.
#pragma once

#include <cuda_runtime_api.h>

namespace blockfp {
namespace cuda {

// The function's CUDA 12.0 version; null if the driver lacks it.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace cuda
}  // namespace blockfp
