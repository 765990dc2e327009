// The library's functions for programs that compute all of their arguments, XLA's: keys, amaxes and tensor scales are arrays, one
// that is absent has no elements, and arrays are contiguous.
//
// `ndim` is how many axes one tensor has. Axes before these are vmap's: each of their entries is a tensor of its own, with its
// own amax, key and tensor scale; an argument that is the same for all has length 1 there.

#include <tvm/ffi/tvm_ffi.h>

#include <memory>
#include <vector>

#include "arguments.h"
#include "calls.h"

namespace blockfp {
namespace {

int dtype_of(const TensorView& x) {
  const DLDataType dtype = x.dtype();
  const bool brain = dtype.code == kDLBfloat;
  check((dtype.code == kDLFloat && (dtype.bits == 32 || dtype.bits == 16)) || (brain && dtype.bits == 16),
        "values must be float32, float16 or bfloat16");
  return brain ? Bf16::kId : dtype.bits == 32 ? Fp32::kId : Fp16::kId;
}

void check_array(const TensorView& x, const char* what) {
  check(x.device().device_type == kDLCPU && x.IsContiguous(), what);
}

// Whether a stack of tensors is one tensor with more axes: nothing but the blocks' own scales.
bool is_one_tensor(const Spec& spec) { return !spec.per_tensor() && spec.rule != ScaleRule::kE4m3; }

bool same_axes(const TensorView& a, const TensorView& b, int64_t count) {
  if (a.ndim() != b.ndim()) return false;
  for (int64_t axis = 0; axis < count; ++axis) {
    if (a.size(axis) != b.size(axis)) return false;
  }
  return true;
}

// vmap's axes: how many tensors there are, and where each one's part of an argument begins.
class Stack {
 public:
  Stack(const TensorView& result, int64_t ndim) : lengths_(result.shape().data(), result.shape().data() + axes(result, ndim)) {
    for (int64_t length : lengths_) count_ *= length;
  }

  int64_t count() const { return count_; }

  // Elements of one tensor's part, whose axes are the last `ndim`.
  int64_t part(const TensorView& x, int64_t ndim) const {
    int64_t size = 1;
    for (int64_t axis = axes(x, ndim); axis < x.ndim(); ++axis) size *= x.size(axis);
    return size;
  }

  template <class T>
  T* at(int64_t index, const TensorView& x, int64_t ndim, int64_t bytes) const {
    check(axes(x, ndim) == static_cast<int64_t>(lengths_.size()), "all arguments must have the same axes before their own");
    int64_t offset = 0, stride = part(x, ndim);
    for (int64_t axis = static_cast<int64_t>(lengths_.size()) - 1; axis >= 0; --axis) {
      const int64_t length = x.size(axis);
      check(length == 1 || length == lengths_[axis], "an argument has another length along vmap's axes");
      if (length > 1) offset += index % lengths_[axis] * stride;
      index /= lengths_[axis];
      stride *= length;
    }
    return reinterpret_cast<T*>(data_of<char>(x) + offset * bytes);
  }

 private:
  static int64_t axes(const TensorView& x, int64_t ndim) {
    check(x.ndim() >= ndim, "an argument has too few axes");
    return x.ndim() - ndim;
  }

  std::vector<int64_t> lengths_;
  int64_t count_ = 1;
};

// One tensor's shape and strides, perhaps with the last two axes swapped.
struct Shape {
  std::vector<int64_t> lengths, strides;

