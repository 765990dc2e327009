// Runs an AdamW step of one parameter in tiles.
#include "run_jobs.h"
#include "float_mode.h"
#include "instruction_sets.h"
#include "run_tasks.h"

namespace blockfp {
namespace {

// Bytes of an element's gradient, master and moments, read and written: the cache footprint of a tile.
constexpr int kStepBytes = 16;

void set_key(const StepEntry& e, uint32_t what, uint32_t (&key)[2]) {
  const Words<uint32_t> words = rounding_key(e.key0, e.key1, static_cast<uint32_t>(e.step), e.parameter, what);
  key[0] = words.w0, key[1] = words.w1;
}

}  // namespace

void run_step(const StepEntry& entry) {
  const FloatMode mode;
  StepJob job{};
  StepEntry& e = job.entry = entry;
  if (e.coefficients_at != nullptr) e.coefficients = *e.coefficients_at;
  if (e.step_at != nullptr) e.step = static_cast<int32_t>(*e.step_at);
  if (e.coefficients.skip != 0.0f) return;
  const bool codes = e.output == static_cast<int>(StepOutput::kCodes);
  Format format{e.element, 0, 0, ScaleRule::kFp32};
  if (codes) format = {e.element, e.block_rows, e.block_columns, static_cast<ScaleRule>(e.rule)};
  const Tiling t = job.tiling = make_tiling(format, e.batches, e.rows, e.columns, 0, 0, kStepBytes);
  set_key(e, kRoundFirst, job.first_key);
  set_key(e, kRoundSecond, job.second_key);
  const int64_t shape[3] = {e.batches, e.rows, e.columns}, strides[3] = {e.rows * e.columns, e.columns, 1};
  if (codes) {
    job.quantize.format = format;
    job.quantize.tiling = t;
    job.quantize.x = {e.weight, Fp32::kId, 3, shape, strides};
    job.quantize.codes = static_cast<uint8_t*>(e.out);
    job.quantize.scales = e.out_scales;
    job.quantize.largest = e.largest_bits;
  }
  const auto run = current_kernels().step;
  run_tasks(t.tasks(), e.batches * e.rows * e.columns * kStepBytes * 2, Scratch::bytes(t, false),
            [&](int64_t task, int64_t next, void* scratch) { run(job, task, next, scratch); });
}

}  // namespace blockfp
