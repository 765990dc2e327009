// The library's functions for programs that compute all of their arguments, such as XLA's: keys, amaxes and tensor scales are
// arrays, absent ones are empty, and all arrays are contiguous.
//
// `ndim` is the number of axes of one tensor. Leading axes are vmap's: each entry is a separate tensor with its own amax, key
// and tensor scale; an argument that is equal for all has length 1 there.

#include <tvm/ffi/tvm_ffi.h>

#include <memory>
#include <vector>

#include "arguments.h"
#include "run_jobs.h"

namespace blockfp {
namespace {

void check_contiguous(const TensorView& x, const char* name) {
  check_device(x, name, kCpu);
  check(x.IsContiguous(), name, " must be contiguous; it is ", describe(x));
}

// Whether a stack of tensors can be quantized as one tensor with more axes: only blocks have scales.
bool is_one_tensor(const Format& format) { return !format.per_tensor() && !format.two_levels(); }

bool same_axes(const TensorView& a, const TensorView& b, int64_t count) {
  if (a.ndim() != b.ndim()) return false;
  for (int64_t axis = 0; axis < count; ++axis) {
    if (a.size(axis) != b.size(axis)) return false;
  }
  return true;
}

// vmap's axes: the number of tensors, and the offset of each tensor's part of an argument.
class Stack {
 public:
  Stack(const TensorView& result, int64_t ndim) : lengths_(result.shape().data(), result.shape().data() + axes(result, ndim)) {
    for (int64_t length : lengths_) count_ *= length;
  }

  int64_t count() const { return count_; }

  // Number of elements of one tensor's part, whose axes are the last `ndim`.
  int64_t part(const TensorView& x, int64_t ndim) const {
    int64_t size = 1;
    for (int64_t axis = axes(x, ndim); axis < x.ndim(); ++axis) size *= x.size(axis);
    return size;
  }

  template <class T>
  T* at(int64_t index, const TensorView& x, int64_t ndim, int64_t bytes) const {
    check(axes(x, ndim) == static_cast<int64_t>(lengths_.size()), "all arguments must have the same axes before their own, ",
          lengths_.size(), "; one is ", describe(x));
    int64_t offset = 0, stride = part(x, ndim);
    for (int64_t axis = static_cast<int64_t>(lengths_.size()) - 1; axis >= 0; --axis) {
      const int64_t length = x.size(axis);
      check(length == 1 || length == lengths_[axis], "an argument has another length along vmap's axis ", axis, ", ", lengths_[axis],
            "; it is ", describe(x));
      if (length > 1) offset += index % lengths_[axis] * stride;
      index /= lengths_[axis];
      stride *= length;
    }
    return reinterpret_cast<T*>(data_of<char>(x) + offset * bytes);
  }

 private:
  static int64_t axes(const TensorView& x, int64_t ndim) {
    check(x.ndim() >= ndim, "an argument must have ", ndim, " or more axes; it is ", describe(x));
    return x.ndim() - ndim;
  }

  std::vector<int64_t> lengths_;
  int64_t count_ = 1;
};

// One tensor's shape and strides, optionally with the last two axes swapped.
struct Shape {
  std::vector<int64_t> lengths, strides;

  Shape(const TensorView& x, int64_t ndim, bool transposed) {
    check(ndim >= 2 && x.ndim() >= ndim, "a tensor has two or more axes, ", ndim, " here; x is ", describe(x));
    lengths.assign(x.shape().data() + x.ndim() - ndim, x.shape().data() + x.ndim());
    if (transposed) std::swap(lengths[ndim - 2], lengths[ndim - 1]);
    fill_strides();
    if (transposed) {
      strides[ndim - 2] = 1;
      strides[ndim - 1] = lengths[ndim - 2];
    }
  }

  void fill_strides() {
    strides.resize(lengths.size());
    int64_t stride = 1;
    for (size_t axis = lengths.size(); axis-- > 0; stride *= lengths[axis]) strides[axis] = stride;
  }

