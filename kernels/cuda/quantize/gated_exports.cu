// Quantizers of an activation's output and of its gradients, which are never stored, and the activation's gradient.
//
//   quantize_gated(gate, up?, amax?, recorded?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, tensor_scale_t?, activation, FORMAT,
//                  measure, eps_bits, largest_bits, rotate_t, rows_ordered, columns_ordered)
//       As `quantize` (exports.cu) with `mark`, for activation(gate) or activation(gate) * up, rounded to nearest.
//   quantize_gated_aligned(gate, up?, recorded, codes?, scales?, codes_t?, scales_t?, activation, FORMAT)
//       As `quantize_aligned` (aligned_exports.cu), for the same.
//   quantize_gradient(gradient, gate, up?, amax, recorded, .., activation, result, FORMAT, .., columns_ordered)
//       As `quantize_gated` for a result of `activation_gradient`: 0 d_gate, 1 d_up, 2 both, side by side or in the pairs of gate
//       and up. By one scale, which `amax` gives; columns are quantized, or both.
//   activation(gate, up?, out, activation)
//       out: [rows, columns], contiguous.
//   activation_gradient(gradient, gate, up?, d_gate, d_up?, activation)
//       d_gate and d_up have the layout of gate and up: separate, or in pairs.
//
// gate, up: bfloat16 or float16 [rows, columns], columns a multiple of 8, rows at multiples of 16 bytes. Their columns are
// adjacent, or alternate in pairs, gate first. gradient: the same, adjacent. activation: 0 silu, 1 gelu by tanh, 2 gelu by erf, 3 squared ReLU. Columnwise quantization needs
// rows in multiples of 16 (E2M1: 32); rowwise alone needs columns in whole blocks.
#include "aligned_exports.h"
#include "gated.cuh"
#include "made_arguments.h"

namespace blockfp {
namespace cuda {
namespace {

struct GatedMatrices {
  Matrices x;
  GatedGradient gated;  // without a gradient, of an activation's output
};

GatedMatrices gated_of(const TensorView& gate, const MaybeTensor& up, int64_t activation, const OnDevice& on) {
  check(activation >= 0 && activation <= 3, "activation must be 0, 1, 2 or 3, and is ", activation);
  const bool pairs = gate.ndim() == 2 && gate.numel() > 0 && gate.size(1) > 1 && gate.stride(1) == 2;
  GatedMatrices both{vectors_of(gate, "gate", on, pairs ? 2 : 1), {{static_cast<Activation>(activation), nullptr, 0, pairs}, nullptr, 0, 0, 0}};
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

// The arguments for a result of the activation's gradient.
GatedMatrices gradients_of(const TensorView& gradient, const TensorView& gate, const MaybeTensor& up, int64_t activation, int64_t result,
                           const OnDevice& on) {
  GatedMatrices both = gated_of(gate, up, activation, on);
  const Matrices dy = vectors_of(gradient, "gradient", on, 1);
  check(dy.rows == both.x.rows && dy.columns == both.x.columns && dy.dtype == both.x.dtype, "gradient must be as gate, ", describe(gate),
        "; it is ", describe(gradient));
  check(result == 0 || ((result == 1 || result == 2) && has(up)), "result must be 0, or with an up 1 or 2, and is ", result);
  check(result == 2 || !both.gated.pairs, "gradients of pairs are quantized in pairs: result must be 2, and is ", result);
  both.gated.gradient = dy.data, both.gated.gradient_stride = dy.row_stride;
  both.gated.gate_columns = dy.columns, both.gated.first = result == 1 ? dy.columns : 0;
  if (result == 2) both.x.columns *= 2;
  return both;
}

void quantize_gated(TensorView gate, MaybeTensor up, MaybeTensor amax, MaybeTensor recorded, MaybeTensor codes, MaybeTensor scales,
                    MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor tensor_scale_t,
                    int64_t activation, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, bool measure,
                    int64_t eps_bits, int64_t largest_bits, bool rotate_t, bool rows_ordered, bool columns_ordered) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gated_of(gate, up, activation, on);
  const MadeOutputs outputs{amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t};
  QuantizeArguments a = made_arguments(both.x, "gate", on, outputs, checked_format(element, block_rows, block_columns, rule), measure,
                                       eps_bits, largest_bits, rotate_t, rows_ordered, columns_ordered);
  a.gated = both.gated;
  if (a.measured) on.done(launch_amax_gated(a.x, a.gated, false, a.recorded, on.stream, a.multiplier));
  if (measure && a.amax != nullptr) on.done(launch_amax_gated(a.x, a.gated, rotate_t, data_of<int32_t>(amax), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_gated<decltype(e)>(a, on.stream); }));
}

void quantize_gradient(TensorView gradient, TensorView gate, MaybeTensor up, MaybeTensor amax, MaybeTensor recorded, MaybeTensor codes,
                       MaybeTensor scales, MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor tensor_scale_t,
                       int64_t activation, int64_t result, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule,
                       bool measure, int64_t eps_bits, int64_t largest_bits, bool rotate_t, bool rows_ordered, bool columns_ordered) {
  const OnDevice on(gate, "gate");
  const GatedMatrices both = gradients_of(gradient, gate, up, activation, result, on);
  const MadeOutputs outputs{amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t};
  QuantizeArguments a = made_arguments(both.x, "gate", on, outputs, checked_format(element, block_rows, block_columns, rule), measure,
                                       eps_bits, largest_bits, rotate_t, rows_ordered, columns_ordered);
  check(a.multiplier != nullptr && !measure && has(codes_t), "gradients are quantized by a given multiplier, along the columns");
  a.gradient = both.gated;
  on.done(with_element(a.format.element, [&](auto e) { return launch_gradient<decltype(e)>(a, on.stream); }));
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_gradient, quantize_gradient);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation, activation);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_gradient, activation_gradient);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
