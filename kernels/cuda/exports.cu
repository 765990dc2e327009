// The library's functions, callable through Apache TVM FFI from PyTorch, JAX (jax-tvm-ffi) and anything with DLPack.
//
//   amax(x, out)
//       out: int32, one element: fp32 bits of the largest magnitude of x, NaN ignored; a second one is that of x after the random
//       Hadamard transform of its columns.
//   amax_blocks(x, blocks, nan?, tensor?, FORMAT, row, column)
//       blocks, nan: int32, one for each block; tensor: int32, one element.
//   quantize(x, amax?, recorded?, key?, codes?, scales?, tensor_scale?, codes_t?, scales_t?, FORMAT,
//            measure, eps_bits, largest_bits, rotate_t, row, column, rows, columns)
//       codes, scales: along the rows of x. codes_t, scales_t: of x transposed. Either, or both from one read.
//       amax: of the tensor, for formats with one scale per tensor or two levels: int32 bits; with `measure` it is computed first, in
//       place; a float32 is the multiplier itself (delayed scaling). With rotate_t amax and tensor_scale have two elements, the
//       second of the rotated, transposed direction. recorded: int32, raised to the amax of x.
//       key: int32 or uint32 [2], or [4] whose second pair is for codes_t; absent: nearest even. rotate_t: the random Hadamard
//       transform before codes_t. largest_bits: fp32 bits that replace an FP8 block multiplier that overflows.
//   encode(x, blocks?, nan?, amax?, key?, codes, scales, tensor_scale?, FORMAT, eps_bits, largest_bits, row, column, rows, columns)
//       with blocks (amaxes reduced elsewhere) scales and tensor_scale are written, without they are read. Any strides and origin.
//   dequantize(codes, scales, tensor_scale?, out, FORMAT, row, column)
//   transpose(in, out, bits, rows, columns)
//       bits: 8, 6 or 4 of codes and one-byte scales, 32 of fp32 scales; rows and columns of `in`, counted in codes.
//   interleave(scales, out, rows, repeat)
//       scales: uint8 [..., m, n] for `rows` rows, each repeated `repeat` times; out: uint8 in tensor-core order.
//   fold_keys(key, step?, rank, groups, out)
//       key: int32 or int64 [2]; step: int64, one element; out: int32 [max(groups, 1), 2, 2]. Negative rank or groups: not folded in.
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
//   adamw(table, x)
//       table: int64 in host memory, rows of StepEntry (blockfp/adamw.h), whose pointers are the caller's word. x: any array of theirs, for
//       its device and the caller's stream.
//
// FORMAT is four integers: element, block_rows, block_columns (0, 0: the tensor), rule, as elements.h and scales.h number them. `?`: None or
// an array without elements where it is absent. (row, column) is the origin of x in an unsharded matrix of (rows, columns); 0 rows
// stand for as far as x goes. Outputs are the caller's, contiguous. Work is enqueued on the caller's current stream.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "blockfp/packing.h"
#include "gemm.h"
#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using MaybeTensor = Optional<TensorView>;

void check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << what;
}

template <class T>
T* data_of(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

template <class T>
T* data_of(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor.value().numel() > 0 ? data_of<T>(tensor.value()) : nullptr;
}

bool has(const MaybeTensor& tensor) { return tensor.has_value() && tensor.value().numel() > 0; }

// The device of x and its current stream, for the length of a call.
class OnDevice {
 public:
  explicit OnDevice(const TensorView& x) {
    check(x.device().device_type == kDLCUDA, "arrays must be on a CUDA device");
    device_ = x.device().device_id;
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device_;
    if (before_ != device_) check(cudaSetDevice(device_) == cudaSuccess, "the device of x can't be used");
    stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device_));
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  void done(cudaError_t error) const {
    if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "CUDA: " << cudaGetErrorString(error);
  }
  cudaStream_t stream;

 private:
  int device_ = 0, before_ = 0;
};

int dtype_of(const TensorView& x) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Bf16::kId;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Fp16::kId;
  check(dtype.code == kDLFloat && dtype.bits == 32, "x must be float32, float16 or bfloat16");
  return Fp32::kId;
}

