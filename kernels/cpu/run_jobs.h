// What the library does, in terms of plain pointers: jobs are cut into tiles and run.
#pragma once

#include "jobs.h"

namespace blockfp {

// Tiling of [batches, rows, columns] whose first element lies at (first_row, first_column) of the unsharded matrix.
Tiling make_tiling(const Format& format, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                   int64_t first_column, int element_bytes);

// Fills job.blocks, job.nan and job.tensor, each where it is not null; the tiling is made here.
void run_amax(AmaxJob job, int64_t first_row, int64_t first_column);

// `job.tensor_scale` goes out too, for two levels. Given amaxes are in job.given_blocks (per tensor: one) and
// `given_tensor` (two levels); per tensor a multiplier may stand instead of the amax (delayed scaling). With `job.keeps` the scales and
// the tensor scale that go out come in as those of before.
void run_quantize(QuantizeJob job, const int32_t* given_tensor, float* tensor_scale_out,
                  const float* given_multiplier = nullptr);

void run_dequantize(DequantizeJob job, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                    int64_t first_column);

void run_rotate(const RotateJob& job, int64_t batches);

// An AdamW step: masters and moments, and the codes of formats whose blocks lie within the arrays.
void run_step(const StepEntry& entry);

}  // namespace blockfp
