// The high-precision dtypes: conversion of their patterns to fp32 bits, and of fp32 to them, rounded once.
#pragma once

#include "lanes.h"

namespace blockfp {

struct Fp32 {
  using Raw = uint32_t;
  static constexpr int kId = 0;
  static constexpr uint32_t kRawInfinity = 0x7F800000;
  static constexpr uint32_t kRawMagnitude = 0x7FFFFFFF;
};

struct Fp16 {
  using Raw = uint16_t;
  static constexpr int kId = 1;
  static constexpr uint32_t kRawInfinity = 0x7C00;
  static constexpr uint32_t kRawMagnitude = 0x7FFF;
};

struct Bf16 {
  using Raw = uint16_t;
  static constexpr int kId = 2;
  static constexpr uint32_t kRawInfinity = 0x7F80;
  static constexpr uint32_t kRawMagnitude = 0x7FFF;
};

// Bytes of an element of the dtype with this kId.
BLOCKFP_HD constexpr int dtype_bytes(int dtype) { return dtype == Fp32::kId ? 4 : 2; }

// Replaces every NaN by the one that dequantized arrays contain.
template <class F>
BLOCKFP_HD Int<F> canonical(Int<F> bits) {
  return (bits & kMagnitude) > kInfinity ? splat<Int<F>>(kNan) : bits;
}

// fp32 bits of patterns of T, one in the low bits of each lane; exact. (GPUs and F16C have instructions for Fp16.)
template <class T, class F>
BLOCKFP_HD Int<F> widen(Int<F> raw) {
  using I = Int<F>;
  if constexpr (T::kId == Fp32::kId) {
    return raw;
  } else if constexpr (T::kId == Bf16::kId) {
    return raw << 16;
  } else {
    I magnitude = raw & 0x7FFF;
    I subnormal = to_bits(multiply(to_float<F>(magnitude), from_bits<F>(splat<I>((127 - 24) << 23))));
    I normal = (magnitude << 13) + (112 << 23);
    I wide = magnitude < 0x400 ? subnormal : (magnitude >= 0x7C00 ? normal + (112 << 23) : normal);
    return wide | ((raw & 0x8000) << 16);
  }
}

// Pattern of T nearest to canonical fp32 bits, ties to even; beyond the largest finite value it is Inf.
template <class T, class F>
BLOCKFP_HD Int<F> narrow(Int<F> bits) {
  using I = Int<F>;
  if constexpr (T::kId == Fp32::kId) {
    return bits;
  } else if constexpr (T::kId == Bf16::kId) {
    return shift_right<F>(bits + 0x7FFF + (shift_right<F>(bits, 16) & 1), 16);
  } else {
    // As in encode_nearest, fp32's rounding of a sum is fp16's rounding. 65536 stands for all values that round to Inf.
    I magnitude = bits & kMagnitude;
    I a = smaller<I>(magnitude, splat<I>(0x47800000));
    I field = larger<I>(a & kInfinity, splat<I>((127 - 14) << 23));
    I offset = field + (13 << 23);
    I quotient = to_bits(add(from_bits<F>(a), from_bits<F>(offset))) - offset;
    I half = smaller<I>(quotient + shift_right<F>(field - ((127 - 14) << 23), 13), splat<I>(0x7C00));
    half = magnitude > kInfinity ? splat<I>(0x7E00) : half;
    return half | (shift_right<F>(bits, 16) & 0x8000);
  }
}

}  // namespace blockfp
