// What a product's operands need before the matrix units read them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockfp {
namespace cuda {

// Scales of stacked matrices as they are stored. Strides count floats.
struct StoredScales {
  const float* data;
  int64_t matrices, rows, blocks;  // rows of the codes
  int64_t repeat;                  // rows that share a row of scales; 0: all do
  int64_t matrix_stride, row_stride, block_stride;
};

// out [matrices, blocks, rows filled up to a multiple of 4 with zeros].
cudaError_t launch_lay_scales(const StoredScales& in, float* out, cudaStream_t stream);

// out [rows, filled] of in [rows, length], both bytes; zeros fill up. `filled` is a multiple of 16, and out on one.
cudaError_t launch_fill_rows(const void* in, void* out, int64_t rows, int64_t length, int64_t filled, cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
