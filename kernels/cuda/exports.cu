// The library's functions, callable through Apache TVM FFI from PyTorch, JAX (jax-tvm-ffi) and any DLPack library.
//
//   amax(x, out)
//       out: int32 [1], fp32 bits of the largest magnitude of x, ignoring NaN; a second element is that of x after the random Hadamard
//       transform of its columns.
//   record_amax(amax, history)
//       amax: int32 [1]; history: float32 [n], whose first entry is raised to it unless it is Inf.
//   amax_blocks(x, blocks, nan?, tensor?, FORMAT, row, column)
//       blocks, nan: int32, one per block; tensor: int32 [1].
//   quantize(x, key?, amax?, recorded?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, tensor_scale_t?, FORMAT,
//            measure, eps_bits, largest_bits, rotate_t, rows_ordered, columns_ordered, mark, row, column, rows, columns)
//       codes, scales: along the rows of x. codes_t, scales_t: of x transposed. Either, or both from one read.
//       amax: of the tensor, for formats with one scale per tensor or two levels: int32 bits; with `measure` it is computed first, in
//       place; a float32 is the multiplier itself (delayed scaling), with `measure` only if it is above 0: otherwise the amax of x
//       decides, which is computed first. With rotate_t it has two elements, the second for the rotated, transposed direction. With a
//       scale per row, scratch: an int32 for each row, then for each column, that has codes.
//       recorded: int32 [1]; with one scale per tensor it becomes the amax of x, in blocks the bits of Inf if x contains one. mark:
//       scales (tensor scales, with two levels) become NaN if x contains an Inf; requires `recorded` if there is no amax.
//       key: int32 or uint32 [2], or [4] whose second pair is for codes_t; absent: round to nearest even. rotate_t: apply the random
//       Hadamard transform before codes_t. largest_bits: fp32 bits that replace an FP8 block multiplier that overflows. rows_ordered,
//       columns_ordered: scales, scales_t are those of one matrix as `product` reads them (products/product_exports.cu), 1x128 or a
//       scale per row, [blocks, lines padded to a multiple of 4]; the padding isn't written.
//   encode(x, blocks?, nan?, amax?, key?, codes, scales, tensor_scale?, FORMAT, eps_bits, largest_bits, row, column, rows, columns)
//       with blocks or amax (reduced elsewhere), scales and tensor_scale are written; without, they are read. Any strides and origin.
//   requantize(x, blocks, nan?, amax?, key?, codes, scales, tensor_scale?, kept_tensor_scale?, FORMAT, row, column, rows, columns)
//       x: float32, updated quantized values. scales, kept_tensor_scale: the previous ones, from which the new scales and tensor_scale
//       follow (blockfp/kept_scales.h). blocks, nan, amax: of x. key: two random bytes per element. Any strides and origin.
//   dequantize(codes, scales, tensor_scale?, out, FORMAT, row, column)
//       without tensor_scale, two-level formats use 1.
//   transpose(in, out, bits, rows, columns)
//       bits: 8, 6 or 4 for codes and one-byte scales, 32 for fp32 scales; rows and columns of `in`, in codes.
//   fold_keys(key, step?, rank, groups, advance, out)
//       key: int32 or int64 [2]; step: int64 [1], which `advance` increments afterwards; out: int32 [max(groups, 1), 2, 2]. Negative rank or
//       groups aren't folded in.
//   adamw(table, x)
//       table: int64 in host memory, rows of StepEntry (blockfp/adamw.h), whose pointers are trusted. x: any of their arrays, for its
//       device and the caller's stream.
//   adamw_codes(table, x)
//       the second pass: codes of new masters in formats whose scales need the whole parameter's amax, to which the rows' `first` points;
//       `second`: their tensor_scale, for two-level formats.
//
// FORMAT is four integers: element, block_rows, block_columns (0, 0: the tensor), rule, as numbered in elements.h and scales.h.
// FP8 with a scale per row (1, kWholeRow) is only for amax_blocks, quantize, encode and dequantize. `?`: None or an empty array
// if absent. (row, column) is the origin of x in an unsharded matrix of (rows, columns); 0 rows mean x's own extent. Callers
// allocate the outputs, which are contiguous. Work is enqueued on the caller's current stream. Products are in
// products/product_exports.cu, functions on groups in quantize/group_exports.cu, and quantizers to aligned codes in
// quantize/aligned_exports.cu.
#include "on_device.h"

