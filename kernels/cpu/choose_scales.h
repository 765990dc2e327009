// Chooses the scales of a row of blocks by 4-over-6. Included by each instruction set's file.
#pragma once

#include "amax_tasks.h"
#include "blockfp/four_over_six.h"
#include "row_codes.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Adjacent blocks with both candidate scales: [0] maps the amax to 6, [1] to 4.
struct Tries {
  static constexpr int kBlocks = 16, kCodes = 8;

  alignas(64) int32_t stored[2][kBlocks];
  alignas(64) float multipliers[2][kBlocks];
  alignas(64) float values[kBlocks][2][kCodes];  // values of the magnitudes' codes
  alignas(64) float errors[kBlocks][2][kUnit];   // errors of one row
  float sums[kBlocks][2][kFourOverSixSide];      // sums of the errors of each row of a block

  // Starts blocks with these amaxes, an array with room for kBlocks, of `rows` rows.
  template <class E>
  BLOCKFP_HD void begin(const QuantizeJob& job, const int32_t* amax, int64_t blocks, int64_t rows) {
    alignas(64) static constexpr int32_t kBoth[2 * kCodes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float scales[2][kBlocks];
    for (int k = 0; k < 2; ++k) {
      for (int b = 0; b < kBlocks; b += kLanes) {
        const auto tried = four_over_six_scale<E, F>(load<I>(amax + b), k == 1, job.multiplier, job.tensor_scale);
        store(stored[k] + b, tried.stored);
        store(multipliers[k] + b, tried.multiplier);
        store(scales[k] + b, tried.value);
      }
    }
    const float tensor_amax = from_bits<float>(job.tensor_amax);
    for (int64_t b = 0; b < blocks; ++b) {
      for (int c = 0; c < 2 * kCodes; c += kLanes) {
        const I both = load<I>(kBoth + c);
        const F scale = both < kCodes ? splat<F>(scales[0][b]) : splat<F>(scales[1][b]);
        store(values[b][0] + c, four_over_six_value<E, F>(both & (kCodes - 1), scale, tensor_amax, job.format.rule));
      }
      if (rows > 1) memset(sums[b], 0, sizeof(sums[b]));
    }
  }

  // Computes the errors of a row of block b, which has 16 elements.
  template <class E, class T>
  BLOCKFP_HD void measure(int64_t b, const typename T::Raw* x, ScaleRule rule) {
    for (int v = 0; v < kVectors; ++v) {
      const F magnitude = from_bits<F>(to_bits(load_floats<T>(x + v * kLanes)) & kMagnitude);
      for (int k = 0; k < 2; ++k) {
        const I code = four_over_six_code<E, F>(magnitude, splat<F>(multipliers[k][b]));
        store(errors[b][k] + v * kLanes, four_over_six_error<F>(look_up_eight(values[b][k], code), magnitude, rule));
      }
    }
  }

  // Sums the errors in order, for many blocks at once so that their sums overlap.
  void sum(int64_t blocks, int64_t row) {
    for (int64_t b = 0; b < blocks; ++b) {
      float six = errors[b][0][0], four = errors[b][1][0];
      for (int i = 1; i < kUnit; ++i) {
        six = add(six, errors[b][0][i]);
        four = add(four, errors[b][1][i]);
      }
      sums[b][0][row] = six;
      sums[b][1][row] = four;
    }
  }

  // Whether block b takes the scale for 4; false if an error is NaN.
  BLOCKFP_HD bool takes_4(int64_t b, int64_t rows) {
    if (rows == 1) return sums[b][1][0] < sums[b][0][0];
    return four_over_six_sum(sums[b][1]) < four_over_six_sum(sums[b][0]);
  }
};

// Stored scales and multipliers of one row of blocks, from the amaxes in `memory`. `row_in_block` is these rows' offset in
// their blocks.
template <class E, class T>
void choose_scales(const QuantizeJob& job, const Elements<T>& x, const Scratch& memory, int64_t first, int64_t rows,
                   int64_t row_in_block, int64_t columns, int64_t phase, int64_t blocks, int64_t at) {
  using Raw = typename T::Raw;
  const int64_t height = job.format.block_rows;
  const ScaleRule rule = job.format.rule;
  Tries tries;
  for (int64_t begin = 0; begin < blocks; begin += Tries::kBlocks) {
    const int64_t count = blocks - begin < Tries::kBlocks ? blocks - begin : Tries::kBlocks;
    tries.begin<E>(job, memory.amax + begin, count, height);
    if (job.given_members != nullptr) {
      for (int64_t r = 0; r < height; ++r) {
        for (int64_t b = 0; b < count; ++b) {
          const int32_t* row = job.given_members + ((at + begin + b) * height + r) * kUnit;
          tries.measure<E, Fp32>(b, reinterpret_cast<const Fp32::Raw*>(row), rule);
        }
        tries.sum(count, r);
      }
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        const Raw* row = x.row(first + r);
        for (int64_t b = 0; b < count; ++b) {
          const int64_t start = (begin + b) * kUnit - phase;
          if (start >= 0 && start + kUnit <= columns) {
            tries.measure<E, T>(b, row + start, rule);
          } else {
            Raw padded[kUnit] = {};
            for (int64_t i = start < 0 ? -start : 0; i < kUnit && start + i < columns; ++i) padded[i] = row[start + i];
            tries.measure<E, T>(b, padded, rule);
          }
        }
        tries.sum(count, row_in_block + r);
      }
    }
    for (int64_t b = 0; b < count; ++b) {
      const bool takes_4 = tries.takes_4(b, height);
      memory.stored[begin + b] = tries.stored[takes_4][b];
      memory.multipliers[begin + b] = tries.multipliers[takes_4][b];
    }
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
