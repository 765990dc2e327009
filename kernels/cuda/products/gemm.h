// What Hopper's product kernel is told.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockfp {
namespace cuda {

// Scales of 1x128 lie [blocks, rows], of rows [1, rows]; those of b so for each group. `stride` is the floats from one block to the next,
// a multiple of 4; 0 for those of rows, which fill up four. Scales of 128x128 lie [rows / 128, blocks]: `stride` is the floats from one
// band of rows to the next.
struct GemmScales {
  const float* data;
  int64_t stride;
};

// Codes [rows, k] of one side, on a multiple of 16 bytes; k is a multiple of 16.
struct GemmOperand {
  const void* codes;
  int element;  // kId of elements.h: E4M3 or E5M2
  GemmScales scales;
};

// out [m, n] = a b^T (+ bias) (+ out). With groups, rows up to ends[g] of a are multiplied by the g-th [n, k] of b.
struct GemmArguments {
  int m, n, k, groups;
  const int32_t* ends;       // of the groups, ascending, in device memory; null: one group of all rows
  int a_step, b_step;        // 0 where a row has one scale, else 1
  const float* b_squares;    // b's scales, of 128x128; those of a group's first rows come after the last ones of the group before
  int64_t b_squares_stride;
  const void* bias;          // [groups, n], or null
  int bias_dtype;            // kId of dtypes.h
  void* out;
  int dtype;
  bool accumulate;
  bool vectors;              // whether out can be written four elements at a time
};

// The arguments are those of the kernel, but for what is said of the operands, which this fills in. `squares`: b's scales are of
// 128x128, else of its rows. The device has compute capability 9.0.
cudaError_t launch_gemm(GemmArguments p, const GemmOperand& a, const GemmOperand& b, bool squares, cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
