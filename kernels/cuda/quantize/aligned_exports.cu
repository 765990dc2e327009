// Quantizers to aligned codes, callable as described in exports.cu.
//
//   quantize_aligned(x, recorded, codes?, scales?, codes_t?, scales_t?, stored_t?, stored_scales_t?, FORMAT)
//       x: [.., rows, columns] with adjacent columns, quantized as by `quantize` with `mark`, rounded to nearest, then aligned as by `align`.
//       codes, scales: along the rows of x. codes_t, scales_t: of x transposed; or stored_t, stored_scales_t: of x transposed, as by
//       `quantize`. recorded: int32 [1], becomes the bits of Inf if x contains one. FORMAT: MX in 1x32.
#include "aligned_exports.h"

namespace blockfp {
namespace cuda {
namespace {

void quantize_aligned(TensorView x, TensorView recorded, MaybeTensor codes, MaybeTensor scales, MaybeTensor codes_t, MaybeTensor scales_t,
                      MaybeTensor stored_t, MaybeTensor stored_scales_t, int64_t element, int64_t block_rows, int64_t block_columns,
                      int64_t rule) {
  const OnDevice on(x, "x");
  QuantizeArguments a{};
  a.x = matrices_of(x, "x");
  a.format = aligned_format(element, block_rows, block_columns, rule);
  check(a.x.column_stride == 1 || x.numel() == 0, "the columns of x must be adjacent, and their stride is ", a.x.column_stride);
  const Matrices& m = a.x;
  a.window = {0, 0, m.rows, m.columns, 0, 0};
  a.aligned_row = aligned_output("codes", codes, "scales", scales, on.device, m.batches, m.rows, m.columns);
  a.aligned_column = aligned_output("codes_t", codes_t, "scales_t", scales_t, on.device, m.batches, m.columns, m.rows);
  a.column = stored_output(stored_t, stored_scales_t, on.device, a.format, m.batches, m.columns, m.rows);
  check(a.column.codes == nullptr || a.aligned_column.codes == nullptr, "codes_t and stored_t exclude one another");
  check_array(recorded, "recorded", on.device, 1, 32, "one int32");
  a.recorded = data_of<int32_t>(recorded), a.mark = true;
  if (x.numel() == 0) return;
  on.done(cudaMemsetAsync(a.recorded, 0, sizeof(int32_t), on.stream));
  on.done(with_element(a.format.element, [&](auto e) { return launch_aligned<decltype(e)>(a, on.stream); }));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_aligned, quantize_aligned);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
