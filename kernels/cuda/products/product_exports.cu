// The library's products of FP8 matrices, callable as exports.cu says.
//
//   product(a, b, a_scales, b_scales, out, workspace, a_element, b_element, a_block_rows, b_block_rows, fast)
//       out [m, n] = a b^T by cuBLASLt, of FP8 codes a [m, k] and b [n, k]. block_rows: 0 (one scale), 1 (1x128) or 128 (128x128); scales
//       of 1x128 lie [k / 128, rows], of 128x128 [rows / 128, k / 128 filled up to a multiple of 4]. fast: reduced-precision accumulation.
//   block_product(a, b, a_scales, b_scales, ends?, bias?, out, a_element, b_element, b_block_rows, accumulate)
//       The same by this library's own kernel, on Hopper, for k a multiple of 16. Of b [groups, n, k] the g-th is multiplied by the rows
//       of a up to ends[g] (int32, on the device); without ends there is one group of all rows. a's scales are of 1x128: [k / 128, m],
//       or of rows: [1, m], m filled up to a multiple of 4; b's likewise for each group (b_block_rows 1), or of 128x128: [groups,
//       n / 128, k / 128]. bias: [groups, n]. accumulate: added to what out holds. Rows past the last end are left as they are.
//   cublas_version()
//       cuBLASLt's, such as 130100; 0 where the process finds none.
#include "gemm.h"
#include "on_device.h"

