// What is quantized of an activation's output, which never lies in memory, and the activation's gradient.
//
//   quantize_gated(gate, up?, amax?, recorded?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, tensor_scale_t?, activation, FORMAT,
//                  measure, eps_bits, largest_bits, rotate_t)
//       As `quantize` (exports.cu) with `mark` of activation(gate), or of activation(gate) * up, rounded to nearest.
//   quantize_gated_aligned(gate, up?, recorded, codes?, scales?, codes_t?, scales_t?, activation, FORMAT)
//       As `quantize_aligned` (aligned_exports.cu) of the same.
//   activation(gate, up?, out, activation)
//       out: [rows, columns], contiguous.
//   activation_gradient(gradient, gate, up?, d_gate, d_up?, activation)
//       d_gate and d_up lie as gate and up do: side by side, or in pairs.
//
// gate, up: bfloat16 or float16 [rows, columns], columns a multiple of 8, rows that begin on multiples of 16 bytes. Either their columns
// are adjacent, or they are every second element of pairs, gate first. activation: 0 silu, 1 gelu by tanh, 2 gelu by erf. Along the columns
// rows come in multiples of 16 (E2M1: 32), along rows alone columns in whole blocks.
#include "aligned_exports.h"
#include "gated.cuh"

namespace blockfp {
namespace cuda {
namespace {

struct GatedMatrices {
  Matrices x;
  Gated gated;
};

// A matrix whose rows are vectors; `step`: from one of its columns to the next.
Matrices vectors_of(const TensorView& x, const char* name, const OnDevice& on, int64_t step) {
  check_device(x, name, on.device);
  check(x.ndim() == 2 && x.size(1) % 8 == 0, name, " must be [rows, columns] with a multiple of 8 columns; it is ", describe(x));
  const Matrices m = matrices_of(x, name);
  check(m.dtype != Fp32::kId, name, " must be bfloat16 or float16; it is ", describe(x));
  check(x.numel() == 0 || (m.column_stride == step && vectors_fit(m)), name, " must have ", step == 1 ? "adjacent columns" : "pairs",
        " and rows that begin on multiples of 16 bytes; its strides are ", m.row_stride, " and ", m.column_stride);
  return m;
}

GatedMatrices gated_of(const TensorView& gate, const MaybeTensor& up, int64_t activation, const OnDevice& on) {
  check(activation >= 0 && activation <= 2, "activation must be 0, 1 or 2, and is ", activation);
  const bool pairs = gate.ndim() == 2 && gate.numel() > 0 && gate.size(1) > 1 && gate.stride(1) == 2;
  GatedMatrices both{vectors_of(gate, "gate", on, pairs ? 2 : 1), {static_cast<Activation>(activation), nullptr, 0, pairs}};
  check(!pairs || has(up), "a gate of pairs needs an up");
  if (!has(up)) return both;
  const TensorView& other = up.value();
  check(other.ndim() == 2 && other.size(0) == gate.size(0) && other.size(1) == gate.size(1) && other.dtype() == gate.dtype(),
        "up must be as gate, ", describe(gate), "; it is ", describe(other));
  both.gated.up = data_of<const void>(other);
  if (pairs) {
    check_device(other, "up", on.device);
    check(other.stride(1) == 2 && (other.size(0) == 1 || other.stride(0) == gate.stride(0)) &&
              static_cast<const char*>(both.gated.up) == static_cast<const char*>(both.x.data) + 2,
          "up must be the second elements of the pairs whose first ones are gate");
  } else {
    both.gated.up_stride = vectors_of(other, "up", on, 1).row_stride;
  }
  return both;
}

int64_t scale_count(const Format& f, int64_t lines, int64_t length) {
  return f.per_tensor() ? 1 : lines * ceil_div(length, f.block_columns);
}

void quantize_gated(TensorView gate, MaybeTensor up, MaybeTensor amax, MaybeTensor recorded, MaybeTensor codes, MaybeTensor scales,
                    MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor tensor_scale_t,
                    int64_t activation, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, bool measure,
                    int64_t eps_bits, int64_t largest_bits, bool rotate_t) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gated_of(gate, up, activation, on);
  QuantizeArguments a{};
  a.x = both.x, a.gated = both.gated;
  a.format = checked_format(element, block_rows, block_columns, rule);
  const bool whole = a.format.per_tensor(), two_levels = a.format.two_levels();
  check(whole || !a.format.square(), "square blocks are for weights; the format has ", block_rows, "x", block_columns);
  const int64_t rows = a.x.rows, columns = a.x.columns, unit = element == E2M1::kId ? 32 : 16;
  check(gate.numel() > 0 && (has(codes) || has(codes_t)), "gate must not be empty, and codes or codes_t be wanted");
  if (has(codes_t)) {
    check(rows % unit == 0, "along the columns rows come in multiples of ", unit, "; there are ", rows);
  } else {
    check(whole || columns % block_columns == 0, "along rows alone columns come in whole blocks of ", block_columns, "; there are ", columns);
  }
  a.window = {0, 0, rows, columns, 0, 0};
  check_array(codes, "codes", on.device, rows * code_row_bytes(a.format.element, columns), 8, "packed codes");
  check_array(codes_t, "codes_t", on.device, columns * code_row_bytes(a.format.element, rows), 8, "packed codes of the transpose");
  check(has(codes) == has(scales) && has(codes_t) == has(scales_t), "codes and scales come together");
  check_array(scales, "scales", on.device, scale_count(a.format, rows, columns), a.format.scale_bits(), "a scale for each block");
  check_array(scales_t, "scales_t", on.device, scale_count(a.format, columns, rows), a.format.scale_bits(),
              "a scale for each block of the transpose");
  check(aligned(data_of<void>(codes)) && aligned(data_of<void>(codes_t)), "codes must begin on multiples of 16 bytes");
  const auto scale_bytes = [&](const MaybeTensor& of) { return has(of) ? of.value().numel() * a.format.scale_bits() / 8 : 0; };
  a.row = {data_of<uint8_t>(codes), data_of<void>(scales), nullptr, scale_bytes(scales)};
  a.column = {data_of<uint8_t>(codes_t), data_of<void>(scales_t), nullptr, scale_bytes(scales_t)};
  check_array(recorded, "recorded", on.device, 1, 32, "one int32");
  a.recorded = data_of<int32_t>(recorded);
  a.mark = true;
  check(!rotate_t || two_levels, "only NVFP4 is rotated");
  if (whole || two_levels) {
    check(has(amax), "a format with one scale per tensor or two levels needs an amax");
    check_array(amax, "amax", on.device, rotate_t ? 2 : 1, 32, "one int32 (bits) or one float32 (a multiplier), two int32 with rotate_t");
    if (amax.value().dtype().code == kDLFloat) {
      check(whole && !measure, "a multiplier is for formats with one scale per tensor, and without `measure`");
      a.multiplier = data_of<const float>(amax);
    } else {
      a.amax = data_of<const int32_t>(amax), a.amax_t = a.amax + (rotate_t ? 1 : 0);
    }
  }
  check(a.amax != nullptr || has(recorded), "an Inf is marked by an amax or by `recorded`, and both are missing");
  check(has(tensor_scale) == (two_levels && has(codes)) && has(tensor_scale_t) == (two_levels && has(codes_t)),
        "tensor_scale and tensor_scale_t belong to the directions of formats of two levels");
  check_array(tensor_scale, "tensor_scale", on.device, 1, 32, "one float32");
  check_array(tensor_scale_t, "tensor_scale_t", on.device, 1, 32, "one float32");
  a.tensor_scale = data_of<float>(tensor_scale), a.tensor_scale_t = data_of<float>(tensor_scale_t);
  a.eps_bits = static_cast<int32_t>(eps_bits), a.largest_bits = static_cast<int32_t>(largest_bits);
  a.rotate_column = rotate_t;
  if (a.recorded != nullptr) on.done(cudaMemsetAsync(a.recorded, 0, sizeof(int32_t), on.stream));
  if (measure && a.amax != nullptr) on.done(launch_amax_gated(a.x, a.gated, rotate_t, data_of<int32_t>(amax), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_gated<decltype(e)>(a, on.stream); }));
}

void quantize_gated_aligned(TensorView gate, MaybeTensor up, TensorView recorded, MaybeTensor codes, MaybeTensor scales, MaybeTensor codes_t,
                            MaybeTensor scales_t, int64_t activation, int64_t element, int64_t block_rows, int64_t block_columns,
                            int64_t rule) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gated_of(gate, up, activation, on);
  QuantizeArguments a{};
  a.x = both.x, a.gated = both.gated;
  a.format = aligned_format(element, block_rows, block_columns, rule);
  const int64_t rows = a.x.rows, columns = a.x.columns;
  check(gate.numel() > 0 && rows % 8 == 0, "gate must not be empty, and have a multiple of 8 rows; it is ", describe(gate));
  a.window = {0, 0, rows, columns, 0, 0};
  a.aligned_row = aligned_output("codes", codes, "scales", scales, on.device, 1, rows, columns);
  a.aligned_column = aligned_output("codes_t", codes_t, "scales_t", scales_t, on.device, 1, columns, rows);
  check_array(recorded, "recorded", on.device, 1, 32, "one int32");
  a.recorded = data_of<int32_t>(recorded), a.mark = true;
  on.done(cudaMemsetAsync(a.recorded, 0, sizeof(int32_t), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_aligned_gated<decltype(e)>(a, on.stream); }));
}

