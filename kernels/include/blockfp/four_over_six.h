// NVFP4's choice between two scales of a block, 4-over-6: one maps the block's amax to 6, one to 4, and the one whose elements
// err less is taken. blockfp/definition/four_over_six.py has the formula and the order of the sums.
#pragma once

#include "scales.h"

namespace blockfp {

// The scale of a block with the tensor's amax, for 6.
BLOCKFP_HD constexpr float four_over_six_bound(ScaleRule rule) {
  return rule == ScaleRule::kFourOverSix448 || rule == ScaleRule::kFourOverSix448Mse ? 448.0f : 256.0f;
}

// Whether errors are squared before they are summed.
BLOCKFP_HD constexpr bool squares_errors(ScaleRule rule) { return rule >= ScaleRule::kFourOverSixMse; }

// A block's rows and columns at most.
constexpr int kFourOverSixSide = 16;

// A scale that is tried: the stored E4M3 byte, its value, and what elements are multiplied with.
struct TriedScale {
  int32_t stored;
  float value, multiplier;
};

// The scale that maps a block's amax (fp32 bits) to 6, or to 4.
template <class E>
BLOCKFP_HD TriedScale four_over_six_scale(int32_t amax, bool for_4, float tensor_multiplier, float tensor_scale) {
  const float base = multiply(divide(from_bits<float>(amax), element_max<E>()), tensor_multiplier);
  const int32_t stored = encode_nearest<E4M3, float>(for_4 ? multiply(base, 1.5f) : base) & 0xFF;
  const float value = decode<E4M3, float>(stored);
  const int32_t inverse = to_bits(divide(1.0f, multiply(value, tensor_scale)));
  return {stored, value, from_bits<float>(smaller(inverse, kFp32Max))};
}

// |code * scale * amax of the tensor / (bound * MAX) - x| of elements given by their magnitudes, or its square.
template <class E, class F>
BLOCKFP_HD F four_over_six_error(F magnitude, float value, float multiplier, float tensor_amax, ScaleRule rule) {
  const Int<F> code = encode_nearest<E, F>(multiply(magnitude, splat<F>(multiplier))) & ((1 << E::kBits) - 1);
  const F whole = splat<F>(four_over_six_bound(rule) * E::kMax);
  const F decoded = divide(multiply(multiply(decode<E, F>(code), splat<F>(value)), splat<F>(tensor_amax)), whole);
  const F error = add(decoded, from_bits<F>(to_bits(magnitude) ^ INT32_MIN));
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