// x as a stack of matrices; leading axes must be evenly spaced.
Matrices matrices_of(const TensorView& x) {
  check(x.ndim() >= 2, "x must have two or more axes");
  const int last = x.ndim() - 1;
  Matrices m{data_of<const void>(x), dtype_of(x), 1, x.size(last - 1), x.size(last), 0, x.stride(last - 1), x.stride(last)};
  for (int axis = last - 2; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (m.batches == 1) {
      m.batch_stride = x.stride(axis);
    } else {
      check(x.stride(axis) == m.batch_stride * m.batches || x.numel() == 0,
            "the leading axes of x must be evenly spaced: pass x.contiguous()");
    }
    m.batches *= x.size(axis);
  }
  // Strides of axes with one entry say nothing.
  if (m.columns == 1) m.column_stride = 1;
  if (m.rows == 1) m.row_stride = m.columns;
  return m;
}

Format format_of(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  check(element >= 0 && element <= Int8::kId && rule >= 0 && rule <= static_cast<int>(ScaleRule::kE4m3),
        "the format has an element or a scale rule that this library does not know: rebuild it");
  const ScaleRule scale = static_cast<ScaleRule>(rule);
  const bool fp8 = element <= E5M2::kId && rule <= static_cast<int>(ScaleRule::kPow2);
  const bool mx = scale == ScaleRule::kE8m0Ceil || scale == ScaleRule::kE8m0Floor;
  const bool known = (fp8 && (block_columns == 0 || block_columns == 128)) || (mx && block_columns == 32) ||
                     (element == E2M1::kId && scale == ScaleRule::kE4m3 && block_columns == 16);
  check(known && (block_rows == block_columns || block_rows == 1),
        "this library has FP8 per tensor and in blocks of 128, MX in blocks of 32, and NVFP4 in blocks of 16");
  return {static_cast<int>(element), static_cast<int>(block_rows), static_cast<int>(block_columns), scale};
}

Window window_of(const Format& f, int64_t x_rows, int64_t x_columns, int64_t row, int64_t column, int64_t rows,
                 int64_t columns) {
  check(row >= 0 && column >= 0, "origin must not be negative");
  const int tall = f.per_tensor() ? 1 : f.block_rows, wide = f.per_tensor() ? 1 : f.block_columns;
  return {row, column, rows > 0 ? rows : row + x_rows, columns > 0 ? columns : column + x_columns,
          static_cast<int>(row % tall), static_cast<int>(column % wide)};
}

int64_t code_bytes(const Format& f, int64_t rows, int64_t columns) {
  return with_element(f.element, [&](auto element) { return rows * Packing<decltype(element)::kBits>::row_bytes(columns); });
}

int64_t block_count(const Format& f, int64_t batches, int64_t rows, int64_t columns, int row_phase, int column_phase) {
  if (f.per_tensor()) return 1;
  if (rows == 0 || columns == 0) return 0;
  return batches * ceil_div(row_phase + rows, f.block_rows) * ceil_div(column_phase + columns, f.block_columns);
}

void check_array(const TensorView& tensor, int64_t count, int bits, const char* what) {
  check(tensor.device().device_type == kDLCUDA && tensor.IsContiguous() && tensor.numel() == count && tensor.dtype().bits == bits,
        what);
}

void check_array(const MaybeTensor& tensor, int64_t count, int bits, const char* what) {
  if (has(tensor)) check_array(tensor.value(), count, bits, what);
}

int scale_bits(const Format& f) { return f.rule <= ScaleRule::kPow2 ? 32 : 8; }

const uint32_t* key_of(const MaybeTensor& key, int pair) {
  if (!has(key)) return nullptr;
  const TensorView& words = key.value();
  check((words.numel() == 2 || words.numel() == 4) && words.dtype().bits == 32 && words.IsContiguous() &&
            words.device().device_type == kDLCUDA,
        "key must be two or four 32-bit words on the device of x");
  return data_of<const uint32_t>(words) + (words.numel() == 4 ? 2 * pair : 0);
}

void amax(TensorView x, TensorView out) {
  const OnDevice device(x);
  const bool rotated = out.numel() == 2;
  check_array(out, rotated ? 2 : 1, 32, "out must be one int32, or two");
  int32_t* largest = data_of<int32_t>(out);
  device.done(rotated ? launch_amax_rotated(matrices_of(x), largest, device.stream)
                      : launch_amax(matrices_of(x), largest, device.stream));
}

