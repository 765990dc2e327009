// The scales of a row of blocks by 4-over-6. Included by each instruction set's file.
#pragma once

#include "amax_tasks.h"
#include "blockfp/four_over_six.h"
#include "row_codes.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// The sum of the errors of one row of a block, which lacks elements or has 16, for each of two scales.
template <class E, class T>
BLOCKFP_HD void add_row_errors(const typename T::Raw* x, const TriedScale (&tried)[2], float tensor_amax, ScaleRule rule,
                               float* six, float* four) {
  float errors[2][kUnit];
  for (int v = 0; v < kVectors; ++v) {
    const F magnitude = from_bits<F>(to_bits(load_floats<T>(x + v * kLanes)) & kMagnitude);
    for (int k = 0; k < 2; ++k) {
      const TriedScale& s = tried[k];
      store(errors[k] + v * kLanes, four_over_six_error<E, F>(magnitude, s.value, s.multiplier, tensor_amax, rule));
    }
  }
  // Both sums at once, each from its first element to its last.
  float sums[2] = {errors[0][0], errors[1][0]};
  for (int i = 1; i < kUnit; ++i) {
    sums[0] = add(sums[0], errors[0][i]);
    sums[1] = add(sums[1], errors[1][i]);
  }
  *six = sums[0];
  *four = sums[1];
}

// Stored scales and multipliers of one row of blocks, from amaxes that `memory` has already. `row_in_block` is where in their
// blocks these rows begin.
template <class E, class T>
void choose_scales(const QuantizeJob& job, const Elements<T>& x, const Scratch& memory, int64_t first, int64_t rows,
                   int64_t row_in_block, int64_t columns, int64_t phase, int64_t blocks, int64_t at) {
  using Raw = typename T::Raw;
  const int64_t height = job.format.block_rows;
  const float tensor_amax = from_bits<float>(job.tensor_amax);
  const ScaleRule rule = job.format.rule;
  int64_t begin = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t end = (b + 1) * kUnit - phase;
    end = end < columns ? end : columns;
    const TriedScale tried[2] = {four_over_six_scale<E>(memory.amax[b], false, job.multiplier, job.tensor_scale),
                                 four_over_six_scale<E>(memory.amax[b], true, job.multiplier, job.tensor_scale)};
    float six[kFourOverSixSide] = {}, four[kFourOverSixSide] = {};
    if (job.given_members != nullptr) {
      const int32_t* members = job.given_members + (at + b) * height * kUnit;
      for (int64_t r = 0; r < height; ++r) {
        const auto* row = reinterpret_cast<const Fp32::Raw*>(members + r * kUnit);
        add_row_errors<E, Fp32>(row, tried, tensor_amax, rule, six + r, four + r);
      }
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        const Raw* values = x.row(first + r) + begin;
        Raw padded[kUnit] = {};
        if (end - begin < kUnit) {
          for (int64_t i = 0; i < end - begin; ++i) padded[i] = values[i];
          values = padded;
        }
        add_row_errors<E, T>(values, tried, tensor_amax, rule, six + row_in_block + r, four + row_in_block + r);
      }
    }
    // False where an error is NaN.
    const bool takes_4 = four_over_six_sum(four) < four_over_six_sum(six);
    memory.stored[b] = tried[takes_4].stored;
    memory.multipliers[b] = tried[takes_4].multiplier;
    begin = end;
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