  int64_t rows() const { return lengths[lengths.size() - 2]; }
  int64_t columns() const { return lengths.back(); }
  int64_t batches() const {
    int64_t count = 1;
    for (size_t axis = 0; axis + 2 < lengths.size(); ++axis) count *= lengths[axis];
    return count;
  }
  int64_t size() const { return batches() * rows() * columns(); }
  Input input(const void* data, int dtype) const {
    return {data, dtype, static_cast<int>(lengths.size()), lengths.data(), strides.data()};
  }
  Tiling tiling(const Format& format, int64_t first_row, int64_t first_column) const {
    check(first_row >= 0 && first_column >= 0, "origin must not be negative; it is (", first_row, ", ", first_column, ")");
    return make_tiling(format, batches(), rows(), columns(), first_row, first_column, 4);
  }
};

void amax_arrays(TensorView x, TensorView blocks, TensorView nan, TensorView tensor, int64_t ndim, int64_t element,
                 int64_t block_rows, int64_t block_columns, int64_t rule) {
  const Format format = checked_format(element, block_rows, block_columns, rule);
  const int dtype = dtype_of(x, "x");
  check_contiguous(x, "x");
  const Shape shape(x, ndim, false);
  const Stack stack(blocks, ndim);
  const int64_t scales = scale_count(format, shape.tiling(format, 0, 0));
  const bool with_nan = element > E5M2::kId, with_tensor = format.two_levels();
  check_array(blocks, "blocks", kCpu, stack.count() * scales, 32, "an int32 for each block");
  check_array(nan, "nan", kCpu, with_nan ? stack.count() * scales : 0, 32, "an int32 for each block of elements without NaN");
  check_array(tensor, "tensor", kCpu, with_tensor ? stack.count() : 0, 32, "an int32 for each tensor of formats of two levels");
  for (int64_t i = 0; i < stack.count(); ++i) {
    AmaxJob job{format, {}, shape.input(stack.at<const void>(i, x, ndim, dtype_bytes(dtype)), dtype), nullptr, nullptr, nullptr};
    job.blocks = stack.at<int32_t>(i, blocks, ndim, 4);
    if (with_nan) job.nan = stack.at<int32_t>(i, nan, ndim, 4);
    if (with_tensor) job.tensor = stack.at<int32_t>(i, tensor, 0, 4);
    run_amax(job, 0, 0);
  }
}

// `given` is empty, the whole tensor's amax (int32), or a per-tensor multiplier (float32). `transposed` quantizes x with its
// last two axes swapped; `rotated` applies the random Hadamard transform after that.
void quantize_arrays(TensorView x, TensorView given, TensorView key, TensorView codes, TensorView scales,
                     TensorView tensor_scale, int64_t ndim, int64_t element, int64_t block_rows, int64_t block_columns,
                     int64_t rule, int64_t largest_bits, int64_t eps_bits, int64_t transposed, int64_t rotated) {
  QuantizeJob job{};
  job.format = checked_format(element, block_rows, block_columns, rule);
  const int dtype = dtype_of(x, "x");
  check_contiguous(x, "x");
  if (is_one_tensor(job.format) && key.numel() == 0 && !rotated) ndim = x.ndim();
  const Shape shape(x, ndim, transposed != 0);
  const Stack stack(codes, ndim);
  const bool two_levels = job.format.two_levels();
  const int scale_bits = job.format.scale_bits();
  const int64_t rows = shape.batches() * shape.rows(), blocks = scale_count(job.format, shape.tiling(job.format, 0, 0));
  check_array(codes, "codes", kCpu, stack.count() * rows * code_row_bytes(job.format.element, shape.columns()), 8, "packed codes");
  check_array(scales, "scales", kCpu, stack.count() * blocks, scale_bits, "a scale for each block");
  check_array(tensor_scale, "tensor_scale", kCpu, two_levels ? stack.count() : 0, 32, "a float32 for each tensor of formats of two levels");
  const bool is_given = given.numel() > 0, is_multiplier = is_given && given.dtype().code == kDLFloat;
  check_contiguous(given, "amax");
  check(!is_given || (given.dtype().bits == 32 && (job.format.per_tensor() || (two_levels && !is_multiplier))),
        "an amax of the whole tensor is for formats that have a scale for it, a multiplier for one scale per tensor; it is ",
        describe(given));
  check_contiguous(key, "key");
  job.random = key.numel() > 0 ? 1 : 0;
  check(job.random == 0 || (key.dtype().bits == 32 && key.size(-1) == 2), "key must be two uint32 words; it is ",
        describe(key));
  job.eps_bits = static_cast<int32_t>(eps_bits);
  job.largest = static_cast<int32_t>(largest_bits);
  job.index_rows = shape.rows();
  job.index_columns = shape.columns();
  Shape turned = shape;
  turned.fill_strides();
  const std::unique_ptr<char[]> memory(rotated ? new char[shape.size() * dtype_bytes(dtype)] : nullptr);
  for (int64_t i = 0; i < stack.count(); ++i) {
    job.x = shape.input(stack.at<const void>(i, x, ndim, dtype_bytes(dtype)), dtype);
    if (rotated) {
      run_rotate({job.x, shape.rows(), shape.columns(), memory.get()}, shape.batches());
      job.x = turned.input(memory.get(), dtype);
    }
    job.codes = stack.at<uint8_t>(i, codes, ndim, 1);
    job.scales = stack.at<void>(i, scales, ndim, scale_bits / 8);
    if (job.random > 0) {
      const uint32_t* words = stack.at<const uint32_t>(i, key, 1, 4);
      job.key0 = words[0];
      job.key1 = words[1];
    }
    const int32_t* amax = is_given && !is_multiplier ? stack.at<const int32_t>(i, given, 1, 4) : nullptr;
    job.given_blocks = job.format.per_tensor() ? amax : nullptr;
    run_quantize(job, amax, two_levels ? stack.at<float>(i, tensor_scale, 0, 4) : nullptr,
                 is_multiplier ? stack.at<const float>(i, given, 1, 4) : nullptr);
  }
}

void dequantize_arrays(TensorView codes, TensorView scales, TensorView tensor_scale, TensorView out, int64_t ndim,
                       int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, int64_t first_row,
                       int64_t first_column) {
  DequantizeJob job{};
  job.format = checked_format(element, block_rows, block_columns, rule);
  job.dtype = dtype_of(out, "out");
  if (is_one_tensor(job.format) && same_axes(codes, out, out.ndim() - 1) && same_axes(scales, out, out.ndim() - 2)) {
    ndim = out.ndim();
  }
  const Shape shape(out, ndim, false);
  const Stack stack(out, ndim);
  const bool two_levels = job.format.two_levels();
  const int scale_bits = job.format.scale_bits();
  check_contiguous(out, "out");
  check_contiguous(codes, "codes");
  check_contiguous(scales, "scales");
  check_contiguous(tensor_scale, "tensor_scale");
  const int64_t bytes = shape.batches() * shape.rows() * code_row_bytes(job.format.element, shape.columns());
  const int64_t blocks = scale_count(job.format, shape.tiling(job.format, first_row, first_column));
  check(codes.dtype().bits == 8 && stack.part(codes, ndim) == bytes, "codes must be packed, ", bytes, " bytes a tensor; it is ",
        describe(codes));
  check(scales.dtype().bits == scale_bits && stack.part(scales, ndim) == blocks, "scales must be there for each block, ", blocks,
        " of ", scale_bits, " bits a tensor; it is ", describe(scales));
  check(!two_levels || tensor_scale.dtype().bits == 32, "tensor_scale must be float32; it is ", describe(tensor_scale));
  for (int64_t i = 0; i < stack.count(); ++i) {
    job.codes = stack.at<const uint8_t>(i, codes, ndim, 1);
    job.scales = stack.at<const void>(i, scales, ndim, scale_bits / 8);
    job.tensor_scale = two_levels ? *stack.at<const float>(i, tensor_scale, 1, 4) : 1.0f;
    job.out = stack.at<void>(i, out, ndim, dtype_bytes(job.dtype));
    run_dequantize(job, shape.batches(), shape.rows(), shape.columns(), first_row, first_column);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax_arrays, amax_arrays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_arrays, quantize_arrays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize_arrays, dequantize_arrays);

}  // namespace
}  // namespace blockfp