namespace blockfp {
namespace cuda {
namespace {

Window window_of(const Format& f, int64_t x_rows, int64_t x_columns, int64_t row, int64_t column, int64_t rows,
                 int64_t columns) {
  check(row >= 0 && column >= 0, "origin must not be negative; it is (", row, ", ", column, ")");
  const int tall = f.per_tensor() ? 1 : f.block_rows, wide = f.per_tensor() ? 1 : f.block_columns;
  return {row, column, rows > 0 ? rows : row + x_rows, columns > 0 ? columns : column + x_columns,
          static_cast<int>(row % tall), f.per_row() ? 0 : static_cast<int>(column % wide)};
}

int64_t block_count(const Format& f, int64_t batches, int64_t rows, int64_t columns, int row_phase, int column_phase) {
  if (f.per_tensor()) return 1;
  if (rows == 0 || columns == 0) return 0;
  return batches * ceil_div(row_phase + rows, f.block_rows) * ceil_div(column_phase + columns, f.block_columns);
}

const uint32_t* key_of(const MaybeTensor& key, int pair, DLDevice device) {
  if (!has(key)) return nullptr;
  const int64_t words = key.value().numel() == 4 ? 4 : 2;
  check_array(key, "key", device, words, 32, "two or four words");
  return data_of<const uint32_t>(key) + (words == 4 ? 2 * pair : 0);
}

void amax(TensorView x, TensorView out) {
  const OnDevice on(x, "x");
  const bool rotated = out.numel() == 2;
  check_array(out, "out", on.device, rotated ? 2 : 1, 32, "one int32, or two");
  const Matrices m = matrices_of(x, "x");
  int32_t* largest = data_of<int32_t>(out);
  on.done(rotated ? launch_amax_rotated(m, largest, on.stream) : launch_amax(m, largest, on.stream));
}

void record_amax(TensorView amax, TensorView history) {
  const OnDevice on(history, "history");
  check_array(amax, "amax", on.device, 1, 32, "one int32");
  check_array(history, "history", on.device, std::max(history.numel(), int64_t{1}), 32, "float32, newest first");
  on.done(launch_record_amax(data_of<const int32_t>(amax), data_of<float>(history), on.stream));
}

void amax_blocks(TensorView x, TensorView blocks, MaybeTensor nan, MaybeTensor tensor, int64_t element, int64_t block_rows,
                 int64_t block_columns, int64_t rule, int64_t row, int64_t column) {
  const OnDevice on(x, "x");
  const Format f = checked_format(element, block_rows, block_columns, rule, Scales::kThere, true);
  check(!f.per_tensor(), "a format with one scale per tensor has no block grid: use amax");
  const Matrices m = matrices_of(x, "x");
  const Window w = window_of(f, m.rows, m.columns, row, column, 0, 0);
  const int64_t count = block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase);
  check_array(blocks, "blocks", on.device, count, 32, "an int32 for each block");
  check_array(nan, "nan", on.device, count, 32, "an int32 for each block");
  check_array(tensor, "tensor", on.device, 1, 32, "one int32");
  on.done(launch_amax_blocks({m, f, w, data_of<int32_t>(blocks), data_of<int32_t>(nan), data_of<int32_t>(tensor)}, on.stream));
}

void quantize(TensorView x, MaybeTensor key, MaybeTensor amax, MaybeTensor recorded, MaybeTensor codes, MaybeTensor scales,
              MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor tensor_scale_t, int64_t element,
              int64_t block_rows, int64_t block_columns, int64_t rule, bool measure, int64_t eps_bits, int64_t largest_bits,
              bool rotate_t, bool rows_ordered, bool columns_ordered, bool mark, int64_t row, int64_t column, int64_t rows,
              int64_t columns) {
  const OnDevice on(x, "x");
  QuantizeArguments a{};
  a.x = matrices_of(x, "x");
  a.format = checked_format(element, block_rows, block_columns, rule, Scales::kChosen, true);
  check(!a.format.four_over_six() || !has(codes_t) || a.format.square(),
        "blocks of 1x16 choose between scales (4-over-6) along the rows alone: ask for codes of x.mT");
  check(a.x.column_stride == 1 || x.numel() == 0, "the columns of x must be adjacent, and their stride is ", a.x.column_stride,
        ": pass x.contiguous(), or ask for codes_t of x.mT");
  a.window = window_of(a.format, a.x.rows, a.x.columns, row, column, rows, columns);
  const bool square = a.format.square(), whole = a.format.per_tensor(), two_levels = a.format.two_levels();
  const bool long_lines = a.format.per_row();
  if (!square && !whole && !long_lines) {
    a.window.row_phase = static_cast<int>(row % block_columns);  // of the transposed matrix
    if (!has(codes_t)) a.window.row_phase = 0;
    if (!has(codes)) a.window.column_phase = 0;
  }
  const Window& w = a.window;
  check((w.row_phase | w.column_phase) % 8 == 0, "blocks begin at multiples of eight elements here, and the origin is (", row, ", ",
        column, "): use amax_blocks and encode");
  const int64_t lines = a.x.batches * a.x.rows, lines_t = a.x.batches * a.x.columns;
  check_array(codes, "codes", on.device, lines * code_row_bytes(a.format.element, a.x.columns), 8, "packed codes of x");
  check_array(codes_t, "codes_t", on.device, lines_t * code_row_bytes(a.format.element, a.x.rows), 8, "packed codes of x transposed");
  if (has(codes) || whole) {
    const int64_t count = rows_ordered ? ordered_count(a.format, a.x.rows, a.x.columns)
                                       : block_count(a.format, a.x.batches, a.x.rows, a.x.columns, square ? w.row_phase : 0, w.column_phase);
    check_array(scales, "scales", on.device, count, a.format.scale_bits(), "a scale for each block of x");
  }
  if (has(codes_t)) {
    const int64_t count = columns_ordered ? ordered_count(a.format, a.x.columns, a.x.rows)
                                          : block_count(a.format, a.x.batches, a.x.columns, a.x.rows, square ? w.column_phase : 0, w.row_phase);
    check_array(scales_t, "scales_t", on.device, count, a.format.scale_bits(), "a scale for each block of x transposed");
  }
  check(has(codes) == has(scales) || x.numel() == 0, "codes and scales come together, and ", has(codes) ? "scales" : "codes",
        " is missing");
  check(has(codes_t) == has(scales_t) || x.numel() == 0, "codes_t and scales_t come together, and ",
        has(codes_t) ? "scales_t" : "codes_t", " is missing");
  const auto scale_bytes = [&](const MaybeTensor& of) { return has(of) ? of.value().numel() * a.format.scale_bits() / 8 : 0; };
  check(!(rows_ordered || columns_ordered) || (a.x.batches == 1 && row == 0 && column == 0),
        "scales in the order of products are those of one whole matrix; there are ", a.x.batches, ", from (", row, ", ", column, ")");
  a.row = {data_of<uint8_t>(codes), data_of<void>(scales), key_of(key, 0, on.device), scale_bytes(scales), rows_ordered};
  a.column = {data_of<uint8_t>(codes_t), data_of<void>(scales_t), key_of(key, 1, on.device), scale_bytes(scales_t), columns_ordered};
  check_array(recorded, "recorded", on.device, 1, 32, "one int32");
  a.recorded = data_of<int32_t>(recorded);
  a.mark = mark;
  if (whole || two_levels) {
    check(has(amax), "a format with one scale per tensor or two levels needs an amax");
    check_array(amax, "amax", on.device, rotate_t ? 2 : 1, 32, "one int32 (bits) or one float32 (a multiplier), two int32 with rotate_t");
    if (amax.value().dtype().code == kDLFloat) {
      check(whole && (!measure || has(recorded)), "a multiplier is for formats with one scale per tensor, and `measure` needs `recorded`");
      a.multiplier = data_of<const float>(amax), a.measured = measure;
    } else {
      a.amax = data_of<const int32_t>(amax);
      a.amax_t = a.amax + (rotate_t ? 1 : 0);
    }
  }
  check(!mark || a.amax != nullptr || has(recorded), "an Inf is marked by an amax or by `recorded`, and both are missing");
  const auto scale_of_tensor = [&](const MaybeTensor& scale, const MaybeTensor& own, const char* name) {
    check(two_levels ? has(scale) || !has(own) : !has(scale), name, " belongs to a direction of a format of two levels, and is ",
          has(scale) ? "there" : "missing");
    check_array(scale, name, on.device, 1, 32, "one float32");
    return data_of<float>(scale);
  };
  a.tensor_scale = scale_of_tensor(tensor_scale, codes, "tensor_scale");
  a.tensor_scale_t = scale_of_tensor(tensor_scale_t, codes_t, "tensor_scale_t");
  a.eps_bits = static_cast<int32_t>(eps_bits);
  a.largest_bits = static_cast<int32_t>(largest_bits);
  a.rotate_column = rotate_t;
  check(!rotate_t || (two_levels && !square && row % 16 == 0),
        "only NVFP4 in blocks of 1x16 is rotated, from rows that are multiples of 16; the first row is ", row);
  // launch_amax clears it.
  if (a.recorded != nullptr && !a.measured) on.done(cudaMemsetAsync(a.recorded, 0, sizeof(int32_t), on.stream));
  if (measure && a.amax != nullptr) {
    int32_t* out = data_of<int32_t>(amax);
    on.done(rotate_t ? launch_amax_rotated(a.x, out, on.stream) : launch_amax(a.x, out, on.stream));
  }
  if (a.measured) on.done(launch_amax(a.x, a.recorded, on.stream, a.multiplier));
  const bool empty = x.numel() == 0;
  if (empty && !whole && !two_levels) return;
  if (!empty && !has(codes) && !has(codes_t)) return;
  if (long_lines) {
    check_array(amax, "amax", on.device, (has(codes) ? lines : 0) + (has(codes_t) ? lines_t : 0), 32, "an int32 for each row and column");
    on.done(launch_long(a, data_of<int32_t>(amax), on.stream));
    return;
  }
  const bool along_rows = empty || (!has(codes_t) && (!square || whole));
  on.done(with_element(a.format.element, [&](auto e) {
    using E = decltype(e);
    return along_rows ? launch_rows<E>(a, on.stream) : launch_tiles<E>(a, on.stream);
  }));
}

// Common to `encode` and `requantize`.
EncodeArguments checked_encode(const OnDevice& on, TensorView x, MaybeTensor blocks, MaybeTensor nan, MaybeTensor amax, MaybeTensor key,
                               TensorView codes, TensorView scales, MaybeTensor tensor_scale, const Format& f, int64_t row, int64_t column,
                               int64_t rows, int64_t columns) {
  EncodeArguments a{};
  a.x = matrices_of(x, "x");
  a.format = f;
  const Matrices& m = a.x;
  const Window w = a.window = window_of(f, m.rows, m.columns, row, column, rows, columns);
  const int64_t count = block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase);
  check_array(codes, "codes", on.device, m.batches * m.rows * code_row_bytes(f.element, m.columns), 8, "packed codes of x");
  check_array(scales, "scales", on.device, count, f.scale_bits(), "a scale for each block");
  check_array(blocks, "blocks", on.device, count, 32, "an int32 for each block");
  check_array(nan, "nan", on.device, count, 32, "an int32 for each block");
  check_array(amax, "amax", on.device, 1, 32, "one int32");
  check_array(tensor_scale, "tensor_scale", on.device, 1, 32, "one float32");
  check(has(tensor_scale) == f.two_levels() && (!f.two_levels() || !has(blocks) || has(amax)),
        "formats of two levels, and no others, have an amax and a tensor_scale");
  a.codes = data_of<uint8_t>(codes);
  a.scales = data_of<void>(scales);
  a.blocks = data_of<const int32_t>(blocks);
  a.nan = data_of<const int32_t>(nan);
  a.amax = data_of<const int32_t>(amax);
  a.tensor_scale = data_of<float>(tensor_scale);
  a.key = key_of(key, 0, on.device);
  return a;
}

void encode(TensorView x, MaybeTensor blocks, MaybeTensor nan, MaybeTensor amax, MaybeTensor key, TensorView codes,
            TensorView scales, MaybeTensor tensor_scale, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule,
            int64_t eps_bits, int64_t largest_bits, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const OnDevice on(x, "x");
  const Scales scales_are = has(blocks) || has(amax) ? Scales::kMade : Scales::kThere;  // an empty x has no blocks
  const Format f = checked_format(element, block_rows, block_columns, rule, scales_are, true);
  EncodeArguments a = checked_encode(on, x, blocks, nan, amax, key, codes, scales, tensor_scale, f, row, column, rows, columns);
  a.eps_bits = static_cast<int32_t>(eps_bits);
  a.largest_bits = static_cast<int32_t>(largest_bits);
  on.done(launch_encode(a, on.stream));
}

void requantize(TensorView x, TensorView blocks, MaybeTensor nan, MaybeTensor amax, MaybeTensor key, TensorView codes,
                TensorView scales, MaybeTensor tensor_scale, MaybeTensor kept_tensor_scale, int64_t element, int64_t block_rows,
                int64_t block_columns, int64_t rule, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const OnDevice on(x, "x");
  const Format f = checked_format(element, block_rows, block_columns, rule, Scales::kThere, true);
  EncodeArguments a = checked_encode(on, x, blocks, nan, amax, key, codes, scales, tensor_scale, f, row, column, rows, columns);
  check(a.x.dtype == Fp32::kId, "x must be float32; it is ", describe(x));
  check_array(kept_tensor_scale, "kept_tensor_scale", on.device, 1, 32, "one float32");
  check(has(kept_tensor_scale) == f.two_levels(), "formats of two levels, and no others, have a kept_tensor_scale");
  a.keeps = true;
  a.kept_tensor_scale = data_of<const float>(kept_tensor_scale);
  on.done(launch_encode(a, on.stream));
}

void dequantize(TensorView codes, TensorView scales, MaybeTensor tensor_scale, TensorView out, int64_t element,
                int64_t block_rows, int64_t block_columns, int64_t rule, int64_t row, int64_t column) {
  const OnDevice on(out, "out");
  const Format f = checked_format(element, block_rows, block_columns, rule, Scales::kThere, true);
  const Matrices m = matrices_of(out, "out");
  check(out.IsContiguous(), "out must be contiguous; it is ", describe(out));
  const Window w = window_of(f, m.rows, m.columns, row, column, 0, 0);
  check_array(codes, "codes", on.device, m.batches * m.rows * code_row_bytes(f.element, m.columns), 8, "packed codes of out");
  check_array(scales, "scales", on.device, block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase), f.scale_bits(),
              "a scale for each block");
  check(!has(tensor_scale) || f.two_levels(), "tensor_scale belongs to formats of two levels");
  check_array(tensor_scale, "tensor_scale", on.device, 1, 32, "one float32");
  on.done(launch_dequantize({data_of<const uint8_t>(codes), data_of<const void>(scales), data_of<const float>(tensor_scale), f, w,
                             m.batches, m.rows, m.columns, data_of<void>(out), m.dtype},
                            on.stream));
}

