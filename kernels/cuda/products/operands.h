// Prepares a product's operands for the matrix units.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockfp {
namespace cuda {

// Scales of stacked matrices as stored. Strides count floats.
struct StoredScales {
  const float* data;
  int64_t matrices, rows, blocks;  // rows of codes
  int64_t repeat;                  // rows that share a row of scales; 0: all rows do
  int64_t matrix_stride, row_stride, block_stride;
};

// out: [matrices, blocks, rows padded with zeros to a multiple of 4].
cudaError_t launch_lay_scales(const StoredScales& in, float* out, cudaStream_t stream);

// out: [rows, filled], from in [rows, length], both bytes, padded with zeros. `filled` and the address of out are multiples of
// 16.
cudaError_t launch_fill_rows(const void* in, void* out, int64_t rows, int64_t length, int64_t filled, cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