void amax_blocks(TensorView x, TensorView blocks, MaybeTensor nan, MaybeTensor tensor, int64_t element, int64_t block_rows,
                 int64_t block_columns, int64_t rule, int64_t row, int64_t column) {
  const OnDevice device(x);
  const Format f = format_of(element, block_rows, block_columns, rule);
  check(!f.per_tensor(), "a format with one scale per tensor has no block grid: use amax");
  const Matrices m = matrices_of(x);
  const Window w = window_of(f, m.rows, m.columns, row, column, 0, 0);
  const int64_t count = block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase);
  check_array(blocks, count, 32, "blocks must be contiguous int32, one for each block");
  check_array(nan, count, 32, "nan must be contiguous int32, one for each block");
  check_array(tensor, 1, 32, "tensor must be one int32");
  device.done(launch_amax_blocks({m, f, w, data_of<int32_t>(blocks), data_of<int32_t>(nan), data_of<int32_t>(tensor)},
                                 device.stream));
}

void quantize(TensorView x, MaybeTensor amax, MaybeTensor recorded, MaybeTensor key, MaybeTensor codes, MaybeTensor scales,
              MaybeTensor tensor_scale, MaybeTensor codes_t, MaybeTensor scales_t, int64_t element, int64_t block_rows,
              int64_t block_columns, int64_t rule, bool measure, int64_t eps_bits, int64_t largest_bits, bool rotate_t,
              int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const OnDevice device(x);
  QuantizeArguments a{};
  a.x = matrices_of(x);
  a.format = format_of(element, block_rows, block_columns, rule);
  check(a.x.column_stride == 1 || x.numel() == 0, "the columns of x must be adjacent: pass x.contiguous(), or ask for codes_t of x.mT");
  a.window = window_of(a.format, a.x.rows, a.x.columns, row, column, rows, columns);
  const bool square = a.format.square(), whole = a.format.per_tensor(), two_levels = a.format.rule == ScaleRule::kE4m3;
  if (!square && !whole) {
    a.window.row_phase = static_cast<int>(row % block_columns);  // of the transposed matrix
    if (!has(codes_t)) a.window.row_phase = 0;
    if (!has(codes)) a.window.column_phase = 0;
  }
  check((a.window.row_phase | a.window.column_phase) % 8 == 0,
        "blocks begin at multiples of eight elements here: for another origin use amax_blocks and encode");
  check_array(codes, code_bytes(a.format, a.x.batches * a.x.rows, a.x.columns), 8, "codes must be contiguous uint8, packed");
  check_array(codes_t, code_bytes(a.format, a.x.batches * a.x.columns, a.x.rows), 8, "codes_t must be contiguous uint8, packed");
  if (has(codes) || whole) {
    check_array(scales, block_count(a.format, a.x.batches, a.x.rows, a.x.columns, square ? a.window.row_phase : 0, a.window.column_phase),
                scale_bits(a.format), "scales must be contiguous, one for each block");
  }
  if (has(codes_t)) {
    check_array(scales_t, block_count(a.format, a.x.batches, a.x.columns, a.x.rows, square ? a.window.column_phase : 0, a.window.row_phase),
                scale_bits(a.format), "scales_t must be contiguous, one for each block of x transposed");
  }
  check(has(codes) == has(scales) || x.numel() == 0, "codes and scales come together");
  check(has(codes_t) == has(scales_t) || x.numel() == 0, "codes_t and scales_t come together");
  a.row = {data_of<uint8_t>(codes), data_of<void>(scales), key_of(key, 0)};
  a.column = {data_of<uint8_t>(codes_t), data_of<void>(scales_t), key_of(key, 1)};
  check_array(recorded, 1, 32, "recorded must be one int32");
  a.recorded = data_of<int32_t>(recorded);
  if (whole || two_levels) {
    check(has(amax), "a format with one scale per tensor or two levels needs an amax");
    check_array(amax, rotate_t ? 2 : 1, 32, "amax must be one int32 (bits) or one float32 (a multiplier); two int32 with rotate_t");
    if (amax.value().dtype().code == kDLFloat) {
      check(whole && !measure, "a multiplier is for formats with one scale per tensor");
      a.multiplier = data_of<const float>(amax);
    } else {
      a.amax = data_of<const int32_t>(amax);
      a.amax_t = a.amax + (rotate_t ? 1 : 0);
    }
  }
  check(has(tensor_scale) == two_levels, "tensor_scale belongs to formats of two levels");
  check_array(tensor_scale, rotate_t ? 2 : 1, 32, "tensor_scale must be one float32; two with rotate_t");
  a.tensor_scale = data_of<float>(tensor_scale);
  a.tensor_scale_t = a.tensor_scale + (rotate_t ? 1 : 0);
  a.eps_bits = static_cast<int32_t>(eps_bits);
  a.largest_bits = static_cast<int32_t>(largest_bits);
  a.rotate_column = rotate_t;
  check(!rotate_t || (two_levels && !square && row % 16 == 0), "only NVFP4 in blocks of 1x16 is rotated, from rows that are multiples of 16");
  if (measure && a.amax != nullptr) {
    int32_t* out = data_of<int32_t>(amax);
    device.done(rotate_t ? launch_amax_rotated(a.x, out, device.stream) : launch_amax(a.x, out, device.stream));
  }
  const bool empty = x.numel() == 0;
  if (empty && !whole && !two_levels) return;
  if (!empty && !has(codes) && !has(codes_t)) return;
  const bool along_rows = empty || (!has(codes_t) && (!square || whole));
  device.done(with_element(a.format.element, [&](auto e) {
    using E = decltype(e);
    return along_rows ? launch_rows<E>(a, device.stream) : launch_tiles<E>(a, device.stream);
  }));
}

