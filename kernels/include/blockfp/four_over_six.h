// NVFP4's choice between two scales of a block, 4-over-6: one maps the block's amax to 6, one to 4, and the one whose elements
// err less is taken. blockfp/definition/four_over_six.py has the formula and the order of the sums.
#pragma once

#include "scales.h"

namespace blockfp {

// Whether errors are squared before they are summed.
BLOCKFP_HD constexpr bool squares_errors(ScaleRule rule) { return rule >= ScaleRule::kFourOverSixMse; }

// A block's rows and columns at most.
constexpr int kFourOverSixSide = 16;

// A scale that is tried: the stored E4M3 byte, its value, and what elements are multiplied with.
template <class F>
struct TriedScale {
  Int<F> stored;
  F value, multiplier;
};

// The scale that maps a block's amax (fp32 bits) to 6, or to 4.
template <class E, class F>
BLOCKFP_HD TriedScale<F> four_over_six_scale(Int<F> amax, bool for_4, float tensor_multiplier, float tensor_scale) {
  using I = Int<F>;
  const F base = multiply(divide(from_bits<F>(amax), splat<F>(element_max<E>())), splat<F>(tensor_multiplier));
  const I stored = encode_nearest<E4M3, F>(for_4 ? multiply(base, splat<F>(1.5f)) : base) & 0xFF;
  const F value = decode<E4M3, F>(stored);
  const I inverse = to_bits(divide(splat<F>(1.0f), multiply(value, splat<F>(tensor_scale))));
  return {stored, value, from_bits<F>(smaller<I>(inverse, splat<I>(kFp32Max)))};
}

// What a magnitude's code stands for under a tried scale, where errors are measured: code * scale * amax of the tensor / (bound * MAX).
template <class E, class F>
BLOCKFP_HD F four_over_six_value(Int<F> code, F scale, float tensor_amax, ScaleRule rule) {
  const F product = multiply(multiply(decode<E, F>(code), scale), splat<F>(tensor_amax));
  return divide(product, splat<F>(two_level_largest<E>(rule)));
}

// The code of a magnitude under a tried scale's multiplier; of a NaN any.
template <class E, class F>
BLOCKFP_HD Int<F> four_over_six_code(F magnitude, F multiplier) {
  return magnitude_nearest<E, F>(to_bits(multiply(magnitude, multiplier))) & E::kMaxCode;
}

// |value - x|, or its square, of an element given by its magnitude.
template <class F>
BLOCKFP_HD F four_over_six_error(F value, F magnitude, ScaleRule rule) {
  const F error = add(value, from_bits<F>(to_bits(magnitude) ^ INT32_MIN));
  return squares_errors(rule) ? multiply(error, error) : from_bits<F>(to_bits(error) & kMagnitude);
}

// Errors of a block from those of its 16 rows, which are overwritten.
BLOCKFP_HD float four_over_six_sum(float* rows) {
  for (int half = kFourOverSixSide / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) rows[i] = add(rows[i], rows[i + half]);
  }
  return rows[0];
}

}  // namespace blockfp
