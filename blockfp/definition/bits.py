"""Integer arithmetic on floating-point numbers: bit casts, products, quotients and rounding, exact on every library.

This module only uses int32 arithmetic, conversions of integers below 2^24 to fp32, and single fp32 products of numbers in [1,
2) that are bit-cast at once. XLA flushes subnormals and rewrites divisions, Triton and GPUs divide approximately, and libraries
disagree on exp2 and log2; none of this can change the results here.

A number has one of two representations: its *bits* (the fp32 pattern as int32), or a *significand* (an integer whose leading
bit is set) and an *exponent*. The split value is significand / 2^point * 2^exponent, with point = 23 unless stated otherwise.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace

Array = Any
"""An array of any supported library."""

ONE = 0x3F800000
INFINITY = 0x7F800000
NAN = 0x7FC00000
FP32_MAX = 0x7F7FFFFF
SIGN = -0x80000000
MAGNITUDE = 0x7FFFFFFF

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
LARGEST_FINITE = {"float32": FP32_MAX, "float16": 0x477FE000, "bfloat16": 0x7F7F0000}
"""fp32 bits of the largest finite value of each dtype."""

_BEYOND = 512  # added to the exponent of Inf and NaN, so that it exceeds the exponent of any finite product


def constant_bits(value: float) -> int:
    """Returns the fp32 bits of a Python float, rounded to nearest."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def dtype_name(x: Array) -> str:
    """Returns the name of an array's dtype without its library: "float32", "bfloat16", "uint8"."""
    dtype = x.dtype
    return _numpy_name(dtype) if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


# NumPy makes ten calls to print a dtype.
_numpy_name = lru_cache(maxsize=256)(str)


def at_most(x: Array, limit: int) -> Array:
    """Returns the elementwise minimum of int32 and a limit. torch.minimum takes no Python numbers, and dynamo can't trace its
    array API substitute."""
    return array_namespace(x).where(x > limit, limit, x)


def at_least(x: Array, limit: int) -> Array:
    """Returns the elementwise maximum of int32 and a limit; see `at_most`."""
    return array_namespace(x).where(x < limit, limit, x)


def from_float(x: Array) -> Array:
    """Returns the fp32 bits of float32, float16 or bfloat16; exact, including subnormals and NaN."""
    xp = array_namespace(x)
    name = dtype_name(x)
    if name == "float32":
        return x.view(xp.int32)
    half = xp.astype(x.view(xp.int16), xp.int32)
    if name == "bfloat16":
        return half << 16
    magnitude = half & 0x7FFF
    special = xp.astype(magnitude >= 0x7C00, xp.int32)
    rebiased = (magnitude << 13) + ((special + 1) * (112 << 23))
    subnormal = (xp.astype(magnitude, xp.float32) * 2.0**-24).view(xp.int32)
    return ((half & 0x8000) << 16) | xp.where(magnitude < 0x400, subnormal, rebiased)


def to_float(bits: Array, dtype: str) -> Array:
    """Converts fp32 bits to an array of `dtype`, rounded once to nearest even; NaN becomes the canonical NaN."""
    xp = array_namespace(bits)
    magnitude = bits & MAGNITUDE
    nan = magnitude > INFINITY
    if dtype == "float32":
        return xp.where(nan, NAN, bits).view(xp.float32)
    if dtype == "bfloat16":
        # Rounding past the largest finite value carries into the exponent and gives Inf.
        half = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        canonical = 0x7FC0
    else:
        significand, exponent = split(magnitude)
        half = at_most(round_nearest(significand, at_most(exponent, 16), 10, -14), 0x7C00)
        half = xp.where(magnitude == 0, 0, half)
        canonical = 0x7E00
    sign = (bits >> 16) & 0x8000
    half = xp.astype(xp.where(nan, canonical, half | sign), xp.int16)
    if dtype == "float16":
        return half.view(xp.float16)
    return half.view(_bfloat16(xp))


def _bfloat16(xp) -> Any:
    if hasattr(xp, "bfloat16"):
        return xp.bfloat16
    import ml_dtypes

    return ml_dtypes.bfloat16


def split(magnitude: Array) -> tuple[Array, Array]:
    """Splits non-negative fp32 bits into (significand, exponent) and normalizes subnormals.

    Zero becomes 2^-276, which always rounds to zero here. Inf and NaN get exponents above any product of finite numbers, so
    they saturate.
    """
    xp = array_namespace(magnitude)
    field = magnitude >> 23
    fraction = magnitude & 0x7FFFFF
    normalized = xp.astype(fraction, xp.float32).view(xp.int32)
    subnormal = field == 0
    significand = xp.where(subnormal, normalized & 0x7FFFFF, fraction) | 0x800000
    exponent = xp.where(subnormal, (normalized >> 23) - (127 + 149), field - 127)
    return significand, xp.where(field == 255, exponent + _BEYOND, exponent)


