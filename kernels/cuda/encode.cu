// Launches of encode.cuh.
#include "encode.cuh"

#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {

cudaError_t launch_encode(const EncodeArguments& a, cudaStream_t stream) {
  const bool per_tensor = a.format.per_tensor();
  const bool empty = a.x.batches * a.x.rows * a.x.columns == 0;
  const int64_t grid_rows = per_tensor ? 1 : ceil_div(a.window.row_phase + a.x.rows, a.format.block_rows);
  const int64_t grid_columns = per_tensor ? 1 : ceil_div(a.window.column_phase + a.x.columns, a.format.block_columns);
  const int64_t blocks = per_tensor ? 1 : (empty ? 0 : a.x.batches * grid_rows * grid_columns);
  return with_element(a.format.element, [&](auto element) {
    using E = decltype(element);
    if (a.blocks != nullptr) {
      const int64_t launched = ceil_div(std::max(blocks, int64_t{1}), kEncodeThreads);
      if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
      encode_scales<E><<<launched, kEncodeThreads, 0, stream>>>(a, blocks);
    }
    if (empty) return cudaGetLastError();
    const int64_t groups = a.x.batches * a.x.rows * ceil_div(a.x.columns, Packing<E::kBits>::kGroup);
    const int64_t launched = ceil_div(groups, kEncodeThreads);
    if (launched > kMostBlocks) return cudaErrorInvalidConfiguration;
    with_dtype(a.x.dtype, [&](auto dtype) {
      encode<E, decltype(dtype)><<<launched, kEncodeThreads, 0, stream>>>(a, grid_rows, grid_columns);
      return 0;
    });
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace blockfp
