// The library's products of FP8 and bfloat16 matrices, callable as described in exports.cu.
//
//   product(a, b, a_scales, b_scales, ends?, bias?, out, workspace?, a_element, a_block_rows, b_element, b_block_rows, a_ordered,
//           b_ordered, own, tile, fast, accumulate)
//       out [m, n] = a b^T for FP8 codes a [m, k] and b [n, k], + bias [n], + out with `accumulate`.
//       ends (int32, on the device) makes it a product of groups, in one of two ways:
//         out [m, n], b [groups, n, k], bias [groups, n]: rows of group g of a by the g-th b; rows past the last end are unchanged;
//         out [groups, m, n], a [m, k], b [n, k]: columns of group g of a by those of b, laid out as in blockfp/exports.h.
//       element: of FP8 codes as in exports.cu; or 6 for both, bfloat16 values, which need `own` and block_rows 0.
//       block_rows: 0 (one scale per tensor, or per group), 1 (1x128, or one per row), 32 (32x128) or 128 (128x128).
//       Scales are as stored, [.., rows, blocks]; 1x128 and 32x128 scales may be `ordered` for the product, [.., blocks, rows of codes
//       padded to a multiple of 4]; b's 128x128 scales may have any strides.
//       own: this library's kernel, on compute capability 9.0, in tiles of the shape `tile` (TileShape of gemm.h; -1 chooses). Otherwise
//       cuBLASLt: no groups, k and n multiples of 16, m a multiple of 4 with 1x128 scales; `fast` allows it fewer bits of its sums.
//       workspace: bytes at a multiple of 256, as many as blockfp/kernels/products.py computes; cuBLASLt uses the rest.
//   cublas_version()
//       cuBLASLt's version, such as 130100; 0 if the process finds none.
#include "gemm.h"
#include "on_device.h"
#include "operands.h"

namespace blockfp {
namespace cuda {
namespace {

// The caller's scratch memory, allocated piece by piece before anything is launched.
class Workspace {
 public:
  Workspace(const MaybeTensor& memory, DLDevice device) {
    if (!has(memory)) return;
    check_array(memory, "workspace", device, memory.value().numel(), 8, "bytes");
    next_ = data_of<uint8_t>(memory), left_ = memory.value().numel();
    check(aligned(next_, 256), "workspace must begin on a multiple of 256 bytes");
  }

  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = ceil_div(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
    T* const taken = reinterpret_cast<T*>(next_);
    next_ += bytes, left_ -= bytes, taken_ += bytes;
    return taken;
  }

  // Call after the last take.
  void check_size() const { check(left_ >= 0, "workspace must have ", taken_, " bytes or more, and has ", taken_ + left_); }

  uint8_t* rest() const { return next_; }
  int64_t left() const { return left_; }

 private:
  uint8_t* next_ = nullptr;
  int64_t left_ = 0, taken_ = 0;
};

// One operand of a product: codes [matrices, rows, k].
struct Side {
  const char *name, *scales_name;
  TensorView codes, scales;
  int element;
  int64_t block_rows;
  bool ordered;
  int64_t matrices, rows, k;  // k: bytes of a row

