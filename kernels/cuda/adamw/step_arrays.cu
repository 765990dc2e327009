// Checks an optimizer step's arrays in one call; checking each from Python would cost the host more than the step.
//
//   addresses(out, expected, arrays..) -> index
//       out: int64 [n], the addresses of n arrays, 0 for absent ones. expected: int64 [n, 2], each array's dtype code (DLPack's code * 256 +
//       bits) and number of elements; a negative code if it must be absent. All are contiguous and on the first array's device. Returns
//       the index of the first array that differs from `expected`, or -1.
//   count_steps(out, steps..) -> index
//       Increments float32 numbers of one element in host memory, and writes them to out, int64 [n]. Returns the index of the first array
//       that isn't such a number, or -1; nothing changes unless all are.
#include "on_device.h"

namespace blockfp {
namespace cuda {
namespace {

using tvm::ffi::AnyView;

int64_t* numbers_of(const AnyView& array, const char* name, int64_t count) {
  const TensorView numbers = array.cast<TensorView>();
  check_array(numbers, name, {kDLCPU, 0}, count, 64, "an int64 for each array");
  return data_of<int64_t>(numbers);
}

int64_t addresses(const AnyView* arguments, int32_t count) {
  check(count >= 2, "addresses takes out, expected and arrays");
  const int64_t arrays = count - 2;
  int64_t* out = numbers_of(arguments[0], "out", arrays);
  const int64_t* expected = numbers_of(arguments[1], "expected", 2 * arrays);
  DLDevice device{kDLCPU, -1};
  for (int64_t i = 0; i < arrays; ++i) {
    const AnyView& argument = arguments[2 + i];
    const int64_t code = expected[2 * i], elements = expected[2 * i + 1];
    out[i] = 0;
    if (argument == nullptr) {
      if (code >= 0) return i;
      continue;
    }
    const TensorView x = argument.cast<TensorView>();
    if (device.device_id < 0) device = x.device();
    const DLDataType dtype = x.dtype();
    const int64_t address = reinterpret_cast<int64_t>(data_of<char>(x));
    if (code != dtype.code * 256 + dtype.bits || dtype.lanes != 1 || x.numel() != elements || !x.IsContiguous() ||
        !same_device(x.device(), device) || address % (dtype.bits / 8) != 0) {
      return i;
    }
    out[i] = address;
  }
  return -1;
}

int64_t count_steps(const AnyView* arguments, int32_t count) {
  check(count >= 1, "count_steps takes out and numbers");
  int64_t* out = numbers_of(arguments[0], "out", count - 1);
  for (int64_t i = 0; i + 1 < count; ++i) {
    const TensorView step = arguments[1 + i].cast<TensorView>();
    if (step.device().device_type != kDLCPU || step.dtype().code != kDLFloat || step.dtype().bits != 32 || step.numel() != 1) return i;
  }
  for (int64_t i = 0; i + 1 < count; ++i) {
    float* step = data_of<float>(arguments[1 + i].cast<TensorView>());
    *step += 1.0f;
    out[i] = static_cast<int64_t>(*step);
  }
  return -1;
}

}  // namespace
}  // namespace cuda
}  // namespace blockfp

BLOCKFP_EXPORT_PACKED(addresses)
BLOCKFP_EXPORT_PACKED(count_steps)
