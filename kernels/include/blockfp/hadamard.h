// The random Hadamard transform of a group of 16 fp32 values: sign flips, a butterfly in fp32, times 1/4.
#pragma once

#include "lanes.h"

namespace blockfp {

constexpr int kHadamardGroup = 16;
constexpr uint32_t kHadamardFlips = 0xD7E8;      // bit i: element i changes sign
constexpr int32_t kHadamardSmallest = 27 << 23;  // 2^-100: smaller magnitudes count as zero, so no sum is subnormal

// F: float for one group, or vectors with a group per lane. The result isn't yet rounded to the input's dtype.
template <class F>
BLOCKFP_HD void hadamard16(F (&x)[kHadamardGroup]) {
  using I = Int<F>;
  BLOCKFP_UNROLL
  for (int i = 0; i < kHadamardGroup; ++i) {
    I bits = to_bits(x[i]);
    I sign = bits & ~kMagnitude;
    bits = (bits & kMagnitude) < kHadamardSmallest ? sign : bits;
    x[i] = from_bits<F>(((kHadamardFlips >> i) & 1) ? bits ^ ~kMagnitude : bits);
  }
  BLOCKFP_UNROLL
  for (int h = 1; h < kHadamardGroup; h *= 2) {
    BLOCKFP_UNROLL
    for (int i = 0; i < kHadamardGroup; ++i) {
      if (i & h) continue;
      F a = x[i], b = x[i + h];
      x[i] = add(a, b);
      x[i + h] = add(a, -b);
    }
  }
  BLOCKFP_UNROLL
  for (int i = 0; i < kHadamardGroup; ++i) x[i] = multiply(x[i], splat<F>(0.25f));
}

}  // namespace blockfp
