// The element formats: rounding numbers to codes, and values of codes.
//
// A format's struct states its contract: bits of a code, exponent and mantissa bits, exponent bias, the magnitude code and fp32
// bits of the largest finite value, and the code written for NaN. If that code isn't a NaN, the caller marks the block's scale.
// INT8 is two's complement with value code / 64; its magnitude code is that of a float with one exponent bit.
#pragma once

#include "lanes.h"

namespace blockfp {

template <int Id, int Bits, int ExponentBits, int MantissaBits, int Bias, int Emax, int MaxCode, int NanCode, bool HasNan,
          bool Complement = false>
struct Element {
  static constexpr int kId = Id;
  static constexpr int kBits = Bits;
  static constexpr int kExponentBits = ExponentBits;
  static constexpr int kMantissaBits = MantissaBits;
  static constexpr int kBias = Bias;
  static constexpr int kEmin = 1 - Bias;
  static constexpr int kEmax = Emax;
  static constexpr int kMaxCode = MaxCode;
  static constexpr int kNanCode = NanCode;
  static constexpr bool kHasNan = HasNan;
  static constexpr bool kComplement = Complement;
  // Largest finite value as fp32 bits. INT8's exponent field may be 0, with the spacing of the binade above.
  static constexpr int32_t kMaxBits = (MaxCode << (23 - MantissaBits)) + ((127 - Bias) << 23);
  // The same as a number, so that its reciprocal is a constant too; exact.
  static constexpr float kMax = static_cast<float>((1 << MantissaBits) + (MaxCode & ((1 << MantissaBits) - 1))) /
                                (1 << MantissaBits) * (1 << ((MaxCode >> MantissaBits) - Bias));
};

using E4M3 = Element<0, 8, 4, 3, 7, 8, 0x7E, 0x7F, true>;
using E5M2 = Element<1, 8, 5, 2, 15, 15, 0x7B, 0x7F, true>;
using E3M2 = Element<2, 6, 3, 2, 3, 4, 31, 31, false>;
using E2M3 = Element<3, 6, 2, 3, 1, 2, 31, 31, false>;
using E2M1 = Element<4, 4, 2, 1, 1, 2, 7, 7, false>;
using Int8 = Element<5, 8, 1, 6, 1, 0, 127, 127, false, true>;

// Largest finite value and its reciprocal, each rounded to fp32.
template <class E>
BLOCKFP_HD float element_max() {
  return bit_cast<float>(E::kMaxBits);
}

template <class E>
BLOCKFP_HD float element_max_reciprocal() {
  constexpr float kReciprocal = 1.0f / E::kMax;
  return kReciprocal;
}

namespace detail {

// Exponent field of the element's spacing at magnitude bits `a`; subnormals have the smallest normal's.
template <class E, class F>
BLOCKFP_HD Int<F> spacing_field(Int<F> a) {
  return larger<Int<F>>(a & kInfinity, splat<Int<F>>((127 + E::kEmin) << 23));
}

// Adds the sign and NaN of `bits` to a magnitude code, whose low byte counts.
template <class E, class F>
BLOCKFP_HD Int<F> finish_code(Int<F> magnitude, Int<F> bits) {
  using I = Int<F>;
  I code;
  if constexpr (E::kComplement) {
    I sign = bits >> 31;
    code = (magnitude ^ sign) - sign;
  } else {
    code = magnitude | (shift_right<F>(bits, 32 - E::kBits) & (1 << (E::kBits - 1)));
  }
  return (bits & kMagnitude) > kInfinity ? splat<I>(E::kNanCode) : code;
}

}  // namespace detail

// Magnitude code of non-negative fp32 bits, not NaN, rounded to nearest, ties to even, saturating. THE CODE IS THE LOW BYTE,
// here and below; the bits above it are arbitrary.
//
// Adding 2^23 times the spacing makes fp32's rounding that of the element: the sum's low bits are |y| / spacing, rounded. The
// code is that number plus (exponent field - smallest field) << mantissa bits. The smallest field's part is an even number of
// spacings, so it can be part of the addend without changing how ties round; the sum's own exponent is above the low byte.
template <class E, class F>
BLOCKFP_HD Int<F> magnitude_nearest(Int<F> bits) {
  using I = Int<F>;
  constexpr int kDropped = 23 - E::kMantissaBits;
  constexpr int32_t kSmallest = -((127 + E::kEmin) << E::kMantissaBits) & 0xFF;
  static_assert(kSmallest % 2 == 0, "ties must fall as they would without it");
  I a = smaller<I>(bits, splat<I>(E::kMaxBits));
  I field = detail::spacing_field<E, F>(a);
  I sum = to_bits(add(from_bits<F>(a), from_bits<F>(field + ((kDropped << 23) + kSmallest))));
  return sum + shift_right<F>(field, kDropped);
}

// Code of y rounded to nearest.
template <class E, class F>
BLOCKFP_HD Int<F> encode_nearest(F y) {
  Int<F> bits = to_bits(y);
  return detail::finish_code<E, F>(magnitude_nearest<E, F>(bits & kMagnitude), bits);
}

// Code of y rounded to floor(|y| / spacing + (2 u + 1) / 2^(RandomBits + 1)) spacings, saturating, for RandomBits random bits
// u: 8, or 16 for weights and moments.
//
// The half step leaves exact values unchanged, so RandomBits + 1 bits of the quotient's fraction decide; the quotient is exact
// and truncated there.
template <class E, class F, int RandomBits = 8>
BLOCKFP_HD Int<F> encode_stochastic(F y, Int<F> u) {
  using I = Int<F>;
  constexpr int kPlaces = RandomBits + 1;
  static_assert(E::kMantissaBits + 1 + kPlaces <= 24, "the quotient is an integer that fp32 has");
  constexpr int kDropped = 23 - E::kMantissaBits;
  I bits = to_bits(y);
  I a = smaller<I>(bits & kMagnitude, splat<I>(E::kMaxBits));
  I field = detail::spacing_field<E, F>(a);
  I inverse = (splat<I>(254 << 23) - field) + ((E::kMantissaBits + kPlaces) << 23);
  I quotient = truncate(multiply(from_bits<F>(a), from_bits<F>(inverse)));
  quotient = (quotient + 2 * u + 1) >> kPlaces;
  I magnitude = quotient + shift_right<F>(field - ((127 + E::kEmin) << 23), kDropped);
  return detail::finish_code<E, F>(smaller<I>(magnitude, splat<I>(E::kMaxCode)), bits);
}

// Value of a code (one per lane, upper bits zero). NaN may have either sign; apply `canonical` last.
template <class E, class F>
BLOCKFP_HD F decode(Int<F> code) {
  using I = Int<F>;
  if constexpr (E::kComplement) {
    return multiply(to_float<F>((code ^ 0x80) - 0x80), splat<F>(1.0f / 64));
  } else {
    constexpr int32_t kSmallest = (127 + E::kEmin - E::kMantissaBits) << 23;  // spacing of the subnormals
    I magnitude = code & ((1 << (E::kBits - 1)) - 1);
    I subnormal = to_bits(multiply(to_float<F>(magnitude), from_bits<F>(splat<I>(kSmallest))));
    I normal = (magnitude << (23 - E::kMantissaBits)) + ((127 - E::kBias) << 23);
    I bits = magnitude < (1 << E::kMantissaBits) ? subnormal : normal;
    if constexpr (E::kId == E5M2::kId) {
      bits = magnitude >= 0x7C ? (magnitude == 0x7C ? splat<I>(kInfinity) : splat<I>(kNan)) : bits;
    } else if constexpr (E::kHasNan) {
      bits = magnitude == E::kNanCode ? splat<I>(kNan) : bits;
    }
    I sign = (code >> (E::kBits - 1)) << 31;
    return from_bits<F>(bits | sign);
  }
}

}  // namespace blockfp
