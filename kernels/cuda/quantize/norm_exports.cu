// What is quantized of an RMSNorm's output, which never lies in memory, and the norm by itself.
//
//   quantize_normed(x, weight?, scales_of_rows, amax?, recorded?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, tensor_scale_t?, eps,
//                   FORMAT, measure, eps_bits, largest_bits, rotate_t)
//       As `quantize` (exports.cu) with `mark` of the norm of x, rounded to nearest.
//   rms_norm(x, weight?, scales_of_rows, out?, eps)
//       out: [rows, columns], contiguous, of x's dtype.
//
// The norm is weight * (s * x), with s = 1 / sqrt(mean of x * x along the row + eps), which goes into scales_of_rows: float32 [rows].
// x: bfloat16 or float16 [rows, columns], columns a multiple of 8, rows that begin on multiples of 16 bytes; weight: [columns], of its
// dtype, likewise. Lengths as for quantize_gated (gated_exports.cu).
#include "made_arguments.h"

namespace blockfp {
namespace cuda {
namespace {

struct NormArguments {
  Matrices x;
  const void* weight;
  float* scales;
};

NormArguments norm_of(const TensorView& x, const MaybeTensor& weight, const TensorView& scales, const OnDevice& on) {
  const NormArguments norm{vectors_of(x, "x", on, 1), data_of<const void>(weight), data_of<float>(scales)};
  if (has(weight)) {
    check_array(weight, "weight", on.device, norm.x.columns, 16, "one for each column");
    check(weight.value().dtype() == x.dtype() && aligned(norm.weight), "weight must have x's dtype, ", describe(x),
          ", and begin on a multiple of 16 bytes; it is ", describe(weight.value()));
  }
  check_array(scales, "scales_of_rows", on.device, norm.x.rows, 32, "one float32 for each row");
  return norm;
}

void quantize_normed(TensorView x, MaybeTensor weight, TensorView scales_of_rows, MaybeTensor amax, MaybeTensor recorded, MaybeTensor codes,
                     MaybeTensor scales, MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, MaybeTensor tensor_scale_t,
                     double eps, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, bool measure, int64_t eps_bits,
                     int64_t largest_bits, bool rotate_t) {
  const OnDevice on(x, "x");
  const NormArguments norm = norm_of(x, weight, scales_of_rows, on);
  const MadeOutputs outputs{amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t};
  QuantizeArguments a = made_arguments(norm.x, "x", on, outputs, checked_format(element, block_rows, block_columns, rule), measure, eps_bits,
                                       largest_bits, rotate_t);
  a.normed = {norm.weight, norm.scales};
  const bool measures = measure && a.amax != nullptr;
  int32_t* in_one_pass = measures && !rotate_t ? data_of<int32_t>(amax) : nullptr;
  on.done(launch_norm(norm.x, norm.weight, static_cast<float>(eps), norm.scales, in_one_pass, nullptr, on.stream));
  if (measures && rotate_t) on.done(launch_amax_normed(a.x, a.normed, data_of<int32_t>(amax), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_normed<decltype(e)>(a, on.stream); }));
}

void rms_norm(TensorView x, MaybeTensor weight, TensorView scales_of_rows, MaybeTensor out, double eps) {
  const OnDevice on(x, "x");
  const NormArguments norm = norm_of(x, weight, scales_of_rows, on);
  check_array(out, "out", on.device, x.numel(), 16, "contiguous, as large as x");
  check(!has(out) || (out.value().dtype() == x.dtype() && aligned(data_of<void>(out))),
        "out must have x's dtype and begin on a multiple of 16 bytes");
  if (x.numel() == 0) return;
  on.done(launch_norm(norm.x, norm.weight, static_cast<float>(eps), norm.scales, nullptr, data_of<void>(out), on.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_normed, quantize_normed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
