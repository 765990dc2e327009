// Argument checks of exports that quantize matrices that are never stored.
#pragma once

#include "on_device.h"

namespace blockfp {
namespace cuda {

// A matrix whose rows can be read as vectors; `step` is the distance of its columns.
inline Matrices vectors_of(const TensorView& x, const char* name, const OnDevice& on, int64_t step) {
  check_device(x, name, on.device);
  check(x.ndim() == 2 && x.size(1) % 8 == 0, name, " must be [rows, columns] with a multiple of 8 columns; it is ", describe(x));
  const Matrices m = matrices_of(x, name);
  check(m.dtype != Fp32::kId, name, " must be bfloat16 or float16; it is ", describe(x));
  check(x.numel() == 0 || (m.column_stride == step && vectors_fit(m)), name, " must have ", step == 1 ? "adjacent columns" : "pairs",
        " and rows that begin on multiples of 16 bytes; its strides are ", m.row_stride, " and ", m.column_stride);
  return m;
}

struct MadeOutputs {
  MaybeTensor amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t;
};

inline int64_t scale_count(const Format& f, int64_t lines, int64_t length, bool ordered) {
  if (ordered) return ordered_count(f, lines, length);
  return f.per_tensor() ? 1 : lines * ceil_div(length, f.block_columns);
}

// Arguments of a quantizer of a matrix computed from x, which messages call `name`. Clears `o.recorded`; the caller adds the
// source.
inline QuantizeArguments made_arguments(const Matrices& x, const char* name, const OnDevice& on, const MadeOutputs& o, const Format& format,
                                        bool measure, int64_t eps_bits, int64_t largest_bits, bool rotate_t, bool rows_ordered,
                                        bool columns_ordered) {
  QuantizeArguments a{};
  a.x = x;
  a.format = format;
  const bool whole = format.per_tensor(), two_levels = format.two_levels();
  check(whole || !format.square(), "square blocks are for weights; the format has ", format.block_rows, "x", format.block_columns);
  const int64_t rows = x.rows, columns = x.columns, unit = format.element == E2M1::kId ? 32 : 16;
  check(rows > 0 && columns > 0 && (has(o.codes) || has(o.codes_t)), name, " must not be empty, and codes or codes_t be wanted");
  if (has(o.codes_t)) {
    check(rows % unit == 0, "along the columns rows come in multiples of ", unit, "; there are ", rows);
  } else {
    check(whole || columns % format.block_columns == 0, "along rows alone columns come in whole blocks of ", format.block_columns,
          "; there are ", columns);
  }
  a.window = {0, 0, rows, columns, 0, 0};
  check_array(o.codes, "codes", on.device, rows * code_row_bytes(format.element, columns), 8, "packed codes");
  check_array(o.codes_t, "codes_t", on.device, columns * code_row_bytes(format.element, rows), 8, "packed codes of the transpose");
  check(has(o.codes) == has(o.scales) && has(o.codes_t) == has(o.scales_t), "codes and scales come together");
  check_array(o.scales, "scales", on.device, scale_count(format, rows, columns, rows_ordered), format.scale_bits(),
              "a scale for each block");
  check_array(o.scales_t, "scales_t", on.device, scale_count(format, columns, rows, columns_ordered), format.scale_bits(),
              "a scale for each block of the transpose");
  check(aligned(data_of<void>(o.codes)) && aligned(data_of<void>(o.codes_t)), "codes must begin on multiples of 16 bytes");
  const auto scale_bytes = [&](const MaybeTensor& of) { return has(of) ? of.value().numel() * format.scale_bits() / 8 : 0; };
  a.row = {data_of<uint8_t>(o.codes), data_of<void>(o.scales), nullptr, scale_bytes(o.scales), rows_ordered};
  a.column = {data_of<uint8_t>(o.codes_t), data_of<void>(o.scales_t), nullptr, scale_bytes(o.scales_t), columns_ordered};
  check_array(o.recorded, "recorded", on.device, 1, 32, "one int32");
  a.recorded = data_of<int32_t>(o.recorded);
  a.mark = true;
  check(!rotate_t || two_levels, "only NVFP4 is rotated");
  if (whole || two_levels) {
    check(has(o.amax), "a format with one scale per tensor or two levels needs an amax");
    check_array(o.amax, "amax", on.device, rotate_t ? 2 : 1, 32,
                "one int32 (bits) or one float32 (a multiplier), two int32 with rotate_t");
    if (o.amax.value().dtype().code == kDLFloat) {
      check(whole && (!measure || has(o.recorded)),
            "a multiplier is for formats with one scale per tensor, and `measure` needs `recorded`");
      a.multiplier = data_of<const float>(o.amax), a.measured = measure;
    } else {
      a.amax = data_of<const int32_t>(o.amax), a.amax_t = a.amax + (rotate_t ? 1 : 0);
    }
  }
  check(a.amax != nullptr || has(o.recorded), "an Inf is marked by an amax or by `recorded`, and both are missing");
  check(has(o.tensor_scale) == (two_levels && has(o.codes)) && has(o.tensor_scale_t) == (two_levels && has(o.codes_t)),
        "tensor_scale and tensor_scale_t belong to the directions of formats of two levels");
  check_array(o.tensor_scale, "tensor_scale", on.device, 1, 32, "one float32");
  check_array(o.tensor_scale_t, "tensor_scale_t", on.device, 1, 32, "one float32");
  a.tensor_scale = data_of<float>(o.tensor_scale), a.tensor_scale_t = data_of<float>(o.tensor_scale_t);
  a.eps_bits = static_cast<int32_t>(eps_bits), a.largest_bits = static_cast<int32_t>(largest_bits);
  a.rotate_column = rotate_t;
  // launch_amax_gated clears it.
  if (a.recorded != nullptr && !a.measured) on.done(cudaMemsetAsync(a.recorded, 0, sizeof(int32_t), on.stream));
  return a;
}

}  // namespace cuda
}  // namespace blockfp
