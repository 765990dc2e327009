// Random bytes of eight neighbouring elements.
#pragma once

#include "blockfp/threefry.h"

namespace blockfp {
namespace cuda {

// Bytes of elements index .. index + 7 of the unsharded array, little-endian.
static __device__ __noinline__ uint2 random_eight(const uint32_t* key, uint64_t index) {
  const uint32_t k0 = __ldg(key), k1 = __ldg(key + 1);
  const uint64_t counter = index >> 3;
  const auto words = threefry2x32<uint32_t>(k0, k1, counter >> 32, static_cast<uint32_t>(counter));
  const int skip = index & 7;
  if (skip == 0) return {words.w0, words.w1};
  const auto next = threefry2x32<uint32_t>(k0, k1, (counter + 1) >> 32, static_cast<uint32_t>(counter + 1));
  const uint32_t word[4] = {words.w0, words.w1, next.w0, next.w1};
  const int bits = 8 * (skip & 3);
  const uint32_t a = skip < 4 ? word[0] : word[1], b = skip < 4 ? word[1] : word[2], c = skip < 4 ? word[2] : word[3];
  return {__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits)};
}

}  // namespace cuda
}  // namespace blockfp
