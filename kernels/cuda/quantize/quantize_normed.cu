// Launches of the quantizers of what a norm makes, for one element, BLOCKFP_ELEMENT.
#include "made_launch.cuh"

namespace blockfp {
namespace cuda {

template <>
cudaError_t launch_normed<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  return launch_made<BLOCKFP_ELEMENT, OfNorm>(a, stream);
}

}  // namespace cuda
}  // namespace blockfp