void transpose(TensorView in, TensorView out, int64_t bits, int64_t rows, int64_t columns) {
  const OnDevice on(in, "in");
  check(bits == 4 || bits == 6 || bits == 8 || bits == 32, "bits must be 4, 6, 8 or 32, and is ", bits);
  const auto entries = [&](int64_t down, int64_t across) {
    return bits == 4 ? down * Packing<4>::row_bytes(across) : (bits == 6 ? down * Packing<6>::row_bytes(across) : down * across);
  };
  const int64_t one = entries(rows, columns);
  const int64_t batches = one == 0 ? 0 : in.numel() / one;
  check_array(in, "in", on.device, batches * one, bits == 32 ? 32 : 8, "matrices of rows x columns");
  check_array(out, "out", on.device, batches * entries(columns, rows), bits == 32 ? 32 : 8, "matrices of columns x rows");
  on.done(launch_transpose(data_of<const void>(in), data_of<void>(out), static_cast<int>(bits), batches, rows, columns, on.stream));
}

void adamw(TensorView table, TensorView x) {
  const StepEntry* entries = step_entries(table);
  const OnDevice on(x, "x");
  for (int64_t i = 0; i < table.size(0); ++i) {
    const StepEntry& e = entries[i];
    check(e.output != static_cast<int>(StepOutput::kAmax) || e.out_scales != nullptr, "row ", i, " of the table has no place for an amax");
    if (e.output != static_cast<int>(StepOutput::kCodes)) continue;
    const Format f = checked_format(e.element, e.block_rows, e.block_columns, e.rule);
    check(!f.per_tensor() && !f.two_levels(), "codes with an amax of the whole tensor take a second pass; row ", i,
          " of the table has such a format");
  }
  on.done(launch_adamw(entries, table.size(0), on.stream));
}

