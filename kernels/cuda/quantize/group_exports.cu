// The library's functions for rows sorted by group, callable as described in exports.cu. blockfp/groups.h describes the layout.
//
//   group_rows(ends, words, tokens)
//       ends: int32 [groups]. words: int32 [group_words(tokens, groups)]: first the ends, ascending and at most `tokens`, then
//       padded_ends, then tiles. The following functions take them.
//   group_words(tokens, groups) -> number of words
//   group_columns(tokens, groups) -> columns of the columnwise codes
//   quantize_groups(x, words, keys?, amax?, recorded?, overflows?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, tensor_scale_t?,
//                   groups, rows_keyed, columns_keyed, FORMAT, measure, eps_bits, largest_bits, rotate_t)
//       x: [tokens, features]. keys: [groups, 2, 2] words, as from fold_keys; rows_keyed and columns_keyed say which directions are
//       rounded with them. amax: int32 [groups], with rotate_t [groups, 2], for formats with one scale or two levels; with `measure` it
//       is computed first; a float32 is one multiplier for all. recorded: int32 [groups], raised to the amaxes. overflows: int32
//       [groups], scratch for formats without amax. Scales of groups that contain an Inf are NaN.
//   quantize_groups_aligned(x, words, overflows, codes?, scales?, codes_t?, scales_t?, stored_t?, stored_scales_t?, groups, FORMAT)
//       As `quantize_aligned` (aligned_exports.cu), by group. codes: [tokens, features padded], codes_t: [features, columns].
//   sum_groups(x, words, out)
//       x: [tokens, features], contiguous; out: float32 [groups, features], sums over each group's rows.
//   clear_groups(words, rows?, matrices?, groups)
//       clears the rows [tokens, ..] past the last end, and the matrices [groups, ..] of groups without rows.
#include "aligned_exports.h"