  Shape(const TensorView& x, int64_t ndim, bool transposed) {
    check(ndim >= 2 && x.ndim() >= ndim, "a tensor has two or more axes");
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
  Tiling tiling(const Spec& spec, int64_t first_row, int64_t first_column) const {
    check(first_row >= 0 && first_column >= 0, "origin must not be negative");
    return make_tiling(spec, batches(), rows(), columns(), first_row, first_column, 4);
  }
};

void check_result(const TensorView& x, int64_t count, int bits, const char* what) {
  check_array(x, what);
  check(x.numel() == count && x.dtype().bits == bits, what);
}

void amax_arrays(TensorView x, TensorView blocks, TensorView nan, TensorView tensor, int64_t ndim, int64_t element,
                 int64_t block_rows, int64_t block_columns, int64_t rule) {
  const Spec spec = spec_of(element, block_rows, block_columns, rule);
  const int dtype = dtype_of(x);
  check_array(x, "x must be contiguous");
  const Shape shape(x, ndim, false);
  const Stack stack(blocks, ndim);
  const int64_t scales = scale_count(spec, shape.tiling(spec, 0, 0));
  const bool with_nan = element > E5M2::kId, with_tensor = spec.rule == ScaleRule::kE4m3;
  check_result(blocks, stack.count() * scales, 32, "blocks must be int32, one for each block");
  check_result(nan, with_nan ? stack.count() * scales : 0, 32, "nan must be int32, one for each block");
  check_result(tensor, with_tensor ? stack.count() : 0, 32, "tensor must be one int32");
  for (int64_t i = 0; i < stack.count(); ++i) {
    AmaxJob job{spec, {}, shape.input(stack.at<const void>(i, x, ndim, bytes_of(dtype)), dtype), nullptr, nullptr, nullptr};
    job.blocks = stack.at<int32_t>(i, blocks, ndim, 4);
    if (with_nan) job.nan = stack.at<int32_t>(i, nan, ndim, 4);
    if (with_tensor) job.tensor = stack.at<int32_t>(i, tensor, 0, 4);
    run_amax(job, 0, 0);
  }
}

// `given` is nothing, the amax of the whole tensor (int32) or, per tensor, the multiplier (float32); `transposed` quantizes x
// with its last two axes swapped, and `rotated` applies the random Hadamard transform to that first.
void quantize_arrays(TensorView x, TensorView given, TensorView key, TensorView codes, TensorView scales,
                     TensorView tensor_scale, int64_t ndim, int64_t element, int64_t block_rows, int64_t block_columns,
                     int64_t rule, int64_t largest_bits, int64_t eps_bits, int64_t transposed, int64_t rotated) {
  QuantizeJob job{};
  job.spec = spec_of(element, block_rows, block_columns, rule);
  const int dtype = dtype_of(x);
  check_array(x, "x must be contiguous");
  if (is_one_tensor(job.spec) && key.numel() == 0 && !rotated) ndim = x.ndim();
  const Shape shape(x, ndim, transposed != 0);
  const Stack stack(codes, ndim);
  const bool bytes = rule > static_cast<int>(ScaleRule::kPow2), two_levels = job.spec.rule == ScaleRule::kE4m3;
  const int64_t rows = shape.batches() * shape.rows();
  check_result(codes, stack.count() * rows * code_row_bytes(job.spec.element, shape.columns()), 8, "codes must be uint8, packed");
  check_result(scales, stack.count() * scale_count(job.spec, shape.tiling(job.spec, 0, 0)), bytes ? 8 : 32,
               "scales must be there for each block");
  check_result(tensor_scale, two_levels ? stack.count() : 0, 32, "tensor_scale must be one float32, of formats of two levels");
  const bool is_given = given.numel() > 0, is_multiplier = is_given && given.dtype().code == kDLFloat;
  check_array(given, "amax must be contiguous");
  check(!is_given || (given.dtype().bits == 32 && (job.spec.per_tensor() || (two_levels && !is_multiplier))),
        "an amax of the whole tensor is for formats that have a scale for it, a multiplier for one scale per tensor");
  check_array(key, "key must be contiguous");
  job.stochastic = key.numel() > 0;
  check(!job.stochastic || (key.dtype().bits == 32 && key.size(-1) == 2), "key must be two uint32 words");
  job.eps_bits = static_cast<int32_t>(eps_bits);
  job.largest = static_cast<int32_t>(largest_bits);
  job.index_rows = shape.rows();
  job.index_columns = shape.columns();
  Shape turned = shape;
  turned.fill_strides();
  const std::unique_ptr<char[]> memory(rotated ? new char[shape.size() * bytes_of(dtype)] : nullptr);
  for (int64_t i = 0; i < stack.count(); ++i) {
    job.x = shape.input(stack.at<const void>(i, x, ndim, bytes_of(dtype)), dtype);
    if (rotated) {
      run_rotate({job.x, shape.rows(), shape.columns(), memory.get()}, shape.batches());
      job.x = turned.input(memory.get(), dtype);
    }
    job.codes = stack.at<uint8_t>(i, codes, ndim, 1);
    job.scales = stack.at<void>(i, scales, ndim, bytes ? 1 : 4);
    if (job.stochastic) {
      const uint32_t* words = stack.at<const uint32_t>(i, key, 1, 4);
      job.key0 = words[0];
      job.key1 = words[1];
    }
    const int32_t* amax = is_given && !is_multiplier ? stack.at<const int32_t>(i, given, 1, 4) : nullptr;
    job.given_blocks = job.spec.per_tensor() ? amax : nullptr;
    run_quantize(job, amax, two_levels ? stack.at<float>(i, tensor_scale, 0, 4) : nullptr,
                 is_multiplier ? stack.at<const float>(i, given, 1, 4) : nullptr);
  }
}

void dequantize_arrays(TensorView codes, TensorView scales, TensorView tensor_scale, TensorView out, int64_t ndim,
                       int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, int64_t first_row,
                       int64_t first_column) {
  DequantizeJob job{};
  job.spec = spec_of(element, block_rows, block_columns, rule);
  job.dtype = dtype_of(out);
  if (is_one_tensor(job.spec) && same_axes(codes, out, out.ndim() - 1) && same_axes(scales, out, out.ndim() - 2)) {
    ndim = out.ndim();
  }
  const Shape shape(out, ndim, false);
  const Stack stack(out, ndim);
  const bool bytes = rule > static_cast<int>(ScaleRule::kPow2), two_levels = job.spec.rule == ScaleRule::kE4m3;
  check_array(out, "out must be contiguous");
  check_array(codes, "codes must be contiguous");
  check_array(scales, "scales must be contiguous");
  check_array(tensor_scale, "tensor_scale must be contiguous");
  check(codes.dtype().bits == 8 && stack.part(codes, ndim) == shape.batches() * shape.rows() *
                                                                  code_row_bytes(job.spec.element, shape.columns()),
        "codes must be uint8, packed");
  check(scales.dtype().bits == (bytes ? 8 : 32) &&
            stack.part(scales, ndim) == scale_count(job.spec, shape.tiling(job.spec, first_row, first_column)),
        "scales must be there for each block");
  check(!two_levels || tensor_scale.dtype().bits == 32, "tensor_scale must be float32");
  for (int64_t i = 0; i < stack.count(); ++i) {
    job.codes = stack.at<const uint8_t>(i, codes, ndim, 1);
    job.scales = stack.at<const void>(i, scales, ndim, bytes ? 1 : 4);
    job.tensor_scale = two_levels ? *stack.at<const float>(i, tensor_scale, 1, 4) : 1.0f;
    job.out = stack.at<void>(i, out, ndim, bytes_of(job.dtype));
    run_dequantize(job, shape.batches(), shape.rows(), shape.columns(), first_row, first_column);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(amax_arrays, amax_arrays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_arrays, quantize_arrays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize_arrays, dequantize_arrays);

}  // namespace
}  // namespace blockfp
