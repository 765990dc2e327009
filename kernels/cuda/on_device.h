// Shared by the exported functions: a call's device and stream, and x as a stack of matrices.
#pragma once

#include <cuda.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "blockfp/exports.h"
#include "driver.h"
#include "launch.h"

namespace blockfp {
namespace cuda {

// An argument's device and the caller's current stream there, for the duration of a call.
class OnDevice {
 public:
  OnDevice(const TensorView& x, const char* name) : device(x.device()) {
    check(device.device_type == kDLCUDA, name, " must be on a CUDA device; it is ", describe(x));
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device.device_id;
    if (before_ != device.device_id) done(cudaSetDevice(device.device_id));
    stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device.device_id));
  }
  ~OnDevice() {
    // If the process doesn't use the previous device, setting it would create a context there, half a gigabyte; then the thread
    // stays on this one.
    if (before_ != device.device_id && has_context(before_)) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;

  void done(cudaError_t error) const {
    if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "CUDA on " << device << ": " << cudaGetErrorString(error);
  }

  DLDevice device;
  cudaStream_t stream;

 private:
  // Whether the process has a context on a device; true if the driver can't tell.
  static bool has_context(int ordinal) {
    static const auto state = driver_function<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
    unsigned flags = 0;
    int active = 0;
    return state == nullptr || state(ordinal, &flags, &active) != CUDA_SUCCESS || active != 0;
  }

  int before_ = 0;
};

inline bool same_device(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }

// How a call uses a format's scales: it computes them (kChosen: also by 4-over-6), or uses existing ones (or amaxes alone),
// whose bytes mean the same under every rule.
enum class Scales { kMade, kChosen, kThere };

// The format with these four numbers, if the library supports it; `any_row` also allows FP8 with a scale per row of any length.
inline Format checked_format(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule, Scales scales = Scales::kMade,
                             bool any_row = false) {
  Format f = format_of(element, block_rows, block_columns, rule);
  if (scales == Scales::kThere && f.two_levels()) f.rule = ScaleRule::kE4m3;
  check(!f.four_over_six() || scales == Scales::kChosen, "blocks choose between scales (4-over-6, scale rule ", rule,
        ") in `quantize` alone");
  const bool fp8 = element <= E5M2::kId && f.rule <= ScaleRule::kPow2;
  const bool mx = f.rule == ScaleRule::kE8m0Ceil || f.rule == ScaleRule::kE8m0Floor;
  const bool known = (fp8 && (block_columns == 0 || block_columns == 128 || (any_row && f.per_row()))) || (mx && block_columns == 32) ||
                     (element == E2M1::kId && f.two_levels() && block_columns == 16);
  check(known && (block_rows == block_columns || block_rows == 1),
        "this library has FP8 per tensor and in blocks of 128, MX in blocks of 32, and NVFP4 in blocks of 16; the format has element ",
        element, ", scale rule ", rule, " and blocks of ", block_rows, "x", block_columns);
  return f;
}

// Number of 1x128 scales, or of a scale per row, in the order of products (Output::ordered).
inline int64_t ordered_count(const Format& f, int64_t lines, int64_t length) {
  check(f.block_rows == 1 && (f.block_columns == 128 || f.per_row()),
        "scales of 1x128 and of rows alone have an order of products; the format has blocks of ", f.block_rows, "x", f.block_columns);
  return ceil_div(lines, 4) * 4 * ceil_div(length, f.block_columns);
}

// Leading axes must be evenly spaced.
inline Matrices matrices_of(const TensorView& x, const char* name) {
  check(x.ndim() >= 2, name, " must have two or more axes; it is ", describe(x));
  const int last = x.ndim() - 1;
  Matrices m{data_of<const void>(x), dtype_of(x, name), 1, x.size(last - 1), x.size(last), 0, x.stride(last - 1), x.stride(last)};
  for (int axis = last - 2; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (m.batches == 1) {
      m.batch_stride = x.stride(axis);
    } else {
      check(x.stride(axis) == m.batch_stride * m.batches || x.numel() == 0, "the leading axes of ", name,
            " must be evenly spaced, and axis ", axis, " has stride ", x.stride(axis), ": pass a contiguous one");
    }
    m.batches *= x.size(axis);
  }
  // Strides of axes of length 1 are arbitrary.
  if (m.columns == 1) m.column_stride = 1;
  if (m.rows == 1) m.row_stride = m.columns;
  return m;
}

}  // namespace cuda
}  // namespace blockfp

// Functions of any number of arrays, which the macros for typed functions can't define.
#define BLOCKFP_EXPORT_PACKED(name)                                                                                           \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {   \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                                \
    *reinterpret_cast<tvm::ffi::Any*>(result) = blockfp::cuda::name(reinterpret_cast<const tvm::ffi::AnyView*>(arguments), count); \
    TVM_FFI_SAFE_CALL_END();                                                                                                  \
  }
