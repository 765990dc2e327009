"""Scales from amaxes: one function per rule, and the update of delayed scaling.

An amax is given as fp32 bits (int32), ignoring NaN, 0 if nothing else is present. An integer maximum computes and reduces it,
independent of order and without flushing subnormals. Every rule gives the *stored* scale and the *multiplier* for encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from array_api_compat import array_namespace

from ..formats import E4M3, ELEMENTS, FORMATS, ElementFormat, Format, ScaleFormat
from . import bits
from .bits import Array
from .checks import check_eps
from .rounding import round_to_element

Split = tuple[Array, Array]
"""A split number (significand, exponent); see `bits`."""

# Constants by element, computed here because dynamo would trace their computation.
_LARGEST = {name: bits.constant_bits(element.max) for name, element in ELEMENTS.items()}
_INVERSE_OF_LARGEST = {name: bits.constant_bits(1 / element.max) for name, element in ELEMENTS.items()}
LARGEST_TWO_LEVEL = {
    f: bits.constant_bits(f.scale.bound * f.element.max * f.scale.guard) for f in FORMATS if f.scale.bound is not None
}
"""fp32 bits of the value to which the tensor scale maps the tensor's amax, for formats with two levels."""
_INVERSE_TWO_LEVEL = {f: bits.constant_bits(1 / (f.element.max * f.scale.guard)) for f in LARGEST_TWO_LEVEL}


def eps_for(format: Format, eps: float) -> float:
    """Returns a recipe's eps for operands in `format`: 0 for formats without fp32 scales, where eps has no meaning."""
    return eps if format.scale.dtype == "float32" else 0.0


def fp8_multiplier(amax: Array, element: ElementFormat, scale: ScaleFormat, largest: int) -> Array:
    """Returns the fp32 bits of the multiplier of FP8 formats with fp32 scales, MAX / amax.

    It is 1 if amax is 0 or Inf, and `largest` if the quotient overflows; power-of-two scales clear the mantissa. The stored
    decode scale is its reciprocal. (TransformerEngine's `compute_scale_from_amax`.) `largest` holds fp32 bits: fp32's maximum
    for one scale per tensor, the nominal dtype's for blocks.
    """
    xp = array_namespace(amax)
    special = (amax == 0) | (amax == bits.INFINITY)
    safe = xp.where(special, bits.ONE, amax)
    multiplier = bits.divide(xp.full_like(amax, _LARGEST[element.name]), safe)
    multiplier = xp.where(multiplier == bits.INFINITY, largest, multiplier)
    if scale.power_of_two:
        multiplier = multiplier & bits.INFINITY
    return xp.where(special, bits.ONE, multiplier)


def reciprocal(x: Array) -> Array:
    """Returns the fp32 bits of 1 / x for positive fp32 bits, rounded to nearest; overflow gives Inf."""
    return bits.divide(array_namespace(x).full_like(x, bits.ONE), x)


def e8m0_scale(amax: Array, element: ElementFormat, rule: str) -> Array:
    """Returns the E8M0 bytes (int32) of block scales; the decode scale is 2^(byte - 127).

    Rule "e8m0_ceil" takes the smallest power of two that is at least amax * fp32(1 / MAX), so nothing saturates (cuBLAS,
    TransformerEngine). Rule "e8m0_floor" takes floor(log2 amax) - emax (OCP Microscaling Formats v1.0). Zero gives 0x00; Inf
    and larger results give 0xFE.
    """
    xp = array_namespace(amax)
    if rule == "e8m0_floor":
        exponent = bits.at_least((amax >> 23) - element.emax, 0)
    else:
        factor = bits.split(xp.full_like(amax, _INVERSE_OF_LARGEST[element.name]))
        significand, exponent = bits.multiply(bits.split(amax), factor)
        exponent = exponent + 127 + xp.astype(significand != 0x800000, xp.int32)
        exponent = xp.where(amax < _SMALLEST_ABOVE_ZERO[element.name], 0, bits.at_least(exponent, 1))
    return xp.where(amax == bits.INFINITY, 0xFE, bits.at_most(exponent, 0xFE))