  bool values() const { return element == Values::kId; }
  int64_t blocks() const { return ceil_div(k, 128); }
  // Rows of the grid of scales.
  int64_t grid_rows() const { return block_rows == 0 ? 1 : ceil_div(rows, block_rows); }
  // Whether scales can be in the product's order.
  bool can_be_ordered() const { return block_rows == 1 || block_rows == 32; }
  // 1x128: whether each row has one scale for a k of several blocks.
  bool whole_rows() const { return block_rows == 1 && blocks() > 1 && scales.size(ordered ? -2 : -1) == 1; }
  // Scales per row: one per block of k, or one.
  int64_t blocks_in_order() const { return block_rows == 0 || whole_rows() ? 1 : blocks(); }
};

Side side_of(const char* name, const char* scales_name, const TensorView& codes, const TensorView& scales, int64_t element,
             int64_t block_rows, bool ordered, int64_t groups, DLDevice device) {
  const bool values = element == Values::kId;
  check_array(codes, name, device, codes.numel(), values ? 16 : 8, values ? "bfloat16" : "FP8 codes");
  check(values || element == E4M3::kId || element == E5M2::kId, name, "_element must be that of E4M3 (", E4M3::kId, "), E5M2 (",
        E5M2::kId, ") or values (", Values::kId, "), and is ", element);
  check(!values || (block_rows == 0 && dtype_of(codes, name) == Bf16::kId), name, " must be bfloat16 with a scale for all of it; it is ",
        describe(codes), " in blocks of ", block_rows, " rows");
  check(block_rows == 0 || block_rows == 1 || block_rows == 32 || block_rows == 128, name,
        "'s blocks must be 1x128, 32x128, 128x128 or the whole tensor: 1, 32, 128 or 0 rows; they have ", block_rows);
  Side side{name, scales_name, codes, scales, static_cast<int>(element), block_rows, ordered, 1, codes.size(-2),
            codes.size(-1) * (values ? 2 : 1)};
  if (codes.ndim() == 3) side.matrices = codes.size(0);
  check(!ordered || side.can_be_ordered(), "only scales of 1x128 and 32x128 come in the product's order, and ", name, "'s blocks have ",
        block_rows, " rows");
  check_device(scales, scales_name, device);
  check(scales.dtype().code == kDLFloat && scales.dtype().bits == 32, scales_name, " must be float32; it is ", describe(scales));
  if (block_rows == 0) {
    check(scales.IsContiguous() && (scales.numel() == 1 || scales.numel() == groups), scales_name,
          " must be one scale, or one for each of ", groups, " groups; it is ", describe(scales));
    return side;
  }
  const int64_t across = ordered ? ceil_div(side.rows, 4) * 4 : side.grid_rows();
  const int axes = scales.ndim();
  check(axes >= 2 && axes == codes.ndim() && (axes == 2 || scales.size(0) == side.matrices), scales_name,
        " must have the axes of ", name, ", ", describe(codes), "; it is ", describe(scales));
  const int64_t down = scales.size(ordered ? -1 : -2), along = scales.size(ordered ? -2 : -1);
  check(down == across && (along == side.blocks() || (block_rows == 1 && along == 1)), scales_name, " must be of [", across, ", ",
        side.blocks(), "] blocks", ordered ? ", those of k first" : "", ", for ", name, ", ", describe(codes), "; it is ",
        describe(scales));
  check(block_rows == 128 || scales.IsContiguous(), scales_name, " must be contiguous; it is ", describe(scales));
  return side;
}

int64_t matrix_stride(const Side& x) { return x.scales.ndim() == 3 ? x.scales.stride(0) : 0; }

StoredScales stored(const Side& x) {
  const float* data = data_of<const float>(x.scales);
  if (x.block_rows == 0) return {data, x.matrices, x.rows, 1, 0, x.scales.numel() > 1, 0, 0};
  return {data, x.matrices, x.rows, x.blocks_in_order(), x.block_rows, matrix_stride(x), x.scales.stride(-2), x.scales.stride(-1)};
}

// An operand's prepared codes and scales, and the copies that prepare them, launched after all checks.
struct Laid {
  const void* codes;
  const float* scales;
  void* codes_to = nullptr;
  float* scales_to = nullptr;
};

// Provides codes that the copy engine can read.
void place_codes(const Side& x, Workspace& memory, Laid& laid) {
  laid.codes = data_of<const void>(x.codes);
  if (x.k % 16 == 0 && aligned(laid.codes)) return;
  laid.codes = laid.codes_to = memory.take<uint8_t>(x.matrices * x.rows * ceil_div(x.k, 16) * 16);
}

// Provides scales of rows in order.
void place_rows(const Side& x, Workspace& memory, Laid& laid) {
  laid.scales = data_of<const float>(x.scales);
  // As stored, scales of whole rows are in order but for the padding.
  const bool in_order = x.ordered || (x.block_rows == 1 && x.blocks_in_order() == 1 && x.rows % 4 == 0);
  if (in_order && aligned(laid.scales)) return;
  check(!x.ordered, x.scales_name, " in the product's order must begin on a multiple of 16 bytes");
  laid.scales = laid.scales_to = memory.take<float>(x.matrices * x.blocks_in_order() * ceil_div(x.rows, 4) * 4);
}

void lay(const OnDevice& on, const Side& x, const Laid& laid) {
  if (laid.codes_to != nullptr) {
    on.done(launch_fill_rows(data_of<const void>(x.codes), laid.codes_to, x.matrices * x.rows, x.k, ceil_div(x.k, 16) * 16, on.stream));
  }
  if (laid.scales_to != nullptr) on.done(launch_lay_scales(stored(x), laid.scales_to, on.stream));
}

void by_own_kernel(const OnDevice& on, const Side& a, const Side& b, GemmArguments p, Workspace& memory, int64_t tile) {
  check(tile >= -1 && tile < static_cast<int64_t>(TileShape::kCount), "tile must be from -1 to ", static_cast<int>(TileShape::kCount) - 1,
        ", and is ", tile);
  const bool tensors = a.block_rows == 0 && b.block_rows == 0;
  const Scaling of_blocks = b.block_rows == 128 ? Scaling::kSquares : (b.block_rows == 32 ? Scaling::kBands : Scaling::kRows);
  const Scaling of_all = a.values() ? Scaling::kValues : Scaling::kTensor, scaling = tensors ? of_all : of_blocks;
  const bool whole = (a.block_rows != 0 || a.scales.numel() == 1) && (b.block_rows != 0 || b.scales.numel() == 1 || !p.along_k);
  check(tensors || whole, "a scale for each group of one side and blocks of the other don't multiply here: a_scales is ",
        describe(a.scales), " and b_scales ", describe(b.scales));
  check(!p.along_k || a.codes.size(-1) % 128 == 0, "columns of groups come in blocks of 128, and a is ", describe(a.codes));
  Laid left{}, right{};
  place_codes(a, memory, left);
  place_codes(b, memory, right);
  if (!tensors) place_rows(a, memory, left);
  if (!tensors && scaling != Scaling::kSquares) place_rows(b, memory, right);
  memory.check_size();
  p.k = static_cast<int>(ceil_div(p.k, 16) * 16);
  p.a_step = a.blocks_in_order() > 1, p.b_step = b.blocks_in_order() > 1;
  if (tensors) {
    p.a_factor = data_of<const float>(a.scales), p.b_factor = data_of<const float>(b.scales);
    p.a_factor_step = a.scales.numel() > 1, p.b_factor_step = b.scales.numel() > 1;
  }
  if (scaling == Scaling::kSquares) {
    p.squares = data_of<const float>(b.scales);
    p.square_row = b.scales.stride(-2), p.square_block = b.scales.stride(-1), p.square_group = p.along_k ? 0 : matrix_stride(b);
  }
  lay(on, a, left);
  lay(on, b, right);
  on.done(launch_gemm(p, {left.codes, a.element, left.scales}, {right.codes, b.element, right.scales}, scaling,
                      static_cast<TileShape>(tile), on.stream));
}

// cuBLASLt's scales: 1x128 in the product's order, 128x128 with rows padded to a multiple of 4.
const float* scales_for_cublas(const Side& x, Workspace& memory, Laid& laid) {
  laid.codes = data_of<const void>(x.codes);
  if (x.block_rows == 1) {
    check(x.rows % 4 == 0 && !x.whole_rows(), "cuBLASLt takes scales of 1x128 of rows that are a multiple of 4; ", x.name, " is ",
          describe(x.codes), " and ", x.scales_name, " ", describe(x.scales));
    place_rows(x, memory, laid);
  } else {
    laid.scales = data_of<const float>(x.scales);
    check(x.scales.IsContiguous(), x.scales_name, " must be contiguous for cuBLASLt; it is ", describe(x.scales));
    if (x.block_rows == 128 && x.blocks() % 4 != 0) {
      laid.scales = laid.scales_to = memory.take<float>(x.grid_rows() * ceil_div(x.blocks(), 4) * 4);
    }
  }
  return laid.scales;
}

void by_cublas(const OnDevice& on, const Side& a, const Side& b, const GemmArguments& of, Workspace& memory, bool fast) {
  check(!a.values(), "cuBLASLt multiplies FP8 here, and a is ", describe(a.codes));
  check(of.groups == 1 && !of.along_k && a.k % 16 == 0 && b.rows % 16 == 0 && a.block_rows != 32 && b.block_rows != 32,
        "cuBLASLt takes single products with n and k multiples of 16, not in blocks of 32x128; a is ", describe(a.codes), " and b ", describe(b.codes));
  Laid left{}, right{};
  const float *a_scales = scales_for_cublas(a, memory, left), *b_scales = scales_for_cublas(b, memory, right);
  memory.check_size();
  for (const auto& [side, laid] : {std::pair<const Side&, const Laid&>{a, left}, {b, right}}) {
    if (laid.scales_to != nullptr && side.block_rows == 128) {
      on.done(launch_fill_rows(data_of<const void>(side.scales), laid.scales_to, side.grid_rows(), side.blocks() * 4,
                               ceil_div(side.blocks(), 4) * 16, on.stream));
    } else {
      lay(on, side, laid);
    }
  }
  const ProductArguments p{{left.codes, a_scales, a.element, static_cast<int>(a.block_rows)},
                           {right.codes, b_scales, b.element, static_cast<int>(b.block_rows)},
                           of.m, of.n, of.k, of.bias, of.bias_dtype, of.out, of.dtype, of.accumulate,
                           memory.rest(), static_cast<size_t>(memory.left()), fast, on.device.device_id};
  const std::string wrong = launch_product(p, on.stream);
  if (wrong.empty()) return;
  TVM_FFI_THROW(RuntimeError) << "product with m = " << of.m << ", n = " << of.n << ", k = " << of.k << " on " << on.device << ": "
                              << wrong;
}

void product(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, MaybeTensor ends, MaybeTensor bias, TensorView out,
             MaybeTensor workspace, int64_t a_element, int64_t a_block_rows, int64_t b_element, int64_t b_block_rows, bool a_ordered,
             bool b_ordered, bool own, int64_t tile, bool fast, bool accumulate) {
  const OnDevice on(a, "a");
  const bool along_k = out.ndim() == 3;
  check(a.ndim() == 2 && (b.ndim() == 2 || (b.ndim() == 3 && !along_k)) && b.size(-1) == a.size(1),
        "a must be [m, k], and b [n, k] or for groups of a's rows [groups, n, k]; a is ", describe(a), " and b ", describe(b));
  const int64_t groups = along_k ? out.size(0) : (b.ndim() == 3 ? b.size(0) : 1), m = a.size(0), n = b.size(-2), k = a.size(1);
  check(m * n * k * groups > 0 && m <= INT32_MAX && groups * n <= INT32_MAX && k * (a.dtype().bits / 8) <= INT32_MAX - 16,
        "a and b must have elements, and less than 2^31 rows and columns; a is ", describe(a), " and b ", describe(b));
  check(has(ends) || groups == 1, "ends must be there for more than one group, and there are ", groups);
  check_array(ends, "ends", on.device, groups, 32, "an int32 for each group");
  const Side left = side_of("a", "a_scales", a, a_scales, a_element, a_block_rows, a_ordered, groups, on.device);
  const Side right = side_of("b", "b_scales", b, b_scales, b_element, b_block_rows, b_ordered, groups, on.device);
  check(left.values() == right.values(), "a and b must both be codes or both bfloat16; they are ", describe(a), " and ", describe(b));
  GemmArguments p{};
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.k = static_cast<int>(left.k), p.groups = static_cast<int>(groups);
  p.ends = data_of<const int32_t>(ends), p.along_k = along_k;
  p.dtype = dtype_of(out, "out");
  check_array(out, "out", on.device, (along_k ? groups : 1) * m * n, 8 * dtype_bytes(p.dtype), along_k ? "[groups, m, n]" : "[m, n]");
  p.out = data_of<void>(out);
  if (has(bias)) {
    check(!along_k, "products along k of groups have no bias");
    p.bias_dtype = dtype_of(bias.value(), "bias");
    check_array(bias, "bias", on.device, groups * n, 8 * dtype_bytes(p.bias_dtype), "[groups, n]");
    p.bias = data_of<const void>(bias);
  }
  p.accumulate = accumulate;
  Workspace memory(workspace, on.device);
  if (own) {
    by_own_kernel(on, left, right, p, memory, tile);
  } else {
    by_cublas(on, left, right, p, memory, fast);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(product, product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cublas_version, cublas_version);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
