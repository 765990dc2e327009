// The library's functions, callable from any language through Apache TVM FFI. Arrays are DLPack tensors; bfloat16 and NumPy's
// float16 may be passed as 16-bit integers, so the dtype is a separate argument. Callers allocate the outputs.
//
// Callers check formats, shapes and dtypes (blockfp/kernels/native.py); only accesses outside of arrays are checked here.

#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "arguments.h"
#include "run_jobs.h"
#include "instruction_sets.h"
#include "run_tasks.h"

namespace blockfp {
namespace {

using tvm::ffi::Array;
using tvm::ffi::String;

Input input_of(const TensorView& x, int64_t dtype) {
  check_device(x, "x", kCpu);
  check(x.ndim() >= 2 && x.dtype().bits == 8 * dtype_bytes(dtype), "x must have two or more axes and ", 8 * dtype_bytes(dtype),
        " bits an element; it is ", describe(x));
  return {data_of<const void>(x), static_cast<int>(dtype), x.ndim(), x.shape().data(), x.strides().data()};
}

Tiling tiling_of(const Format& format, const TensorView& x, int64_t columns, int64_t first_row, int64_t first_column) {
  check(first_row >= 0 && first_column >= 0, "origin must not be negative; it is (", first_row, ", ", first_column, ")");
  const int64_t rows = x.size(-2);
  int64_t batches = 1;
  for (int axis = 0; axis < x.ndim() - 2; ++axis) batches *= x.size(axis);
  return make_tiling(format, batches, rows, columns, first_row, first_column, 4);
}

void amax(TensorView x, TensorView blocks, Optional<TensorView> nan, Optional<TensorView> tensor, int64_t dtype,
          int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, int64_t first_row, int64_t first_column) {
  const Input input = input_of(x, dtype);
  const Format format = checked_format(element, block_rows, block_columns, rule);
  const int64_t scales = scale_count(format, tiling_of(format, x, x.size(-1), first_row, first_column));
  check_array(blocks, "blocks", kCpu, scales, 32, "an int32 for each block");
  if (nan.has_value()) check_array(nan.value(), "nan", kCpu, scales, 32, "an int32 for each block");
  if (tensor.has_value()) check_array(tensor.value(), "tensor", kCpu, 1, 32, "one int32");
  run_amax({format, {}, input, data_of<int32_t>(blocks), data_of<int32_t>(nan), data_of<int32_t>(tensor)}, first_row,
           first_column);
}

// `random`: random bytes per element, 0 rounds to nearest. With `keeps`, x is 32 bits wide, and scales and tensor_scale contain
// the previous ones, which the new ones are derived from.
void quantize(TensorView x, TensorView codes, TensorView scales, Optional<TensorView> tensor_scale,
              Optional<TensorView> given_blocks, Optional<TensorView> given_nan, Optional<TensorView> given_tensor,
              Optional<TensorView> given_members, int64_t dtype, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, int64_t largest,
              double eps, bool keeps, int64_t random, int64_t key0, int64_t key1, int64_t first_row, int64_t first_column,
              int64_t index_rows, int64_t index_columns) {
  QuantizeJob job{};
  job.x = input_of(x, dtype);
  job.format = checked_format(element, block_rows, block_columns, rule);
  const int64_t count = scale_count(job.format, tiling_of(job.format, x, x.size(-1), first_row, first_column));
  const bool two_levels = job.format.two_levels();
  check_array(codes, "codes", kCpu, rows_in_all(x) * code_row_bytes(job.format.element, x.size(-1)), 8, "packed codes");
  check_array(scales, "scales", kCpu, count, job.format.scale_bits(), "a scale for each block");
  check(tensor_scale.has_value() == two_levels, "tensor_scale belongs to formats of two levels, and is ",
        two_levels ? "missing" : "there");
  if (two_levels) check_array(tensor_scale.value(), "tensor_scale", kCpu, 1, 32, "one float32");
  if (given_blocks.has_value()) {
    check_array(given_blocks.value(), "amax.blocks", kCpu, count, 32, "an int32 for each block");
    check(given_nan.has_value() == (element > E5M2::kId), "amax.nan belongs to elements without a NaN code");
    if (given_nan.has_value()) check_array(given_nan.value(), "amax.nan", kCpu, count, 32, "an int32 for each block");
    check(given_tensor.has_value() == two_levels, "amax.tensor belongs to formats of two levels");
    if (two_levels) check_array(given_tensor.value(), "amax.tensor", kCpu, 1, 32, "one int32");
    if (given_members.has_value()) {
      check(job.format.four_over_six(), "amax.members belongs to formats whose blocks choose between scales");
      check_array(given_members.value(), "amax.members", kCpu, count * block_rows * block_columns, 32, "an int32 for each element of a block");
    }
  }
  job.codes = data_of<uint8_t>(codes);
  job.scales = data_of<void>(scales);
  job.given_blocks = data_of<int32_t>(given_blocks);
  job.given_nan = data_of<int32_t>(given_nan);
  job.given_members = data_of<int32_t>(given_members);
  job.eps_bits = bit_cast<int32_t>(static_cast<float>(eps));
  job.largest = static_cast<int32_t>(largest);
  check(random >= 0 && random <= (dtype == Fp32::kId ? 2 : 1), "an element has no random byte, one, or of float32 two, and random is ", random);
  job.keeps = keeps;
  job.random = static_cast<int>(random);
  job.key0 = static_cast<uint32_t>(key0);
  job.key1 = static_cast<uint32_t>(key1);
  job.first_row = first_row;
  job.first_column = first_column;
  job.index_rows = index_rows;
  job.index_columns = index_columns;
  run_quantize(job, data_of<int32_t>(given_tensor), data_of<float>(tensor_scale));
}

void dequantize(TensorView codes, TensorView scales, double tensor_scale, TensorView out, int64_t dtype, int64_t element,
                int64_t block_rows, int64_t block_columns, int64_t rule, int64_t first_row, int64_t first_column) {
  DequantizeJob job{};
  job.format = checked_format(element, block_rows, block_columns, rule);
  check(out.ndim() >= 2, "out must have two or more axes; it is ", describe(out));
  const int64_t columns = out.size(-1);
  const Tiling t = tiling_of(job.format, out, columns, first_row, first_column);
  check_array(out, "out", kCpu, t.batches * t.rows * columns, 8 * dtype_bytes(dtype), "values of the dtype that was named");
  check_array(codes, "codes", kCpu, rows_in_all(out) * code_row_bytes(job.format.element, columns), 8, "packed codes");
  check_array(scales, "scales", kCpu, scale_count(job.format, t), job.format.scale_bits(), "a scale for each block");
  job.codes = data_of<const uint8_t>(codes);
  job.scales = data_of<const void>(scales);
  job.tensor_scale = static_cast<float>(tensor_scale);
  job.dtype = static_cast<int>(dtype);
  job.out = data_of<void>(out);
  run_dequantize(job, t.batches, t.rows, columns, first_row, first_column);
}

void rotate(TensorView x, TensorView out, int64_t dtype) {
  const Input input = input_of(x, dtype);
  check_array(out, "out", kCpu, x.numel(), 8 * dtype_bytes(dtype), "like x");
  const int64_t rows = x.size(-2), batches = rows == 0 ? 0 : rows_in_all(x) / rows;
  run_rotate({input, rows, x.size(-1), data_of<void>(out)}, batches);
}

// Rows are StepEntry; their pointers are trusted (native.adamw checks the arrays).
void adamw(TensorView table) {
  const StepEntry* entries = step_entries(table);
  for (int64_t i = 0; i < table.size(0); ++i) {
    const StepEntry& e = entries[i];
    check(e.output <= static_cast<int>(StepOutput::kCodes), "row ", i, " of the table has output ", e.output,
          ", which this library does not have");
    if (e.output == static_cast<int>(StepOutput::kCodes)) checked_format(e.element, e.block_rows, e.block_columns, e.rule);
  }
  for (int64_t i = 0; i < table.size(0); ++i) run_step(entries[i]);
}

Array<String> available() {
  Array<String> names;
  for (const std::string& name : instruction_sets()) names.push_back(name);
  return names;
}

bool use(String name) { return use_instruction_set(name); }

String in_use() { return current_kernels().name; }

int64_t threads(int64_t most) { return set_threads(static_cast<int>(most)); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax, amax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, dequantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate, rotate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adamw, adamw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(instruction_sets, available);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_instruction_set, use);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(instruction_set, in_use);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_threads, threads);

}  // namespace
}  // namespace blockfp
