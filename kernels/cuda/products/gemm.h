// Arguments of Hopper's product kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockfp {
namespace cuda {

// bfloat16 values instead of codes, numbered after the kIds of elements.h.
struct Values {
  static constexpr int kId = 6;
};

// How b is scaled; a has a scale per row and 128 of k, except with kTensor and kValues.
enum class Scaling {
  kTensor,   // one scale for a and one for b; or one per group
  kValues,   // the same, for Values
  kRows,     // b like a
  kBands,    // b like a, but equal within every 32 of its rows from the first
  kSquares,  // one of b per 128 x 128
};

// Codes or Values [rows, k] of one operand, aligned to 16 bytes. k counts bytes, a multiple of 16.
struct GemmOperand {
  const void* codes;
  int element;  // kId: E4M3 or E5M2; or Values on both sides
  // Scales of rows: [blocks of k, rows padded to a multiple of 4], or [1, ..] for whole rows; for b, one such array per group.
  const float* scales;
};

// out [m, n] = a b^T (+ bias) (+ out). With groups, rows of a up to ends[g] are multiplied by the g-th [n, k] of b; or, along
// k, out is [groups, m, n], and the columns of group g of a and b are multiplied, laid out as in blockfp/exports.h.
struct GemmArguments {
  int m, n, k, groups;
  const int32_t* ends;  // of the groups, ascending, in device memory; null: a single group
  bool along_k;
  int a_step, b_step;   // between rows' scales: 0 if a row has one scale, else 1
  // kSquares: b's scales, and the number of floats between adjacent ones along b's rows, along k, and between groups.
  const float* squares;
  int64_t square_row, square_block, square_group;
  // kTensor, kValues: the scales; steps are 0 if all groups share one, else 1.
  const float *a_factor, *b_factor;
  int a_factor_step, b_factor_step;
  const void* bias;     // [groups, n], or null
  int bias_dtype;       // kId of dtypes.h
  void* out;
  int dtype;
  bool accumulate;
  // Counter from which blocks draw tiles, zero before and after; null: they take every gridDim.x-th. launch_gemm provides one.
  int32_t* next_tile;
};

// Tiles of out that a thread block computes, rows x columns. kWide128x128 keeps two blocks of k in registers; only for codes.
enum class TileShape { kAny = -1, k128x192, kWide128x128, kCount };

// Arguments as for the kernel. Requires compute capability 9.0. kAny chooses the shape.
cudaError_t launch_gemm(const GemmArguments& p, const GemmOperand& a, const GemmOperand& b, Scaling scaling, TileShape shape,
                        cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