void adamw_codes(TensorView table, TensorView x) {
  const StepEntry* entries = step_entries(table);
  const OnDevice on(x, "x");
  for (int64_t i = 0; i < table.size(0); ++i) {
    const StepEntry& e = entries[i];
    const Format f = checked_format(e.element, e.block_rows, e.block_columns, e.rule);
    check(e.output == static_cast<int>(StepOutput::kCodes) && (f.per_tensor() || f.two_levels()), "row ", i,
          " of the table has no format with an amax of the whole tensor");
    const bool has_blocks = f.per_tensor() || e.batches * e.rows * e.columns != 0;
    check(e.first != nullptr && (e.out_scales != nullptr || !has_blocks) && (e.second != nullptr) == f.two_levels(), "row ", i,
          " of the table lacks amax, scales or tensor_scale");
  }
  on.done(launch_second_pass(entries, table.size(0), on.stream));
}

void fold_keys(TensorView key, MaybeTensor step, int64_t rank, int64_t groups, bool advance, TensorView out) {
  const OnDevice on(key, "key");
  const int bits = key.dtype().bits == 64 ? 64 : 32;
  check_array(key, "key", on.device, 2, bits, "two int32 or int64 words");
  check_array(step, "step", on.device, 1, 64, "one int64");
  check_array(out, "out", on.device, (groups < 0 ? 1 : groups) * 4, 32, "two words for each group and direction");
  check(!advance || has(step), "there is no step to advance");
  on.done(launch_fold_keys(data_of<const void>(key), bits == 64, data_of<int64_t>(step), rank, groups, advance, data_of<void>(out),
                           on.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(adamw, adamw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adamw_codes, adamw_codes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax, amax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax_blocks, amax_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(record_amax, record_amax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode, encode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(requantize, requantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, dequantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose, transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fold_keys, fold_keys);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
