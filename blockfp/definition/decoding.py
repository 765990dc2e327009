"""Decoding: the value of an element code times a scale, in exact integer arithmetic over an array namespace."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..formats import ElementFormat
from . import bits
from .bits import Array


def scaled(code: Array, element: ElementFormat, scale: Array, *, power_of_two: bool = False) -> Array:
    """fp32 bits of an element code (int32) times a scale given as fp32 bits, rounded once, as IEEE multiplies.

    Exact integer arithmetic, because products and scales may be subnormal. NaN is canonical and positive.
    """
    xp = array_namespace(code)
    negative, magnitude = _split_sign(code, element)
    value = magnitude_bits(magnitude, element)
    scale_magnitude = scale & bits.MAGNITUDE
    digits, exponent = bits.split(value)
    scale_digits, scale_exponent = bits.split(scale_magnitude)
    if power_of_two:
        result = bits.fp32(digits, exponent + scale_exponent)
    else:
        # A code has no more digits than its mantissa and the leading one, so the product of integers is exact.
        product = (digits >> (23 - element.mantissa_bits)) * scale_digits
        point = 23 + element.mantissa_bits
        carry = product >> (point + 1)
        result = bits.fp32(product, exponent + scale_exponent + carry, point + carry)
    infinite = (value == bits.INFINITY) | (scale_magnitude == bits.INFINITY)
    zero = (value == 0) | (scale_magnitude == 0)
    nan = (value > bits.INFINITY) | (scale_magnitude > bits.INFINITY) | (infinite & zero)
    result = xp.where(infinite, bits.INFINITY, xp.where(zero, 0, result))
    sign = xp.astype(negative ^ (scale < 0), xp.int32) << 31
    return xp.where(nan, bits.NAN, result | sign)


def _split_sign(code: Array, element: ElementFormat) -> tuple[Array, Array]:
    xp = array_namespace(code)
    if element.signed == "complement":
        value = (code << 24) >> 24
        return value < 0, xp.where(value < 0, -value, value)
    return (code >> (element.bits - 1)) == 1, code & ((1 << (element.bits - 1)) - 1)


def magnitude_bits(magnitude: Array, element: ElementFormat) -> Array:
    """fp32 bits of a magnitude code; every element's subnormals are normal in fp32."""
    xp = array_namespace(magnitude)
    mantissa = element.mantissa_bits
    subnormal = (xp.astype(magnitude, xp.float32) * 2.0 ** (element.emin - mantissa)).view(xp.int32)
    normal = (magnitude << (23 - mantissa)) + ((127 - element.bias) << 23)
    value = xp.where(magnitude < (1 << mantissa), subnormal, normal)
    if not element.has_nan:
        return value
    if element.exponent_bits == 5:  # E5M2 has IEEE's Inf and NaN; E4M3 one NaN code and no Inf
        return xp.where(magnitude > 0x7C, bits.NAN, xp.where(magnitude == 0x7C, bits.INFINITY, value))
    return xp.where(magnitude == element.nan_code, bits.NAN, value)
