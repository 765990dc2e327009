// Computes a block's stored scale and its elements' multiplier from the largest magnitude (fp32 bits, ignoring NaN), and the
// value of a stored scale. One function per scale rule.
#pragma once

#include "elements.h"

namespace blockfp {

enum class ScaleRule : int {
  kFp32 = 0,
  kPow2 = 1,
  kE8m0Ceil = 2,
  kE8m0Floor = 3,
  kE4m3 = 4,
  kE4m3Guarded = 5,
  kFourOverSix = 6,  // four_over_six.h
  kFourOverSix448 = 7,
  kFourOverSixMse = 8,
  kFourOverSix448Mse = 9,
};

// Number of columns of a whole-row block; the row may have fewer. WHOLE_ROW of `blockfp.formats`.
constexpr int kWholeRow = 1 << 30;

// A format as small integers. New formats from existing parts only need an entry in `blockfp.formats`.
struct Format {
  int element;                    // kId of elements.h
  int block_rows, block_columns;  // 0, 0: one scale for the whole tensor
  ScaleRule rule;

  BLOCKFP_HD bool per_tensor() const { return block_rows == 0; }
  BLOCKFP_HD bool per_row() const { return block_columns == kWholeRow; }
  BLOCKFP_HD bool square() const { return block_rows == block_columns; }
  BLOCKFP_HD bool two_levels() const { return rule >= ScaleRule::kE4m3; }  // block scales are relative to the tensor scale
  BLOCKFP_HD bool four_over_six() const { return rule >= ScaleRule::kFourOverSix; }  // elements choose their block's scale
  BLOCKFP_HD int scale_bits() const { return rule <= ScaleRule::kPow2 ? 32 : 8; }
};

template <ScaleRule R>
constexpr bool kFp32Scale = R == ScaleRule::kFp32 || R == ScaleRule::kPow2;
template <ScaleRule R>
constexpr bool kE8m0Scale = R == ScaleRule::kE8m0Ceil || R == ScaleRule::kE8m0Floor;
// The NaN byte of scales that are bytes.
template <ScaleRule R>
constexpr int kNanScale = kE8m0Scale<R> ? 0xFF : 0x7F;

// A block's scale: `stored` is the byte or fp32 bits stored with the codes.
template <class F>
struct BlockScale {
  Int<F> stored;
  F multiplier;
};

// FP8 per tensor and in blocks: MAX / amax; 1 for an amax of 0 or Inf, `largest` (fp32 bits) if the quotient overflows.
template <class E, ScaleRule R, class F>
BLOCKFP_HD BlockScale<F> fp8_scale(Int<F> amax, int32_t eps_bits, int32_t largest) {
  using I = Int<F>;
  amax = larger<I>(amax, splat<I>(eps_bits));
  I zero = splat<I>(0);
  I special = amax == kInfinity ? zero : amax;
  I safe = special == 0 ? splat<I>(kOne) : amax;
  I bits = to_bits(divide(splat<F>(element_max<E>()), from_bits<F>(safe)));
  bits = bits == kInfinity ? splat<I>(largest) : bits;
  if constexpr (R == ScaleRule::kPow2) bits = bits & kInfinity;
  bits = special == 0 ? splat<I>(kOne) : bits;
  F multiplier = from_bits<F>(bits);
  return {to_bits(divide(splat<F>(1.0f), multiplier)), multiplier};
}

// MX: an E8M0 byte; the decode scale is 2^(byte - 127), and multiplying by its inverse is exact.
template <class E, ScaleRule R, class F>
BLOCKFP_HD BlockScale<F> e8m0_scale(Int<F> amax) {
  using I = Int<F>;
  I byte;
  if constexpr (R == ScaleRule::kE8m0Floor) {
    byte = larger<I>((amax >> 23) - E::kEmax, splat<I>(0));
  } else {
    I v = to_bits(multiply(from_bits<F>(amax), splat<F>(element_max_reciprocal<E>())));
    I subnormal = v > 0x400000 ? splat<I>(1) : splat<I>(0);
    I normal = (v + 0x7FFFFF) >> 23;
    byte = v < 0x800000 ? subnormal : normal;
  }
  byte = smaller<I>(byte, splat<I>(254));
  byte = amax == kInfinity ? splat<I>(254) : byte;
  I inverse = byte == 254 ? splat<I>(0x400000) : (254 - byte) << 23;
  return {byte, from_bits<F>(inverse)};
}

// Guarded scales map a block's amax to this, so that rounding the block's scale never takes it beyond MAX.
template <class E>
constexpr double kGuardedMax = E::kMax * 16.0 / 17.0;

// Two levels: a tensor's amax is mapped to this, the rule's largest block scale times the target of a block's amax.
template <class E>
BLOCKFP_HD float two_level_largest(ScaleRule rule) {
  constexpr float kGuarded = static_cast<float>(448.0 * kGuardedMax<E>);
  if (rule == ScaleRule::kE4m3Guarded) return kGuarded;
  return (rule == ScaleRule::kFourOverSix || rule == ScaleRule::kFourOverSixMse ? 256.0f : 448.0f) * E::kMax;
}

// Reciprocal of the target of a block's amax.
template <class E>
BLOCKFP_HD float block_factor(ScaleRule rule) {
  constexpr float kGuarded = static_cast<float>(1.0 / kGuardedMax<E>);
  return rule == ScaleRule::kE4m3Guarded ? kGuarded : element_max_reciprocal<E>();
}

// NVFP4's tensor multiplier; `tensor_scale` is its reciprocal.
template <class E>
BLOCKFP_HD float tensor_multiplier(int32_t amax, ScaleRule rule) {
  if (amax == 0 || amax == kInfinity) return 1.0f;
  int32_t bits = to_bits(divide(two_level_largest<E>(rule), from_bits<float>(amax)));
  return from_bits<float>(smaller(bits, kFp32Max));
}

// NVFP4's block scale: an E4M3 byte, relative to the tensor scale. Encoding uses the decoded stored scale.
template <class E, class F>
BLOCKFP_HD BlockScale<F> e4m3_scale(Int<F> amax, float tensor_multiplier, float tensor_scale, ScaleRule rule) {
  using I = Int<F>;
  float factor = multiply(tensor_multiplier, block_factor<E>(rule));
  I stored = encode_nearest<E4M3, F>(multiply(from_bits<F>(amax), splat<F>(factor))) & 0xFF;
  F decode_scale = multiply(decode<E4M3, F>(stored), splat<F>(tensor_scale));
  I inverse = to_bits(divide(splat<F>(1.0f), decode_scale));
  return {stored, from_bits<F>(smaller<I>(inverse, splat<I>(kFp32Max)))};
}

// Delayed scaling's next scale: `target` (MAX * 2^-margin) over the previous steps' amax; the old scale if that amax isn't
// above 0.
template <class F>
BLOCKFP_HD F delayed_scale(Int<F> amax, F target, F scale) {
  using I = Int<F>;
  I divisor = amax > 0 ? smaller<I>(amax, splat<I>(kInfinity)) : splat<I>(kOne);
  I quotient = smaller<I>(to_bits(divide(target, from_bits<F>(divisor))), splat<I>(kFp32Max));
  return from_bits<F>(amax > 0 ? quotient : to_bits(scale));
}

// Value of a stored scale: fp32 bits, an E8M0 byte, or an E4M3 byte times the tensor scale.
template <ScaleRule R, class F>
BLOCKFP_HD F decode_scale(Int<F> stored, float tensor_scale) {
  using I = Int<F>;
  if constexpr (kFp32Scale<R>) {
    return from_bits<F>(stored);
  } else if constexpr (kE8m0Scale<R>) {
    I bits = stored == 0 ? splat<I>(0x400000) : stored << 23;
    return from_bits<F>(stored == 0xFF ? splat<I>(kNan) : bits);
  } else {
    return multiply(decode<E4M3, F>(stored), splat<F>(tensor_scale));
  }
}

// Multiplier of elements under a stored scale (an E8M0 or E4M3 byte, or fp32 bits). NaN counts as the largest scale.
BLOCKFP_HD float stored_multiplier(ScaleRule rule, int32_t stored, float tensor_scale) {
  if (rule == ScaleRule::kE8m0Ceil || rule == ScaleRule::kE8m0Floor) {
    return from_bits<float>(stored >= 254 ? 0x400000 : (254 - stored) << 23);
  }
  const float scale = rule >= ScaleRule::kE4m3 ? decode_scale<ScaleRule::kE4m3, float>(stored, tensor_scale) : from_bits<float>(stored);
  const int32_t magnitude = to_bits(scale) & kMagnitude;
  const float safe = from_bits<float>(magnitude >= kInfinity ? kFp32Max : magnitude);
  return from_bits<float>(smaller(to_bits(divide(1.0f, safe)), kFp32Max));
}

}  // namespace blockfp
