// Launches quantize_rows_flat.
#pragma once

#include "launch.h"
#include "quantize_rows.cuh"

namespace blockfp {
namespace cuda {

template <class E, int Block, class T, Rounding R, class Source = AsItLies, bool Chooses = false>
cudaError_t launch_row_kernel(const QuantizeArguments& a, int64_t elements, cudaStream_t stream) {
  constexpr int kUnroll = kRowUnroll<E, T>;
  const int64_t pieces = elements / (8 * kRowGroups<E>);
  const int64_t blocks = ceil_div(pieces, kRowThreads * kUnroll);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  quantize_rows_flat<E, Block, T, R, kUnroll, Source, Chooses><<<blocks, kRowThreads, 0, stream>>>(a, pieces);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