def multiply(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the product of two split numbers, rounded to 24 bits like IEEE's, but with an unbounded exponent."""
    xp = array_namespace(a[0])
    one_to_two = [(significand + (ONE - 0x800000)).view(xp.float32) for significand in (a[0], b[0])]
    product = (one_to_two[0] * one_to_two[1]).view(xp.int32)
    return (product & 0x7FFFFF) | 0x800000, a[1] + b[1] + (product >> 23) - 127


def product(a: Array, b: Array) -> Array:
    """Returns the fp32 bits of the IEEE product of two non-negative numbers given as bits; NaN is canonical.

    `multiply` always rounds to 24 bits. This function rounds a subnormal product only once, from all 48 bits.
    """
    xp = array_namespace(a)
    (significand_a, exponent_a), (significand_b, exponent_b) = split(a), split(b)
    high_a, low_a = significand_a >> 12, significand_a & 0xFFF
    high_b, low_b = significand_b >> 12, significand_b & 0xFFF
    middle = high_a * low_b + low_a * high_b
    low = low_a * low_b + ((middle & 0xFFF) << 12)
    high = high_a * high_b + (middle >> 12) + (low >> 24)
    # Keeps 25 of 46 fraction bits; the last one is sticky: set if any dropped bit was.
    kept = (high << 3) | ((low >> 21) & 7) | xp.astype((low & 0x1FFFFF) != 0, xp.int32)
    carry = kept >> 26
    result = fp32(kept, exponent_a + exponent_b + carry, 25 + carry)
    zero, infinite = (a == 0) | (b == 0), (a == INFINITY) | (b == INFINITY)
    nan = (a > INFINITY) | (b > INFINITY) | (zero & infinite)
    return xp.where(nan, NAN, xp.where(zero, 0, result))


def divide(a: Array, b: Array) -> Array:
    """Returns the fp32 bits of the IEEE quotient of two non-negative numbers given as bits; b is not 0, overflow gives Inf.

    Long division with two 12-bit digits, each estimated in floating point. It uses no library's `/`, and errors of an estimate
    don't matter: the integer remainder corrects them.
    """
    xp = array_namespace(b)
    significand_a, exponent_a = split(a)
    significand_b, exponent_b = split(b)
    smaller = significand_a < significand_b
    exponent = exponent_a - exponent_b - xp.astype(smaller, xp.int32)
    inverse = _inverse(significand_b)
    remainder = significand_a << xp.astype(smaller, xp.int32)
    quotient = xp.zeros_like(remainder)
    for _ in range(2):
        # Both the remainder and its distance to the next digit are below 2^25, so wrapping products are exact.
        digit = xp.astype(xp.astype(remainder, xp.float32) * inverse, xp.int32)
        quotient = (quotient << 12) + digit
        remainder = (remainder << 12) - digit * significand_b
    # A digit is off by at most one, the last by two: conversion truncates a negative remainder towards zero.
    for _ in range(2):
        below = remainder >> 31
        quotient = quotient + below
        remainder = remainder + (significand_b & below)
    over = remainder >= significand_b
    quotient = quotient + xp.astype(over, xp.int32)
    inexact = (remainder != 0) & (remainder != significand_b)
    return fp32((quotient << 1) | xp.astype(inexact, xp.int32), exponent, 24 + 1)


def add(a: Array, b: Array) -> Array:
    """Returns the fp32 bits of the IEEE sum of two non-negative numbers given as bits; NaN is canonical."""
    xp = array_namespace(a)
    larger, exponent, high, low = _aligned(a, b)
    total = high + low
    carry = total >> 27
    exponent = exponent + carry
    # `fp32` would wrap for a number near 2^128 whose bits are all ones and which rounds up.
    result = xp.where(exponent > 127, INFINITY, fp32(total, at_most(exponent, 127), 26 + carry))
    return xp.where(larger > INFINITY, NAN, result)


def distance(a: Array, b: Array) -> Array:
    """Returns the fp32 bits of the IEEE |a - b| for non-negative numbers given as bits; NaN is canonical, Inf - Inf is NaN."""
    xp = array_namespace(a)
    larger, exponent, high, low = _aligned(a, b)
    difference = high - low
    safe = at_least(difference, 1)
    # The position of the leading bit. Conversion to fp32 is exact below 2^24; three more positions are counted above it.
    places = (xp.astype(at_most(safe, 0xFFFFFF), xp.float32).view(xp.int32) >> 23) - 127
    places = places + sum(xp.astype(safe >= 1 << bit, xp.int32) for bit in (24, 25, 26))
    result = fp32(safe << (26 - places), exponent + places - 26, 26)
    result = xp.where(larger == INFINITY, INFINITY, xp.where(difference == 0, 0, result))
    return xp.where((larger > INFINITY) | ((a == b) & (a == INFINITY)), NAN, result)


def _aligned(a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """Returns (larger's bits, its exponent, its significand, the smaller's significand at that exponent).

    Significands are below 2^27 with three extra bits after fp32's; the last extra bit is sticky.
    """
    xp = array_namespace(a)
    larger, smaller = xp.where(a > b, a, b), xp.where(a > b, b, a)
    field, below = at_least(larger >> 23, 1), at_least(smaller >> 23, 1)
    # The bits of a subnormal number are its significand.
    high, low = (larger - ((field - 1) << 23)) << 3, (smaller - ((below - 1) << 23)) << 3
    places = at_most(field - below, 27)
    kept = low >> places
    return larger, field - 127, high, kept | xp.astype(kept << places != low, xp.int32)


def _inverse(significand: Array) -> Array:
    """Approximates 2^12 / significand for significands of 2^23 to 2^24 to 1 part in 2^21: an estimate, then Newton steps."""
    xp = array_namespace(significand)
    pattern = significand + (ONE - 0x800000)
    x = pattern.view(xp.float32)
    inverse = (0x7EF311C7 - pattern).view(xp.float32)
    for _ in range(3):
        inverse = inverse * (2.0 - x * inverse)
    return inverse * 2.0**-11


def fp32(significand: Array, exponent: Array, point: int | Array = 23) -> Array:
    """Returns the fp32 bits of significand / 2^point * 2^exponent, rounded once to nearest even; overflow gives Inf."""
    return at_most(round_nearest(significand, at_most(exponent, 128), 23, -126, point), INFINITY)


def round_nearest(significand: Array, exponent: Array, mantissa_bits: int, emin: int, point: int | Array = 23) -> Array:
    """Returns the magnitude code of a number in a float format, rounded to nearest, ties to even.

    Args:
        significand: int32 below 2^28 whose leading bit is bit `point`.
        exponent: int32, at most 2^(31 - mantissa_bits) above `emin`.
        mantissa_bits: mantissa bits of the format.
        emin: exponent of the format's smallest normal number; the spacing is constant below it.
        point: fraction bits of the significand.

    Returns:
        exponent field << mantissa_bits | mantissa, without saturation: a carry continues into the exponent field.
    """
    xp = array_namespace(exponent)
    quotient, dropped, shift = _cut(xp, significand, exponent, mantissa_bits, emin, point)
    twice, unit = dropped << 1, xp.ones_like(dropped) << shift
    up = (twice > unit) | ((twice == unit) & ((quotient & 1) == 1))
    return quotient + xp.astype(up, xp.int32) + (at_least(exponent - emin, 0) << mantissa_bits)


def truncate(significand: Array, exponent: Array, mantissa_bits: int, emin: int, point: int | Array = 23) -> Array:
    """Returns what `round_nearest` returns, rounded towards zero."""
    quotient, _, _ = _cut(array_namespace(exponent), significand, exponent, mantissa_bits, emin, point)
    return quotient + (at_least(exponent - emin, 0) << mantissa_bits)


def round_stochastic(
    significand: Array, exponent: Array, mantissa_bits: int, emin: int, random: Array, random_bits: int = 8
) -> Array:
    """Rounds to floor(|y| / ulp + (2 u + 1) / 2^(random_bits + 1)) ulp exactly; otherwise like `round_nearest` with point 23.

    The fraction f of |y| / ulp rounds up if n f >= n - 1 - 2 u with n = 2^(random_bits + 1), an integer comparison. `random` is
    u: int32 with 8 or 16 random bits, at most as many as the significand has after the mantissa.
    """
    xp = array_namespace(exponent)
    quotient, dropped, _ = _cut(xp, significand, exponent, mantissa_bits, emin, 23)
    # A fraction below 2^-places never rounds up; with a shift above 24 + places, every fraction is that small.
    places = random_bits + 1
    shift = at_most(at_least(emin - exponent, 0) + (23 - mantissa_bits), 24 + places)
    up = (dropped >> (shift - places)) >= (1 << places) - 1 - 2 * random
    return quotient + xp.astype(up, xp.int32) + (at_least(exponent - emin, 0) << mantissa_bits)


def _cut(xp, significand, exponent, mantissa_bits, emin, point):
    """Truncates to the format's spacing; returns (bits kept, bits dropped, number of bits dropped)."""
    # 29 places drop every bit of a significand below 2^28 and leave room to double the dropped bits.
    shift = at_most(at_least(emin - exponent, 0) + (point - mantissa_bits), 29)
    quotient = significand >> shift
    return quotient, significand - (quotient << shift), shift
