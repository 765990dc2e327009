// The parts of cuBLASLt's C interface that are used, as in cublasLt.h of CUDA 12.9 and later. Names are cuBLASLt's; numbers are
// its ABI.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace blockfp {
namespace cuda {
namespace cublas_lt {

using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

struct Algorithm {
  uint64_t data[8];
};

struct HeuristicResult {
  Algorithm algo;
  size_t workspace_size;
  int state;
  float waves_count;
  int reserved[4];
};

constexpr int CUBLAS_OP_T = 1;
constexpr int CUBLAS_COMPUTE_32F = 68;
constexpr int CUBLASLT_EPILOGUE_BIAS = 4;

enum MatmulDescAttribute {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
  CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
  CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
  CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,
  CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32,
};

enum PreferenceAttribute {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

enum ScaleMode {
  CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0,
  CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 4,
  CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5,
};

// The functions; null, with version 0, without cuBLASLt.
struct Functions {
  size_t version = 0;
  int (*create)(Handle*);
  int (*desc_create)(MatmulDesc*, int compute_type, cudaDataType scale_type);
  int (*desc_destroy)(MatmulDesc);
  int (*desc_set)(MatmulDesc, int attribute, const void* value, size_t bytes);
  int (*layout_create)(MatrixLayout*, cudaDataType, uint64_t rows, uint64_t columns, int64_t leading);
  int (*layout_destroy)(MatrixLayout);
  int (*preference_create)(Preference*);
  int (*preference_destroy)(Preference);
  int (*preference_set)(Preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d, Preference, int requested,
                   HeuristicResult*, int* returned);
  int (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout, const void* beta,
                const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*, void* workspace, size_t workspace_bytes,
                cudaStream_t);
};

}  // namespace cublas_lt
}  // namespace cuda
}  // namespace blockfp
