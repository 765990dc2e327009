// Launches the quantizers of an activation's output and of its gradients for one element, BLOCKFP_ELEMENT.
#include "made_launch.cuh"

namespace blockfp {
namespace cuda {

template <>
cudaError_t launch_gated<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  return launch_made<BLOCKFP_ELEMENT, OfActivations>(a, stream);
}

template <>
cudaError_t launch_gradient<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  return launch_made<BLOCKFP_ELEMENT, OfGradients>(a, stream);
}

}  // namespace cuda
}  // namespace blockfp