void encode(TensorView x, MaybeTensor blocks, MaybeTensor nan, MaybeTensor amax, MaybeTensor key, TensorView codes,
            TensorView scales, MaybeTensor tensor_scale, int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule,
            int64_t eps_bits, int64_t largest_bits, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const OnDevice device(x);
  const Matrices m = matrices_of(x);
  const Format f = format_of(element, block_rows, block_columns, rule);
  const Window w = window_of(f, m.rows, m.columns, row, column, rows, columns);
  const int64_t count = block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase);
  const bool two_levels = f.rule == ScaleRule::kE4m3;
  check_array(codes, code_bytes(f, m.batches * m.rows, m.columns), 8, "codes must be contiguous uint8, packed");
  check_array(scales, count, scale_bits(f), "scales must be contiguous, one for each block");
  check_array(blocks, count, 32, "blocks must be contiguous int32, one for each block");
  check_array(nan, count, 32, "nan must be contiguous int32, one for each block");
  check_array(amax, 1, 32, "amax must be one int32");
  check_array(tensor_scale, 1, 32, "tensor_scale must be one float32");
  check(has(tensor_scale) == two_levels && (!two_levels || !has(blocks) || has(amax)),
        "formats of two levels, and no others, have an amax and a tensor_scale");
  device.done(launch_encode({m, f, w, data_of<uint8_t>(codes), data_of<void>(scales), data_of<const int32_t>(blocks),
                             data_of<const int32_t>(nan), data_of<const int32_t>(amax), data_of<float>(tensor_scale),
                             key_of(key, 0), static_cast<int32_t>(eps_bits), static_cast<int32_t>(largest_bits)},
                            device.stream));
}

void dequantize(TensorView codes, TensorView scales, MaybeTensor tensor_scale, TensorView out, int64_t element,
                int64_t block_rows, int64_t block_columns, int64_t rule, int64_t row, int64_t column) {
  const OnDevice device(out);
  const Format f = format_of(element, block_rows, block_columns, rule);
  const Matrices m = matrices_of(out);
  check(out.IsContiguous(), "out must be contiguous");
  const Window w = window_of(f, m.rows, m.columns, row, column, 0, 0);
  check_array(codes, code_bytes(f, m.batches * m.rows, m.columns), 8, "codes must be contiguous uint8, packed");
  check_array(scales, block_count(f, m.batches, m.rows, m.columns, w.row_phase, w.column_phase), scale_bits(f),
              "scales must be contiguous, one for each block");
  check(has(tensor_scale) == (f.rule == ScaleRule::kE4m3), "tensor_scale belongs to formats of two levels");
  check_array(tensor_scale, 1, 32, "tensor_scale must be one float32");
  device.done(launch_dequantize({data_of<const uint8_t>(codes), data_of<const void>(scales), data_of<const float>(tensor_scale), f,
                                 w, m.batches, m.rows, m.columns, data_of<void>(out), m.dtype},
                                device.stream));
}

