// Launches the quantizers of a source's output (sources.cuh) for one element: rounded to nearest, whole vectors.
#pragma once

#include "row_launch.cuh"
#include "tile_launch.cuh"

namespace blockfp {
namespace cuda {

template <class E, int Block, class T, class Source>
cudaError_t launch_made_of(const QuantizeArguments& a, cudaStream_t stream) {
  if (a.column.codes == nullptr) {
    if constexpr (std::is_same_v<Source, OfGradients>) {
      // Rows alone are for layers whose weight is frozen.
      return cudaErrorInvalidValue;
    } else {
      const int64_t elements = a.x.rows * a.x.columns;
      const cudaError_t error = launch_row_kernel<E, Block, T, Rounding::kNearest, Source>(a, elements, stream);
      return error == cudaSuccess ? launch_spoil(a, stream) : error;
    }
  }
  return launch_tile_kernel<E, Block, T, Block == 0, Rounding::kNearest, Source>(a, stream);
}

template <class E, class Source>
cudaError_t launch_made(const QuantizeArguments& a, cudaStream_t stream) {
  return with_block<E>(a.format.block_columns, [&](auto block) {
    constexpr int kBlock = decltype(block)::value;
    if constexpr (std::is_same_v<Source, OfGradients> ? kMadeGradient<E, kBlock> : kMadeBlock<E, kBlock>) {
      return a.x.dtype == Bf16::kId ? launch_made_of<E, kBlock, Bf16, Source>(a, stream) : launch_made_of<E, kBlock, Fp16, Source>(a, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace cuda
}  // namespace blockfp
