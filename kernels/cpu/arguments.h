// What the exported functions check and read of their arguments, Apache TVM FFI's tensors and numbers.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include "calls.h"

namespace blockfp {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline void check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << what;
}

template <class T>
T* data_of(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

template <class T>
T* data_of(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? data_of<T>(tensor.value()) : nullptr;
}

inline int bytes_of(int64_t dtype) { return dtype == Fp32::kId ? 4 : 2; }

inline void check_output(const TensorView& tensor, int64_t count, int bytes, const char* what) {
  check(tensor.device().device_type == kDLCPU && tensor.IsContiguous() && tensor.numel() == count &&
            tensor.dtype().bits == 8 * bytes,
        what);
}

inline Spec spec_of(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  check(element >= 0 && element <= Int8::kId && rule >= 0 && rule <= static_cast<int>(ScaleRule::kE4m3),
        "the format has an element or a scale rule that this library does not know: rebuild it");
  check(block_columns == 0 || (block_columns >= 16 && block_columns <= 128 && (block_columns & (block_columns - 1)) == 0),
        "block columns must be 16, 32, 64 or 128");
  check(block_columns != 0 || (element <= E5M2::kId && rule <= static_cast<int>(ScaleRule::kPow2)),
        "one scale for the whole tensor is for FP8 alone");
  return {static_cast<int>(element), static_cast<int>(block_rows), static_cast<int>(block_columns),
          static_cast<ScaleRule>(rule)};
}

inline int64_t rows_in_all(const TensorView& x) {
  int64_t rows = 1;
  for (int axis = 0; axis < x.ndim() - 1; ++axis) rows *= x.size(axis);
  return rows;
}

inline int64_t scale_count(const Spec& spec, const Tiling& t) {
  return spec.per_tensor() ? 1 : t.batches * t.grid_rows * t.grid_columns;
}

}  // namespace blockfp
