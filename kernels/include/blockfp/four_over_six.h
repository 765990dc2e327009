// 4-over-6, NVFP4's choice between two scales of a block: one maps the block's amax to 6, the other to 4, and the one with the
// smaller element errors is used. blockfp/definition/four_over_six.py has the formula and the order of the sums.
#pragma once

#include "scales.h"

namespace blockfp {

// Whether errors are squared before they are summed.
BLOCKFP_HD constexpr bool squares_errors(ScaleRule rule) { return rule >= ScaleRule::kFourOverSixMse; }

// Maximum rows and columns of a block.
constexpr int kFourOverSixSide = 16;

// A candidate scale: its stored E4M3 byte, its value, and the multiplier of elements.
template <class F>
struct TriedScale {
  Int<F> stored;
  F value, multiplier;
};

// The scale that maps a block's amax (fp32 bits) to 6 or 4.
template <class E, class F>
BLOCKFP_HD TriedScale<F> four_over_six_scale(Int<F> amax, bool for_4, float tensor_multiplier, float tensor_scale) {
  using I = Int<F>;
  const F base = multiply(divide(from_bits<F>(amax), splat<F>(element_max<E>())), splat<F>(tensor_multiplier));
  const I stored = encode_nearest<E4M3, F>(for_4 ? multiply(base, splat<F>(1.5f)) : base) & 0xFF;
  const F value = decode<E4M3, F>(stored);
  const I inverse = to_bits(divide(splat<F>(1.0f), multiply(value, splat<F>(tensor_scale))));
  return {stored, value, from_bits<F>(smaller<I>(inverse, splat<I>(kFp32Max)))};
}

// The value of a magnitude's code under a candidate scale, for measuring errors: code * scale * tensor amax / (bound * MAX).
template <class E, class F>
BLOCKFP_HD F four_over_six_value(Int<F> code, F scale, float tensor_amax, ScaleRule rule) {
  const F product = multiply(multiply(decode<E, F>(code), scale), splat<F>(tensor_amax));
  return divide(product, splat<F>(two_level_largest<E>(rule)));
}

// The code of a magnitude under a candidate scale's multiplier; arbitrary for NaN.
template <class E, class F>
BLOCKFP_HD Int<F> four_over_six_code(F magnitude, F multiplier) {
  return magnitude_nearest<E, F>(to_bits(multiply(magnitude, multiplier))) & E::kMaxCode;
}

// |value - x|, or its square, for an element's magnitude.
template <class F>
BLOCKFP_HD F four_over_six_error(F value, F magnitude, ScaleRule rule) {
  const F error = add(value, from_bits<F>(to_bits(magnitude) ^ INT32_MIN));
  return squares_errors(rule) ? multiply(error, error) : from_bits<F>(to_bits(error) & kMagnitude);
}

// Sums a block's error over its 16 rows' errors, which are overwritten.
BLOCKFP_HD float four_over_six_sum(float* rows) {
  for (int half = kFourOverSixSide / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) rows[i] = add(rows[i], rows[i + half]);
  }
  return rows[0];
}

}  // namespace blockfp
