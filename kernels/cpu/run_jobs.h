// The library's operations on plain pointers: divides jobs into tiles and runs them.
#pragma once

#include "jobs.h"

namespace blockfp {

// Tiling of [batches, rows, columns] whose first element is at (first_row, first_column) of the unsharded matrix.
Tiling make_tiling(const Format& format, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                   int64_t first_column, int element_bytes);

// Fills job.blocks, job.nan and job.tensor, except null ones. Makes the tiling itself.
void run_amax(AmaxJob job, int64_t first_row, int64_t first_column);

// Also writes the tensor scale, with two levels. Given amaxes are job.given_blocks (per tensor: one) and `given_tensor` (two
// levels); per tensor, a multiplier may replace the amax (delayed scaling). With `job.keeps`, the output scales and tensor
// scale contain the previous ones on input.
void run_quantize(QuantizeJob job, const int32_t* given_tensor, float* tensor_scale_out,
                  const float* given_multiplier = nullptr);

void run_dequantize(DequantizeJob job, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                    int64_t first_column);

void run_rotate(const RotateJob& job, int64_t batches);

// An AdamW step: masters, moments, and codes of formats whose blocks are inside the arrays.
void run_step(const StepEntry& entry);

}  // namespace blockfp