void transpose(TensorView in, TensorView out, int64_t bits, int64_t rows, int64_t columns) {
  const OnDevice device(in);
  check(bits == 4 || bits == 6 || bits == 8 || bits == 32, "bits must be 4, 6, 8 or 32");
  const auto entries = [&](int64_t down, int64_t across) {
    return bits == 4 ? down * Packing<4>::row_bytes(across) : (bits == 6 ? down * Packing<6>::row_bytes(across) : down * across);
  };
  const int64_t one = entries(rows, columns);
  const int64_t batches = one == 0 ? 0 : in.numel() / one;
  check_array(in, batches * one, bits == 32 ? 32 : 8, "in must be contiguous matrices of rows x columns");
  check_array(out, batches * entries(columns, rows), bits == 32 ? 32 : 8, "out must be contiguous matrices of columns x rows");
  device.done(launch_transpose(data_of<const void>(in), data_of<void>(out), static_cast<int>(bits), batches, rows, columns,
                               device.stream));
}

void interleave(TensorView scales, TensorView out, int64_t rows, int64_t repeat) {
  const OnDevice device(scales);
  check(scales.ndim() >= 2 && repeat >= 1, "scales must have two or more axes, and repeat must be 1 or more");
  const int64_t m = scales.size(-2), n = scales.size(-1), one = m * n;
  const int64_t batches = one == 0 ? 0 : scales.numel() / one;
  check(m == ceil_div(rows, repeat), "scales must have one row for each `repeat` rows");
  check_array(scales, batches * one, 8, "scales must be contiguous uint8");
  check_array(out, batches * ceil_div(rows, 128) * ceil_div(n, 4) * 512, 8, "out must be contiguous uint8, padded to 128 by 4");
  device.done(launch_interleave(data_of<const uint8_t>(scales), data_of<uint8_t>(out), batches, rows, m, n,
                                static_cast<int>(repeat), device.stream));
}

Factor factor_of(const TensorView& codes, const TensorView& scales, int64_t element, int64_t block_rows) {
  check(codes.device().device_type == kDLCUDA && codes.IsContiguous() && codes.ndim() == 2 && codes.dtype().bits == 8,
        "codes must be contiguous uint8 matrices");
  check(element == E4M3::kId || element == E5M2::kId, "elements must be E4M3 or E5M2");
  check(block_rows == 0 || block_rows == 1 || block_rows == 128, "blocks must be 1x128, 128x128 or the whole tensor");
  const int64_t rows = codes.size(0), blocks = ceil_div(codes.size(1), 128);
  const int64_t count = block_rows == 0 ? 1 : (block_rows == 1 ? rows * blocks : ceil_div(rows, 128) * ceil_div(blocks, 4) * 4);
  check_array(scales, count, 32, "scales must be contiguous float32, as the product wants them");
  return {data_of<const void>(codes), data_of<const float>(scales), static_cast<int>(element), static_cast<int>(block_rows)};
}

void product(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, TensorView out, TensorView workspace,
             int64_t a_element, int64_t b_element, int64_t a_block_rows, int64_t b_block_rows, bool fast) {
  const OnDevice device(a);
  ProductArguments p{factor_of(a, a_scales, a_element, a_block_rows), factor_of(b, b_scales, b_element, b_block_rows)};
  p.m = a.size(0), p.n = b.size(0), p.k = a.size(1);
  check(b.size(1) == p.k && p.m * p.n * p.k > 0, "a must be [m, k] and b [n, k], with elements");
  p.dtype = dtype_of(out);
  check_array(out, p.m * p.n, p.dtype == Fp32::kId ? 32 : 16, "out must be contiguous [m, n]");
  p.out = data_of<void>(out);
  p.workspace = data_of<void>(workspace);
  p.workspace_bytes = static_cast<size_t>(workspace.numel());
  p.fast = fast;
  p.device = a.device().device_id;
  const char* wrong = launch_product(p, device.stream);
  if (wrong != nullptr) TVM_FFI_THROW(RuntimeError) << "product: " << wrong;
}

GemmOperand gemm_operand_of(const TensorView& codes, const TensorView& scales, int64_t element, bool squares) {
  check(codes.device().device_type == kDLCUDA && codes.IsContiguous() && codes.ndim() >= 2 && codes.dtype().bits == 8,
        "codes must be contiguous uint8");
  check(element == E4M3::kId || element == E5M2::kId, "elements must be E4M3 or E5M2");
  check(scales.ndim() >= 2 && scales.IsContiguous() && scales.dtype().bits == 32, "scales must be contiguous float32 matrices");
  const int64_t n = codes.size(-2), k = codes.size(-1), groups = n * k == 0 ? 0 : codes.numel() / (n * k);
  const int64_t blocks = ceil_div(k, 128), across = scales.size(-2), along = scales.size(-1);
  check(squares ? across == ceil_div(n, 128) && along >= blocks : along == ceil_div(n, 4) * 4 && (across == blocks || across == 1),
        "scales must have the shape that the product wants");
  check(scales.numel() == groups * across * along, "scales must be as many as the codes' groups have");
  const void* data = data_of<const void>(codes);
  const float* first = data_of<const float>(scales);
  check(k % 16 == 0 && aligned(data) && aligned(first), "k must be a multiple of 16, and arrays begin on 16 bytes");
  return {data, static_cast<int>(element), {first, across == 1 && !squares ? 0 : along}};
}

