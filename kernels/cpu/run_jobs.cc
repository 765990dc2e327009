#include "run_jobs.h"

#include <algorithm>

#include "blockfp/dispatch.h"
#include "blockfp/four_over_six.h"
#include "float_mode.h"
#include "instruction_sets.h"
#include "run_tasks.h"

namespace blockfp {
namespace {

// A tile is read twice, so it has to stay in the second-level cache. Rows are as long as that allows, for the prefetcher.
constexpr int64_t kTileBytes = 1 << 18;
constexpr int64_t kLongestRow = 1 << 13;
// Blocks of many rows would make rows short. Long rows from the third-level cache are faster, if there are still enough tiles
// for all threads.
constexpr int64_t kBandBytes = 1 << 22;
constexpr int64_t kBandsPerThread = 4;

int64_t batches_of(const Input& x) {
  int64_t batches = 1;
  for (int axis = 0; axis < x.ndim - 2; ++axis) batches *= x.shape[axis];
  return batches;
}

int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

int64_t elements(const Tiling& t) { return t.batches * t.rows * t.columns; }

int32_t tensor_amax_of(const Input& x, const Tiling& tiling, bool gather, const Format& format) {
  int32_t bits = 0;
  AmaxJob job{format, tiling, x, nullptr, nullptr, &bits};
  const auto run = current_kernels().tensor_amax;
  run_tasks(tiling.tasks(), elements(tiling) * dtype_bytes(x.dtype), Scratch::bytes(tiling, gather),
            [&](int64_t task, int64_t, void* scratch) { run(job, task, scratch); });
  return bits;
}

template <class E>
BlockScale<float> per_tensor_scale(const QuantizeJob& job, int32_t amax) {
  if (job.keeps) {
    const int32_t stored = kept_fp32_scale<E>(*static_cast<const int32_t*>(job.scales), amax);
    return {stored, stored_multiplier(job.format.rule, stored, 1.0f)};
  }
  if (job.format.rule == ScaleRule::kPow2) return fp8_scale<E, ScaleRule::kPow2, float>(amax, job.eps_bits, kFp32Max);
  return fp8_scale<E, ScaleRule::kFp32, float>(amax, job.eps_bits, kFp32Max);
}

}  // namespace

Tiling make_tiling(const Format& format, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                   int64_t first_column, int element_bytes) {
  const int64_t block_rows = format.per_tensor() ? 1 : format.block_rows;
  const int64_t block_columns = format.per_tensor() ? 1 : format.block_columns;
  Tiling t{};
  t.batches = batches;
  t.rows = rows;
  t.columns = columns;
  t.row_phase = first_row % block_rows;
  t.column_phase = format.per_row() ? 0 : first_column % block_columns;
  t.grid_rows = rows == 0 ? 0 : up(t.row_phase + rows, block_rows);
  t.grid_columns = columns == 0 ? 0 : up(t.column_phase + columns, block_columns);
  // Tiles begin at block boundaries, and packed codes can only be split between bytes.
  const bool cut = !format.per_row() && (code_row_bytes(format.element, 4) == 4 || t.column_phase % 4 == 0);
  const auto widest_of = [&](int64_t bytes) {
    return std::clamp<int64_t>(bytes / (block_rows * element_bytes) / 128 * 128, 128, kLongestRow);
  };
  int64_t widest = widest_of(kTileBytes);
  if (columns > widest && widest < kLongestRow && batches * t.grid_rows >= kBandsPerThread * thread_limit()) {
    widest = widest_of(kBandBytes);
  }
  const int64_t whole = up(t.column_phase + columns, 128) * 128;
  t.tile_columns = std::max<int64_t>(cut ? std::min(widest, whole) : whole, 128);
  t.tile_rows = std::max<int64_t>(kTileBytes / (t.tile_columns * element_bytes) / block_rows, 1) * block_rows;
  t.row_tiles = up(t.row_phase + rows, t.tile_rows);
  t.column_tiles = up(t.column_phase + columns, t.tile_columns);
  if (batches == 0 || rows == 0 || columns == 0) t.row_tiles = t.column_tiles = 0;
  return t;
}

void run_amax(AmaxJob job, int64_t first_row, int64_t first_column) {
  const FloatMode mode;
  const int64_t batches = batches_of(job.x), rows = job.x.shape[job.x.ndim - 2], columns = job.x.shape[job.x.ndim - 1];
  const Tiling t = job.tiling =
      make_tiling(job.format, batches, rows, columns, first_row, first_column, dtype_bytes(job.x.dtype));
  const bool gather = job.x.column_stride() != 1;
  if (job.format.per_tensor()) {
    *job.blocks = tensor_amax_of(job.x, t, gather, job.format);
    return;
  }
  const auto run = current_kernels().block_amax;
  run_tasks(t.tasks(), elements(t) * dtype_bytes(job.x.dtype), Scratch::bytes(t, gather),
            [&](int64_t task, int64_t, void* scratch) { run(job, task, scratch); });
  if (job.tensor != nullptr) {
    const int64_t blocks = t.batches * t.grid_rows * t.grid_columns;
    *job.tensor = blocks == 0 ? 0 : *std::max_element(job.blocks, job.blocks + blocks);
  }
}

void run_quantize(QuantizeJob job, const int32_t* given_tensor, float* tensor_scale_out, const float* given_multiplier) {
  const FloatMode mode;
  const int64_t batches = batches_of(job.x), rows = job.x.shape[job.x.ndim - 2], columns = job.x.shape[job.x.ndim - 1];
  const Tiling t = job.tiling =
      make_tiling(job.format, batches, rows, columns, job.first_row, job.first_column, dtype_bytes(job.x.dtype));
  const bool gather = job.x.column_stride() != 1;
  if (given_multiplier != nullptr) {
    job.multiplier = *given_multiplier;
    *static_cast<float*>(job.scales) = divide(1.0f, job.multiplier);
  } else if (job.format.per_tensor()) {
    const int32_t amax = job.given_blocks != nullptr ? *job.given_blocks : tensor_amax_of(job.x, t, gather, job.format);
    const BlockScale<float> scale =
        job.format.element == E4M3::kId ? per_tensor_scale<E4M3>(job, amax) : per_tensor_scale<E5M2>(job, amax);
    job.multiplier = scale.multiplier;
    *static_cast<int32_t*>(job.scales) = scale.stored;
  } else if (job.format.two_levels()) {
    const int32_t amax = given_tensor != nullptr ? *given_tensor : tensor_amax_of(job.x, t, gather, job.format);
    job.tensor_amax = amax;
    if (job.keeps) {
      job.kept = kept_tensor_scale<E2M1>(to_bits(*tensor_scale_out), amax);
      job.tensor_scale = from_bits<float>(job.kept.after);
    } else {
      job.multiplier = tensor_multiplier<E2M1>(amax, job.format.rule);
      job.tensor_scale = divide(1.0f, job.multiplier);
    }
    *tensor_scale_out = job.tensor_scale;
  }
  expect_writes(job.codes, t.batches * t.rows * code_row_bytes(job.format.element, t.columns));
  const auto run = current_kernels().quantize;
  const int64_t work = elements(t) * (dtype_bytes(job.x.dtype) + 1) * (1 + job.random);
  run_tasks(t.tasks(), work, Scratch::bytes(t, gather),
            [&](int64_t task, int64_t next, void* scratch) { run(job, task, next, scratch); });
}

void run_dequantize(DequantizeJob job, int64_t batches, int64_t rows, int64_t columns, int64_t first_row,
                    int64_t first_column) {
  const FloatMode mode;
  const Tiling t = job.tiling =
      make_tiling(job.format, batches, rows, columns, first_row, first_column, dtype_bytes(job.dtype));
  expect_writes(job.out, elements(t) * dtype_bytes(job.dtype));
  const auto run = current_kernels().dequantize;
  run_tasks(t.tasks(), elements(t) * (dtype_bytes(job.dtype) + 1), Scratch::bytes(t, false),
            [&](int64_t task, int64_t, void* scratch) { run(job, task, scratch); });
}

void run_rotate(const RotateJob& job, int64_t batches) {
  const auto run = current_kernels().rotate;
  const int64_t rows_a_task = std::max<int64_t>(1, kTileBytes / 4 / std::max<int64_t>(job.columns, 1));
  const int64_t rows = batches * job.rows;
  run_tasks(up(rows, rows_a_task), rows * job.columns * 4, 0, [&](int64_t task, int64_t, void*) {
    const int64_t end = std::min(rows, (task + 1) * rows_a_task);
    for (int64_t row = task * rows_a_task; row < end; ++row) run(job, row);
  });
}

}  // namespace blockfp
