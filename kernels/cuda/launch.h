// Helpers of launches.
#pragma once

#include "arguments.h"

namespace blockfp {
namespace cuda {

constexpr int64_t kMostBlocks = 0x7FFFFFFF;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool aligned(const void* pointer, int bytes = 16) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline bool is_contiguous(const Matrices& x) {
  return x.column_stride == 1 && (x.row_stride == x.columns || x.rows == 1) &&
         (x.batches == 1 || x.batch_stride == x.rows * x.columns);
}

// Whether every eighth element of every row can be read as a 16-byte vector.
inline bool vectors_fit(const Matrices& x) {
  const int bytes = dtype_bytes(x.dtype);
  return aligned(x.data) && x.row_stride * bytes % 16 == 0 && (x.batches == 1 || x.batch_stride * bytes % 16 == 0);
}

}  // namespace cuda
}  // namespace blockfp