void activation(TensorView gate, MaybeTensor up, TensorView out, int64_t kind) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gated_of(gate, up, kind, on);
  check_array(out, "out", on.device, gate.numel(), 16, "contiguous, as large as gate");
  check(aligned(data_of<void>(out)), "out must begin on a multiple of 16 bytes");
  on.done(launch_activation(both.x, both.gated, data_of<void>(out), on.stream));
}

void activation_gradient(TensorView gradient, TensorView gate, MaybeTensor up, TensorView d_gate, MaybeTensor d_up, int64_t kind) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gated_of(gate, up, kind, on), results = gated_of(d_gate, d_up, kind, on);
  const Matrices dy = vectors_of(gradient, "gradient", on, 1);
  const auto same = [&](const TensorView& x) {
    return x.ndim() == 2 && x.size(0) == gate.size(0) && x.size(1) == gate.size(1) && x.dtype() == gate.dtype();
  };
  check(same(gradient), "gradient must be as gate, ", describe(gate), "; it is ", describe(gradient));
  check(same(d_gate) && has(d_up) == has(up), "d_gate and d_up must be as gate and up; d_gate is ", describe(d_gate));
  on.done(launch_activation_gradient(dy, both.x, both.gated, results.x, results.gated, on.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_gated, quantize_gated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_gated_aligned, quantize_gated_aligned);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation, activation);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_gradient, activation_gradient);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