def _smallest_above_zero(element: ElementFormat) -> int:
    """Returns the bits of the smallest amax whose product with fp32(1 / MAX), rounded to fp32, exceeds 2^-127.

    The product is subnormal there: up to the tie at 2^-127 + 2^-150 it rounds to 2^-127.
    """

    def value(pattern: int) -> Fraction:
        field, fraction = pattern >> 23, pattern & 0x7FFFFF
        return Fraction(fraction + (0x800000 if field else 0)) * Fraction(2) ** (max(field, 1) - 150)

    factor = value(bits.constant_bits(1 / element.max))
    tie = Fraction(2) ** -127 + Fraction(2) ** -150
    low, high = 0, bits.INFINITY
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) * factor > tie else (middle + 1, high)
    return low


_SMALLEST_ABOVE_ZERO = {name: _smallest_above_zero(element) for name, element in ELEMENTS.items()}


def e8m0_bits(stored: Array) -> Array:
    """Returns the fp32 bits of the decode scale of E8M0 bytes (int32); 255 is NaN."""
    xp = array_namespace(stored)
    return xp.where(stored == 0xFF, bits.NAN, xp.where(stored == 0, 0x400000, stored << 23))


def nvfp4_multiplier(amax: Array, format: Format) -> Array:
    """Returns the fp32 bits of NVFP4's tensor multiplier G = bound * guard * MAX / tensor amax; 1 if amax is 0 or Inf.

    `tensor_scale` is its reciprocal. (TransformerEngine's `compute_global_encode_scaling_factor_FP4`.)
    """
    xp = array_namespace(amax)
    special = (amax == 0) | (amax == bits.INFINITY)
    safe = xp.where(special, bits.ONE, amax)
    multiplier = bits.divide(xp.full_like(amax, LARGEST_TWO_LEVEL[format]), safe)
    return xp.where(special, bits.ONE, bits.at_most(multiplier, bits.FP32_MAX))


def nvfp4_scale(amax: Array, multiplier: Array, format: Format) -> Array:
    """Returns the E4M3 bytes (int32) of NVFP4's block scales: E4M3(block amax * (G * fp32(1 / (guard * MAX)))), saturating."""
    xp = array_namespace(amax)
    sixth = bits.split(xp.full_like(multiplier, _INVERSE_TWO_LEVEL[format]))
    scaled = bits.multiply(bits.split(amax), bits.multiply(bits.split(multiplier), sixth))
    return xp.where(amax == 0, 0, round_to_element(*scaled, E4M3))


def clamped_reciprocal(scale: Array) -> Array:
    """Returns the fp32 bits of min(1 / scale, largest fp32) for non-negative decode scales; largest fp32 for zero."""
    xp = array_namespace(scale)
    zero = scale == 0
    inverse = bits.at_most(reciprocal(xp.where(zero, bits.ONE, scale)), bits.FP32_MAX)
    return xp.where(zero, bits.FP32_MAX, inverse)


def lift(amax: Array, eps: float) -> Array:
    """Returns the maximum of amax and eps."""
    check_eps(eps)
    return bits.at_least(amax, bits.constant_bits(eps)) if eps else amax


def record(history: Array, amax: Array) -> Array:
    """Records an amax in delayed scaling's history: history[0] = max(history[0], amax); a non-finite amax counts as 0.

    `history` is float32 [length, ...], newest first, never negative; `amax` is float32 in the shape of history[0].
    """
    xp = array_namespace(history)
    pattern = bits.from_float(amax) & bits.MAGNITUDE
    newest = xp.maximum(bits.from_float(history[0]), xp.where(pattern >= bits.INFINITY, 0, pattern))
    return xp.concat([newest.view(xp.float32)[None], history[1:]], axis=0)


