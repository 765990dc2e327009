// Argument checks and conversions shared by both libraries' exported functions, for Apache TVM FFI's tensors and numbers.
//
// Errors name the argument, the requirement and the actual value, and are raised before anything is written.
//
// Groups of rows (experts): `ends`, int32 [groups] on the device, ascends, and group g has rows ends[g - 1] up to ends[g]; rows
// past the last end belong to no group. Columnwise codes of groups are [columns, padded]: each group's columns begin at a
// multiple of 128, right after the previous group's, and are padded with zero codes. Scales of 1x128 are then [columns, padded
// / 128], for blocks that begin at each group's first row. `padded` is group_columns(rows, groups); columns past the last group
// aren't read.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <ostream>

#include "adamw.h"
#include "dispatch.h"
#include "groups.h"
#include "scales.h"

namespace blockfp {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using MaybeTensor = Optional<TensorView>;

template <class T>
T* data_of(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

// Whether an argument is present: not None, and not empty.
inline bool has(const MaybeTensor& tensor) { return tensor.has_value() && tensor.value().numel() > 0; }

template <class T>
T* data_of(const MaybeTensor& tensor) {
  return has(tensor) ? data_of<T>(tensor.value()) : nullptr;
}

// Prints a device as frameworks do: "cpu" or "cuda:1".
inline std::ostream& operator<<(std::ostream& out, DLDevice device) {
  if (device.device_type == kDLCPU) return out << "cpu";
  if (device.device_type != kDLCUDA) return out << "a device of DLPack's type " << static_cast<int>(device.device_type);
  return out << "cuda:" << device.device_id;
}

// An array to print, such as "uint8 [64, 32] on cuda:1"; formatted only when printed.
struct Described {
  const TensorView& x;
};

inline Described describe(const TensorView& x) { return {x}; }

inline std::ostream& operator<<(std::ostream& out, Described array) {
  const TensorView& x = array.x;
  out << tvm::ffi::DLDataTypeToString(x.dtype()) << " [";
  for (int axis = 0; axis < x.ndim(); ++axis) out << (axis > 0 ? ", " : "") << x.size(axis);
  return out << "] on " << x.device() << (x.IsContiguous() ? "" : ", not contiguous");
}

// Raises ValueError with the concatenated message unless `ok`.
template <class... Parts>
void check(bool ok, const Parts&... message) {
  if (!ok) (TVM_FFI_THROW(ValueError) << ... << message);
}

// Raises ValueError unless an argument is on the call's device. (A CPU has no number.)
inline void check_device(const TensorView& x, const char* name, DLDevice device) {
  const DLDevice own = x.device();
  if (own.device_type == device.device_type && (own.device_type == kDLCPU || own.device_id == device.device_id)) return;
  TVM_FFI_THROW(ValueError) << name << " is on " << own << ", and the call runs on " << device
                            << ": all arrays of a call must be on one device, move it there";
}

// Raises ValueError unless an argument is contiguous, on the device, and has `count` entries of `bits` bits; `what` describes
// them.
inline void check_array(const TensorView& x, const char* name, DLDevice device, int64_t count, int bits, const char* what) {
  check_device(x, name, device);
  if (x.IsContiguous() && x.numel() == count && x.dtype().bits == bits) return;
  TVM_FFI_THROW(ValueError) << name << " must be " << what << ": contiguous, " << count << " entries of " << bits << " bits; it is "
                            << describe(x);
}

inline void check_array(const MaybeTensor& x, const char* name, DLDevice device, int64_t count, int bits, const char* what) {
  if (has(x)) check_array(x.value(), name, device, count, bits, what);
}

// kId of dtypes.h.
inline int dtype_of(const TensorView& x, const char* name) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Bf16::kId;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Fp16::kId;
  if (dtype.code != kDLFloat || dtype.bits != 32) {
    TVM_FFI_THROW(ValueError) << name << " must be float32, float16 or bfloat16; it is " << describe(x);
  }
  return Fp32::kId;
}

// The format with these four numbers. Each library checks the block shape itself.
inline Format format_of(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  check(element >= 0 && element <= Int8::kId && rule >= 0 && rule <= static_cast<int>(ScaleRule::kFourOverSix448Mse),
        "the format has element ", element, " and scale rule ", rule, ", which this library does not know: rebuild it");
  return {static_cast<int>(element), static_cast<int>(block_rows), static_cast<int>(block_columns), static_cast<ScaleRule>(rule)};
}

// The rows of the `adamw` table.
inline const StepEntry* step_entries(const TensorView& table) {
  constexpr int64_t kWords = sizeof(StepEntry) / 8;
  check_device(table, "table", {kDLCPU, 0});
  if (!table.IsContiguous() || table.ndim() != 2 || table.dtype().bits != 64 || table.size(1) != kWords) {
    TVM_FFI_THROW(ValueError) << "table must have this library's rows, " << kWords << " words of 64 bits; it is " << describe(table)
                              << ": rebuild the library";
  }
  return data_of<const StepEntry>(table);
}

}  // namespace blockfp
