// What Hopper's product kernel is told.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockfp {
namespace cuda {

// Values in bfloat16 in the place of codes, numbered behind the kIds of elements.h.
struct Values {
  static constexpr int kId = 6;
};

// How b is scaled; a has a scale for every 128 of k in each of its rows, except with kTensor and kValues.
enum class Scaling {
  kTensor,   // one scale for all of a, and one for all of b; or one for each group
  kValues,   // the same, of Values
  kRows,     // of b as of a
  kBands,    // of b as of a, but the same in every 32 of its rows from the first
  kSquares,  // of b for every 128 x 128
};

// Codes or Values [rows, k] of one side, on a multiple of 16 bytes. k counts bytes, a multiple of 16.
struct GemmOperand {
  const void* codes;
  int element;  // kId: E4M3 or E5M2; or Values on both sides
  // Scales of rows: [blocks of k, rows filled up to fours], or [1, ..] of whole rows; of b so for each group.
  const float* scales;
};

// out [m, n] = a b^T (+ bias) (+ out). With groups, rows up to ends[g] of a are multiplied by the g-th [n, k] of b; or, along k, out is
// [groups, m, n] and the columns of group g of a and of b are multiplied, which lie as blockfp/exports.h says.
struct GemmArguments {
  int m, n, k, groups;
  const int32_t* ends;  // of the groups, ascending, in device memory; null: one group of all rows
  bool along_k;
  int a_step, b_step;   // of rows: 0 where a row has one scale, else 1
  // kSquares: b's scales, and floats from one to the next along b's rows, along k, and from group to group.
  const float* squares;
  int64_t square_row, square_block, square_group;
  // kTensor, kValues: the scales; steps are 0 where all groups share one, else 1.
  const float *a_factor, *b_factor;
  int a_factor_step, b_factor_step;
  const void* bias;     // [groups, n], or null
  int bias_dtype;       // kId of dtypes.h
  void* out;
  int dtype;
  bool accumulate;
  // What blocks draw their tiles from, zero before and after; null: they take every gridDim.x-th. launch_gemm finds one.
  int32_t* next_tile;
};

// Tiles of out that a block of threads works on, as rows x columns. kWide128x128 keeps two blocks of k in registers, of codes.
enum class TileShape { kAny = -1, k128x192, kWide128x128, kCount };

// The arguments are those of the kernel. The device has compute capability 9.0. kAny chooses.
cudaError_t launch_gemm(const GemmArguments& p, const GemmOperand& a, const GemmOperand& b, Scaling scaling, TileShape shape,
                        cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
