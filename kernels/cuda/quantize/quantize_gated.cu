// Launches of the quantizers of what an activation makes, for one element, BLOCKFP_ELEMENT: rounded to nearest, of whole vectors.
#include "row_launch.cuh"
#include "tile_launch.cuh"

namespace blockfp {
namespace cuda {
namespace {

template <class E, int Block, class T>
cudaError_t gated(const QuantizeArguments& a, cudaStream_t stream) {
  if (a.column.codes == nullptr) {
    const int64_t elements = a.x.rows * a.x.columns;
    const cudaError_t error = launch_row_kernel<E, Block, T, Rounding::kNearest, OfActivations>(a, elements, stream);
    return error == cudaSuccess ? launch_spoil(a, stream) : error;
  }
  return launch_tile_kernel<E, Block, T, Block == 0, Rounding::kNearest, OfActivations>(a, stream);
}

}  // namespace

template <>
cudaError_t launch_gated<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  return with_block<E>(a.format.block_columns, [&](auto block) {
    constexpr int kBlock = decltype(block)::value;
    if constexpr (kGatedBlock<E, kBlock>) {
      return a.x.dtype == Bf16::kId ? gated<E, kBlock, Bf16>(a, stream) : gated<E, kBlock, Fp16>(a, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace cuda
}  // namespace blockfp
