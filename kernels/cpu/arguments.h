// Argument checks of the CPU library, in addition to blockfp/exports.h.
#pragma once

#include "blockfp/exports.h"
#include "run_jobs.h"

namespace blockfp {

constexpr DLDevice kCpu{kDLCPU, 0};

inline Format checked_format(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  const Format f = format_of(element, block_rows, block_columns, rule);
  check(block_columns == 0 || f.per_row() || (block_columns >= 16 && block_columns <= 128 && (block_columns & (block_columns - 1)) == 0),
        "block columns must be 0, 16, 32, 64, 128 or those of a whole row, ", kWholeRow, ", and are ", block_columns);
  check(!f.per_row() || block_rows == 1, "a block that is a whole row has one row, and has ", block_rows);
  check(block_columns != 0 || (element <= E5M2::kId && f.rule <= ScaleRule::kPow2),
        "one scale for the whole tensor is for FP8 alone, and the format has element ", element, " and scale rule ", rule);
  check(!f.four_over_six() || (element == E2M1::kId && block_columns == 16 && (block_rows == 1 || block_rows == 16)),
        "4-over-6 is for E2M1 in blocks of 1x16 and 16x16, and the format has element ", element, " and blocks of ", block_rows, "x",
        block_columns);
  return f;
}

inline int64_t rows_in_all(const TensorView& x) {
  int64_t rows = 1;
  for (int axis = 0; axis < x.ndim() - 1; ++axis) rows *= x.size(axis);
  return rows;
}

inline int64_t scale_count(const Format& format, const Tiling& t) {
  return format.per_tensor() ? 1 : t.batches * t.grid_rows * t.grid_columns;
}

}  // namespace blockfp
