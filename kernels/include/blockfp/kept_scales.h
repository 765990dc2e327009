// Scales of weights without a master after a step: the previous scales times a power of two. The definition is
// blockfp/definition/kept_scales.py, with the same names. Computed once per block, so on numbers instead of lanes.
#pragma once

#include "scales.h"

namespace blockfp {

// digits / 2^23 * 2^exponent; bit 23 is the leading one.
struct SplitNumber {
  int32_t digits, exponent;
};

// Splits positive finite fp32 bits.
BLOCKFP_HD SplitNumber split_number(int32_t bits) {
  const int32_t field = bits >> 23, fraction = bits & 0x7FFFFF;
  if (field != 0) return {fraction | 0x800000, field - 127};
  const int32_t normalized = to_bits(static_cast<float>(fraction));
  return {(normalized & 0x7FFFFF) | 0x800000, (normalized >> 23) - (127 + 149)};
}

// The fp32 product with an unbounded exponent.
BLOCKFP_HD SplitNumber times(SplitNumber a, float b) {
  const SplitNumber other = split_number(to_bits(b));
  constexpr int32_t kOneToTwo = kOne - 0x800000;
  const int32_t bits = to_bits(multiply(from_bits<float>(a.digits + kOneToTwo), from_bits<float>(other.digits + kOneToTwo)));
  return {(bits & 0x7FFFFF) | 0x800000, a.exponent + other.exponent + (bits >> 23) - 127};
}

BLOCKFP_HD int32_t usable_scale(int32_t bits) { return bits > 0 && bits < kInfinity ? bits : kOne; }

// The power of two that brings `top` to at least amax and below 4 amax.
BLOCKFP_HD int32_t kept_shift(SplitNumber top, int32_t amax) {
  if (amax == 0 || amax == kInfinity) return 0;
  const SplitNumber a = split_number(amax);
  const int32_t needed = a.exponent - top.exponent + (a.digits > top.digits ? 1 : 0);
  return needed < 0 ? smaller(needed + 1, 0) : needed;
}

// fp32 bits of an fp32 scale. `under`: with two levels, the block scale that amax may need.
template <class E>
BLOCKFP_HD int32_t kept_fp32_scale(int32_t stored, int32_t amax, float under = 1.0f) {
  stored = usable_scale(stored);
  const SplitNumber scale = split_number(stored);
  int32_t exponent = scale.exponent + kept_shift(times(times(scale, under), element_max<E>()), amax);
  if (exponent < scale.exponent) exponent = scale.exponent < -126 ? scale.exponent : larger(exponent, -126);
  if (exponent == scale.exponent) return stored;
  return ((larger(exponent, -126) + 127) << 23) | (scale.digits & 0x7FFFFF);
}

// A block's E8M0 byte.
template <class E>
BLOCKFP_HD int32_t kept_e8m0_scale(int32_t stored, int32_t amax) {
  if (stored == 0xFF) stored = 127;
  SplitNumber top = split_number(E::kMaxBits);
  top.exponent += stored - 127;
  return smaller(larger(stored + kept_shift(top, amax), 0), 254);
}

// Two levels: the tensor scale before and after as fp32 bits, and the power of two between them.
struct KeptTensorScale {
  int32_t before, after, moved;
};

template <class E>
BLOCKFP_HD KeptTensorScale kept_tensor_scale(int32_t stored, int32_t amax) {
  const int32_t before = usable_scale(stored), after = kept_fp32_scale<E>(before, amax, 240.0f);
  return {before, after, split_number(after).exponent - split_number(before).exponent};
}

// floor(log2) of integers from 1 to 2^24.
BLOCKFP_HD int32_t exponent_of(int32_t integer) { return (to_bits(static_cast<float>(integer)) >> 23) - 127; }

// A block's E4M3 byte. Scales are handled as integers times 2^-9.
template <class E>
BLOCKFP_HD int32_t kept_e4m3_scale(int32_t stored, int32_t amax, const KeptTensorScale& tensor) {
  if (stored == 0 && amax == 0) return 0;
  if (stored <= 0 || stored >= E4M3::kNanCode) stored = 7 << 3;  // 1
  const SplitNumber decode = times(split_number(tensor.before), decode_scale<ScaleRule::kE4m3, float>(stored, 1.0f));
  const int32_t shift = kept_shift(times(decode, element_max<E>()), amax) - tensor.moved;
  int32_t digits = stored < 8 ? stored : (8 + (stored & 7)) << ((stored >> 3) - 1);
  constexpr int32_t kHighest = 17, kMost = 448 * 512;  // exponent of E4M3's largest number, and that number
  if (shift > 0) {
    digits = smaller(digits << smaller(shift, kHighest + 1 - exponent_of(digits)), kMost);
  } else {
    digits >>= smaller(-shift, exponent_of(digits & -digits));
  }
  const int32_t exponent = exponent_of(digits);
  return digits < 8 ? digits : ((exponent - 2) << 3) | ((digits >> (exponent - 3)) & 7);
}

}  // namespace blockfp