void block_product(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, MaybeTensor ends, MaybeTensor bias,
                   TensorView out, int64_t a_element, int64_t b_element, int64_t b_block_rows, bool accumulate) {
  const OnDevice device(a);
  check(b_block_rows == 1 || b_block_rows == 128, "b's blocks must be 1x128 or 128x128");
  check(a.ndim() == 2 && (b.ndim() == 2 || b.ndim() == 3) && b.size(-1) == a.size(1), "a must be [m, k], b [n, k] or [groups, n, k]");
  const int64_t groups = b.ndim() == 3 ? b.size(0) : 1, m = a.size(0), n = b.size(-2), k = a.size(1);
  check(m * n * k * groups > 0 && m <= INT32_MAX && groups * n <= INT32_MAX && k <= INT32_MAX,
        "a and b must have elements, and less than 2^31 rows and columns");
  const GemmOperand left = gemm_operand_of(a, a_scales, a_element, false);
  const GemmOperand right = gemm_operand_of(b, b_scales, b_element, b_block_rows == 128);
  GemmArguments p{};
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.k = static_cast<int>(k), p.groups = static_cast<int>(groups);
  check(has(ends) || groups == 1, "more than one group must have ends");
  check_array(ends, groups, 32, "ends must be one int32 for each group");
  p.ends = data_of<const int32_t>(ends);
  p.dtype = dtype_of(out);
  check_array(out, m * n, p.dtype == Fp32::kId ? 32 : 16, "out must be contiguous [m, n]");
  p.out = data_of<void>(out);
  if (has(bias)) {
    p.bias_dtype = dtype_of(bias.value());
    check_array(bias, groups * n, p.bias_dtype == Fp32::kId ? 32 : 16, "bias must be contiguous [groups, n]");
    p.bias = data_of<const void>(bias);
  }
  p.accumulate = accumulate;
  device.done(launch_gemm(p, left, right, b_block_rows == 128, device.stream));
}

void adamw(TensorView table, TensorView x) {
  check(table.device().device_type == kDLCPU && table.IsContiguous() && table.ndim() == 2 && table.dtype().bits == 64 &&
            table.size(1) * 8 == static_cast<int64_t>(sizeof(StepEntry)),
        "the table's rows must be those of this library: rebuild it");
  const OnDevice device(x);
  const StepEntry* entries = data_of<const StepEntry>(table);
  for (int64_t i = 0; i < table.size(0); ++i) {
    const StepEntry& e = entries[i];
    if (e.output != static_cast<int>(StepOutput::kCodes)) continue;
    const Format f = format_of(e.element, e.block_rows, e.block_columns, e.rule);
    check(!f.per_tensor() && f.rule != ScaleRule::kE4m3, "codes with an amax of the whole tensor take a second pass");
  }
  device.done(launch_adamw(entries, table.size(0), device.stream));
}

void fold_keys(TensorView key, MaybeTensor step, int64_t rank, int64_t groups, TensorView out) {
  const OnDevice device(key);
  const int bits = key.dtype().bits;
  check(key.IsContiguous() && key.numel() == 2 && (bits == 32 || bits == 64), "key must be two int32 or int64 words");
  check_array(step, 1, 64, "step must be one int64");
  check_array(out, (groups < 0 ? 1 : groups) * 4, 32, "out must hold two words for each group and direction");
  device.done(launch_fold_keys(data_of<const void>(key), bits == 64, data_of<const int64_t>(step), rank, groups,
                               data_of<void>(out), device.stream));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(adamw, adamw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax, amax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax_blocks, amax_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode, encode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(product, product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_product, block_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cublas_version, cublas_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, dequantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose, transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(interleave, interleave);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fold_keys, fold_keys);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