def delayed_multiplier(scale: Array, amax: Array, format: Format, eps: float = 0.0) -> Array:
    """Returns the multiplier of a cast with delayed scaling, float32: `scale`, or current scaling's while no scale exists yet.

    `scale` is float32 and 0 until an amax above 0 was recorded. `amax` holds the int32 bits of the operand, in scale's shape.
    The format has one scale per tensor; `eps` is that of `numerics.quantize`.
    """
    pattern = bits.from_float(scale)
    current = fp8_multiplier(lift(amax, eps_for(format, eps)), format.element, format.scale, bits.FP32_MAX)
    return array_namespace(scale).where(pattern > 0, pattern, current).view(array_namespace(scale).float32)


def largest_with_margin(element: ElementFormat, margin: int) -> int:
    """Returns the fp32 bits of MAX * 2^-margin, to which delayed scaling maps an amax."""
    return bits.constant_bits(element.max * 2.0**-margin)


def update(
    history: Array,
    scale: Array,
    element: ElementFormat | Sequence[ElementFormat],
    *,
    margin: int = 0,
    algorithm: str = "max",
) -> tuple[Array, Array]:
    """Updates delayed scaling's history and scale, once per optimizer step; returns (history, scale).

    The amax is the largest of the history ("max") or its newest entry ("most_recent"). The new scale is MAX * 2^-margin / amax,
    or fp32's largest if that overflows. The history becomes [0, history[2], .., history[-1], newest]. (TransformerEngine's
    `_default_get_amax_and_update_history`.) If nothing was recorded, history and scale stay.

    Args:
        history: float32 [length, ...], newest first, already max-reduced over the ranks that share the amax.
        scale: float32 in the shape of history[0].
        element: the operand's element format; for scale [operands], a format per operand.
        margin: the scale is divided by 2^margin; -100 to 100.
        algorithm: "max" or "most_recent".
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm must be 'max' or 'most_recent', got {algorithm!r}")
    if not -100 <= margin <= 100:
        raise ValueError(f"margin must be in -100..100, got {margin}")
    xp = array_namespace(history)
    pattern = bits.from_float(history)
    amax = xp.max(pattern, axis=0) if algorithm == "max" else pattern[0]
    safe = xp.where(amax > 0, amax, bits.ONE)
    if isinstance(element, Sequence):
        runs = [(largest_with_margin(one, margin), len(list(alike))) for one, alike in groupby(element)]
        target = xp.concat([xp.full_like(safe[:count], largest) for largest, count in runs])
    else:
        target = xp.full_like(safe, largest_with_margin(element, margin))
    quotient = bits.at_most(bits.divide(target, safe), bits.FP32_MAX)
    newest = pattern[:1]
    recorded = newest > 0
    scale = xp.where(recorded[0], quotient, bits.from_float(scale)).view(xp.float32)
    moved = [xp.zeros_like(newest)] + ([pattern[2:], newest] if history.shape[0] > 1 else [])
    return xp.where(recorded, xp.concat(moved, axis=0), pattern).view(xp.float32), scale


# ---- codes times scales


def scaled(code: Array, element: ElementFormat, scale: Array, *, power_of_two: bool = False) -> Array:
    """Returns the fp32 bits of an element code (int32) times a scale (fp32 bits), rounded once like an IEEE product.

    Uses exact integer arithmetic, because products and scales may be subnormal. NaN is canonical and positive.
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
        # A code has at most mantissa_bits + 1 significant bits, so the integer product is exact.
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
    """Returns the fp32 bits of a magnitude code; every element's subnormals are normal in fp32."""
    xp = array_namespace(magnitude)
    mantissa = element.mantissa_bits
    subnormal = (xp.astype(magnitude, xp.float32) * 2.0 ** (element.emin - mantissa)).view(xp.int32)
    normal = (magnitude << (23 - mantissa)) + ((127 - element.bias) << 23)
    value = xp.where(magnitude < (1 << mantissa), subnormal, normal)
    if not element.has_nan:
        return value
    if element.exponent_bits == 5:  # E5M2 has IEEE's Inf and NaN; E4M3 has one NaN code and no Inf
        return xp.where(magnitude > 0x7C, bits.NAN, xp.where(magnitude == 0x7C, bits.INFINITY, value))
    return xp.where(magnitude == element.nan_code, bits.NAN, value)