namespace blockfp {
namespace cuda {
namespace {

void check_words(const TensorView& words, int64_t tokens, int64_t groups, DLDevice device) {
  check_array(words, "words", device, group_words(tokens, groups), 32, "what group_rows wrote for these tokens and groups");
  check(aligned(data_of<const void>(words), 32), "words must begin on a multiple of 32 bytes");
}

void group_rows(TensorView ends, TensorView words, int64_t tokens) {
  const OnDevice on(ends, "ends");
  check(tokens >= 0 && group_columns(tokens, ends.numel()) <= INT32_MAX, "tokens and 127 for each group must be less than 2^31; tokens is ",
        tokens);
  check_array(ends, "ends", on.device, ends.numel(), 32, "int32, one for each group");
  check_words(words, tokens, ends.numel(), on.device);
  on.done(launch_group_rows(data_of<const int32_t>(ends), tokens, ends.numel(), data_of<int32_t>(words), on.stream));
}

void quantize_groups(TensorView x, TensorView words, MaybeTensor keys, MaybeTensor amax, MaybeTensor recorded, MaybeTensor overflows,
                     MaybeTensor codes, MaybeTensor scales, MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t,
                     MaybeTensor tensor_scale_t, int64_t groups, bool rows_keyed, bool columns_keyed,
                     int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, bool measure, int64_t eps_bits,
                     int64_t largest_bits, bool rotate_t) {
  const OnDevice on(x, "x");
  QuantizeArguments a{};
  a.x = matrices_of(x, "x");
  a.format = checked_format(element, block_rows, block_columns, rule);
  check(x.ndim() == 2 && (a.x.column_stride == 1 || x.numel() == 0), "x must be [tokens, features] with adjacent features; it is ",
        describe(x));
  const int64_t tokens = a.x.rows, features = a.x.columns, columns = group_columns(tokens, groups);
  check(groups >= 0 && columns <= INT32_MAX, "tokens and 127 for each group must be less than 2^31; groups is ", groups);
  check_words(words, tokens, groups, on.device);
  a.window = {0, 0, 0, features, 0, 0};
  a.groups.count = groups, a.groups.tokens = tokens, a.groups.columns = columns, a.groups.overflow_stride = 1;
  const bool square = a.format.square(), whole = a.format.per_tensor(), two_levels = a.format.two_levels();
  const auto fours = [](int64_t lines) { return ceil_div(lines, 4) * 4; };
  const int64_t blocks = whole ? 0 : ceil_div(features, block_columns), blocks_t = whole ? 0 : columns / block_columns;
  const bool turned = !square && block_columns == 128;
  const int64_t count = whole ? groups : (square ? blocks_t * blocks : blocks * (turned ? fours(tokens) : tokens));
  const int64_t count_t = whole ? groups : blocks_t * (square ? blocks : (turned ? fours(features) : features));
  check_array(codes, "codes", on.device, tokens * code_row_bytes(a.format.element, features), 8, "packed codes of x");
  check_array(codes_t, "codes_t", on.device, features * code_row_bytes(a.format.element, columns), 8, "packed codes along the columns");
  check_array(scales, "scales", on.device, count, a.format.scale_bits(), "scales of x");
  check_array(scales_t, "scales_t", on.device, count_t, a.format.scale_bits(), "scales along the columns");
  check(aligned(data_of<void>(codes_t)) && aligned(data_of<void>(scales_t)), "codes_t and scales_t must begin on multiples of 16 bytes");
  check_array(keys, "keys", on.device, 4 * groups, 32, "[groups, 2, 2] words");
  check(has(keys) || !(rows_keyed || columns_keyed) || groups == 0, "keys are missing");
  const uint32_t* key = data_of<const uint32_t>(keys);
  a.row = {data_of<uint8_t>(codes), data_of<void>(scales), rows_keyed ? key : nullptr};
  a.column = {data_of<uint8_t>(codes_t), data_of<void>(scales_t), columns_keyed ? key + 2 : nullptr};
  check(!rotate_t || (two_levels && !square), "only NVFP4 in blocks of 1x16 is rotated");
  if (whole || two_levels) {
    check(has(amax) || groups == 0, "a format with one scale or two levels needs an amax");
    if (has(amax) && amax.value().dtype().code == kDLFloat) {
      check(whole && !measure, "a multiplier is for formats with one scale, and without `measure`");
      check_array(amax, "amax", on.device, 1, 32, "one float32");
      a.multiplier = data_of<const float>(amax);
    } else {
      check_array(amax, "amax", on.device, (rotate_t ? 2 : 1) * groups, 32, "an int32 for each group, two with rotate_t");
      a.amax = data_of<const int32_t>(amax);
      a.amax_t = a.amax + (rotate_t ? 1 : 0);
      a.groups.overflow_stride = rotate_t ? 2 : 1;
      a.groups.overflows = data_of<int32_t>(amax);
    }
    check_array(recorded, "recorded", on.device, groups, 32, "an int32 for each group");
    a.recorded = data_of<int32_t>(recorded);
    if (a.multiplier != nullptr) {
      check(has(recorded) || groups == 0, "recorded is missing, which a multiplier needs");
      a.groups.overflows = a.recorded;
    }
  } else {
    check(has(overflows) || groups == 0, "overflows is missing");
    check_array(overflows, "overflows", on.device, groups, 32, "an int32 for each group");
    a.groups.overflows = data_of<int32_t>(overflows);
  }
  if (two_levels) {
    check((has(tensor_scale) && has(tensor_scale_t)) || groups == 0, "formats of two levels have a tensor_scale for each direction");
    check_array(tensor_scale, "tensor_scale", on.device, groups, 32, "a float32 for each group");
    check_array(tensor_scale_t, "tensor_scale_t", on.device, groups, 32, "a float32 for each group");
    a.tensor_scale = data_of<float>(tensor_scale), a.tensor_scale_t = data_of<float>(tensor_scale_t);
  }
  a.eps_bits = static_cast<int32_t>(eps_bits), a.largest_bits = static_cast<int32_t>(largest_bits);
  a.rotate_column = rotate_t;
  if (groups == 0) return;
  const int32_t* where = data_of<const int32_t>(words);
  if (measure && a.amax != nullptr) {
    on.done(launch_group_amax(a.x, where, groups, rotate_t, data_of<int32_t>(amax), on.stream));
  } else if (a.amax == nullptr) {
    on.done(cudaMemsetAsync(a.groups.overflows, 0, groups * sizeof(int32_t), on.stream));
  }
  on.done(with_element(a.format.element, [&](auto e) { return launch_groups<decltype(e)>(a, where, on.stream); }));
  on.done(launch_spoil_groups(a, where, on.stream));
}

void quantize_groups_aligned(TensorView x, TensorView words, MaybeTensor overflows, MaybeTensor codes, MaybeTensor scales,
                             MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor stored_t, MaybeTensor stored_scales_t, int64_t groups,
                             int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  const OnDevice on(x, "x");
  QuantizeArguments a{};
  a.x = matrices_of(x, "x");
  a.format = aligned_format(element, block_rows, block_columns, rule);
  check(x.ndim() == 2 && (a.x.column_stride == 1 || x.numel() == 0), "x must be [tokens, features] with adjacent features; it is ",
        describe(x));
  const int64_t tokens = a.x.rows, features = a.x.columns, columns = group_columns(tokens, groups);
  check(groups >= 0 && columns <= INT32_MAX, "tokens and 127 for each group must be less than 2^31; groups is ", groups);
  check_words(words, tokens, groups, on.device);
  a.window = {0, 0, 0, features, 0, 0};
  a.groups.count = groups, a.groups.tokens = tokens, a.groups.columns = columns, a.groups.overflow_stride = 1;
  a.aligned_row = aligned_output("codes", codes, "scales", scales, on.device, 1, tokens, features);
  a.aligned_column = aligned_output("codes_t", codes_t, "scales_t", scales_t, on.device, 1, features, columns);
  a.column = stored_output(stored_t, stored_scales_t, on.device, a.format, 1, features, columns);
  check(a.column.codes == nullptr || a.aligned_column.codes == nullptr, "codes_t and stored_t exclude one another");
  check(has(overflows) || groups == 0, "overflows is missing");
  check_array(overflows, "overflows", on.device, groups, 32, "an int32 for each group");
  a.groups.overflows = data_of<int32_t>(overflows);
  if (groups == 0) return;
  const int32_t* where = data_of<const int32_t>(words);
  on.done(cudaMemsetAsync(a.groups.overflows, 0, groups * sizeof(int32_t), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_aligned_groups<decltype(e)>(a, where, on.stream); }));
  on.done(launch_spoil_groups(a, where, on.stream));
}

void sum_groups(TensorView x, TensorView words, TensorView out) {
  const OnDevice on(x, "x");
  const Matrices m = matrices_of(x, "x");
  check(x.ndim() == 2 && x.IsContiguous(), "x must be [tokens, features], contiguous; it is ", describe(x));
  const int64_t groups = out.ndim() == 2 ? out.size(0) : 0;
  check_words(words, m.rows, groups, on.device);
  check_array(out, "out", on.device, groups * m.columns, 32, "float32 [groups, features]");
  on.done(launch_sum_groups(m, data_of<const int32_t>(words), groups, data_of<float>(out), on.stream));
}

void clear_groups(TensorView words, MaybeTensor rows, MaybeTensor matrices, int64_t groups) {
  const OnDevice on(words, "words");
  const auto bytes_of = [&](const MaybeTensor& x, const char* name) -> int64_t {
    if (!has(x)) return 0;
    const TensorView& view = x.value();
    check_array(x, name, on.device, view.numel(), view.dtype().bits, "an array of 16 or 32 bits an element");
    check(view.dtype().bits == 16 || view.dtype().bits == 32, name, " must have elements of 16 or 32 bits; it is ", describe(view));
    return view.numel() / view.size(0) * (view.dtype().bits / 8);
  };
  const int64_t row_bytes = bytes_of(rows, "rows"), matrix_bytes = bytes_of(matrices, "matrices");
  check(!has(matrices) || matrices.value().size(0) == groups, "matrices must be one for each of ", groups, " groups");
  const int64_t tokens = has(rows) ? rows.value().size(0) : 0;
  on.done(launch_clear_groups(data_of<const int32_t>(words), tokens, groups, data_of<void>(rows), row_bytes, data_of<void>(matrices),
                              matrix_bytes, on.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_rows, group_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_words, group_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_columns, group_columns);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_groups, quantize_groups);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_groups_aligned, quantize_groups_aligned);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_groups, sum_groups);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_groups, clear_groups);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