namespace blockfp {
namespace cuda {
namespace {

// Checks one side's codes and element, whose names begin with `side`.
void check_codes(const TensorView& codes, const char* side, int64_t element, DLDevice device) {
  check_array(codes, side, device, codes.numel(), 8, "FP8 codes");
  check(element == E4M3::kId || element == E5M2::kId, side, "_element must be that of E4M3 (", E4M3::kId, ") or E5M2 (", E5M2::kId,
        "), and is ", element);
}

void check_out(const TensorView& out, int64_t m, int64_t n, int dtype, DLDevice device) {
  check_array(out, "out", device, m * n, 8 * dtype_bytes(dtype), "[m, n]");
}

Factor factor_of(const TensorView& codes, const char* side, const TensorView& scales, const char* scales_name, int64_t element,
                 int64_t block_rows, DLDevice device) {
  check_codes(codes, side, element, device);
  check(block_rows == 0 || block_rows == 1 || block_rows == 128, side,
        "'s blocks must be 1x128, 128x128 or the whole tensor: 1, 128 or 0 rows; they have ", block_rows);
  const int64_t rows = codes.size(0), blocks = ceil_div(codes.size(1), 128);
  const int64_t count = block_rows == 0 ? 1 : (block_rows == 1 ? rows * blocks : ceil_div(rows, 128) * ceil_div(blocks, 4) * 4);
  check_array(scales, scales_name, device, count, 32, "float32 scales in the product's order");
  return {data_of<const void>(codes), data_of<const float>(scales), static_cast<int>(element), static_cast<int>(block_rows)};
}

void product(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, TensorView out, TensorView workspace,
             int64_t a_element, int64_t b_element, int64_t a_block_rows, int64_t b_block_rows, bool fast) {
  const OnDevice on(a, "a");
  check(a.ndim() == 2 && b.ndim() == 2 && a.size(1) == b.size(1) && a.numel() > 0 && b.numel() > 0,
        "a must be [m, k] and b [n, k], with elements; a is ", describe(a), " and b ", describe(b));
  ProductArguments p{factor_of(a, "a", a_scales, "a_scales", a_element, a_block_rows, on.device),
                     factor_of(b, "b", b_scales, "b_scales", b_element, b_block_rows, on.device)};
  p.m = a.size(0), p.n = b.size(0), p.k = a.size(1);
  p.dtype = dtype_of(out, "out");
  check_out(out, p.m, p.n, p.dtype, on.device);
  p.out = data_of<void>(out);
  check_array(workspace, "workspace", on.device, workspace.numel(), 8, "bytes");
  p.workspace = data_of<void>(workspace);
  p.workspace_bytes = static_cast<size_t>(workspace.numel());
  p.fast = fast;
  p.device = on.device.device_id;
  const std::string wrong = launch_product(p, on.stream);
  if (wrong.empty()) return;
  TVM_FFI_THROW(RuntimeError) << "product with m = " << p.m << ", n = " << p.n << ", k = " << p.k << " on " << on.device
                              << ": " << wrong;
}

GemmOperand gemm_operand_of(const TensorView& codes, const char* side, const TensorView& scales, const char* scales_name,
                            int64_t element, bool squares, DLDevice device) {
  check_codes(codes, side, element, device);
  check(scales.ndim() >= 2, scales_name, " must have two or more axes; it is ", describe(scales));
  const int64_t n = codes.size(-2), k = codes.size(-1), groups = n * k == 0 ? 0 : codes.numel() / (n * k);
  const int64_t blocks = ceil_div(k, 128), across = scales.size(-2), along = scales.size(-1);
  check(squares ? across == ceil_div(n, 128) && along >= blocks : along == ceil_div(n, 4) * 4 && (across == blocks || across == 1),
        scales_name, " must have the shape that the product wants for ", side, ", ", describe(codes), "; it is ", describe(scales));
  check_array(scales, scales_name, device, groups * across * along, 32, "float32 scales of each group");
  const void* data = data_of<const void>(codes);
  const float* first = data_of<const float>(scales);
  check(k % 16 == 0, "k must be a multiple of 16, and is ", k);
  check(aligned(data) && aligned(first), side, " and ", scales_name, " must begin on multiples of 16 bytes: pass copies");
  return {data, static_cast<int>(element), {first, across == 1 && !squares ? 0 : along}};
}

void block_product(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, MaybeTensor ends, MaybeTensor bias,
                   TensorView out, int64_t a_element, int64_t b_element, int64_t b_block_rows, bool accumulate) {
  const OnDevice on(a, "a");
  check(b_block_rows == 1 || b_block_rows == 128, "b's blocks must be 1x128 or 128x128: 1 or 128 rows; they have ", b_block_rows);
  check(a.ndim() == 2 && (b.ndim() == 2 || b.ndim() == 3) && b.size(-1) == a.size(1),
        "a must be [m, k], b [n, k] or [groups, n, k]; a is ", describe(a), " and b ", describe(b));
  const int64_t groups = b.ndim() == 3 ? b.size(0) : 1, m = a.size(0), n = b.size(-2), k = a.size(1);
  check(m * n * k * groups > 0 && m <= INT32_MAX && groups * n <= INT32_MAX && k <= INT32_MAX,
        "a and b must have elements, and less than 2^31 rows and columns; a is ", describe(a), " and b ", describe(b));
  const bool squares = b_block_rows == 128;
  const GemmOperand left = gemm_operand_of(a, "a", a_scales, "a_scales", a_element, false, on.device);
  const GemmOperand right = gemm_operand_of(b, "b", b_scales, "b_scales", b_element, squares, on.device);
  GemmArguments p{};
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.k = static_cast<int>(k), p.groups = static_cast<int>(groups);
  check(has(ends) || groups == 1, "ends must be there for more than one group; b has ", groups);
  check_array(ends, "ends", on.device, groups, 32, "an int32 for each group");
  p.ends = data_of<const int32_t>(ends);
  p.dtype = dtype_of(out, "out");
  check_out(out, m, n, p.dtype, on.device);
  p.out = data_of<void>(out);
  if (has(bias)) {
    p.bias_dtype = dtype_of(bias.value(), "bias");
    check_array(bias, "bias", on.device, groups * n, 8 * dtype_bytes(p.bias_dtype), "[groups, n]");
    p.bias = data_of<const void>(bias);
  }
  p.accumulate = accumulate;
  on.done(launch_gemm(p, left, right, squares, on.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(product, product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_product, block_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cublas_version, cublas_version);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
