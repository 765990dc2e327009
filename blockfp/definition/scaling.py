"""The scale of a block from its largest magnitude: one function for each rule, and delayed scaling's step.

An amax is fp32 bits (int32), NaN ignored, 0 where there is nothing else: an integer maximum finds and reduces it, with no
order and no flushing of subnormals. Every rule gives the *stored* scale and the *multiplier* that encodes with it.
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
"""A split number: (significand, exponent), see `bits`."""

# Constants of the rules, by element. They stand ready because dynamo would trace how they come about.
_LARGEST = {name: bits.constant_bits(element.max) for name, element in ELEMENTS.items()}
_INVERSE_OF_LARGEST = {name: bits.constant_bits(1 / element.max) for name, element in ELEMENTS.items()}
LARGEST_TWO_LEVEL = {
    f: bits.constant_bits(f.scale.bound * f.element.max * f.scale.guard) for f in FORMATS if f.scale.bound is not None
}
"""fp32 bits of what the tensor's amax is mapped to by the tensor's scale, of formats of two levels."""
_INVERSE_TWO_LEVEL = {f: bits.constant_bits(1 / (f.element.max * f.scale.guard)) for f in LARGEST_TWO_LEVEL}


def eps_for(format: Format, eps: float) -> float:
    """A recipe's eps as operands in `format` take it: 0 where it has no meaning, which is all but FP8 with fp32 scales."""
    return eps if format.scale.dtype == "float32" else 0.0


def fp8_multiplier(amax: Array, element: ElementFormat, scale: ScaleFormat, largest: int) -> Array:
    """fp32 bits of the number that FP8 per tensor and FP8 blocks multiply with: MAX / amax.

    1 where amax is 0 or Inf; where the quotient overflows, `largest`. Power-of-two scales clear the mantissa. The stored
    decode scale is its reciprocal. (TransformerEngine's `compute_scale_from_amax`.)

    Args:
        amax: int32 bits.
        element: E4M3 or E5M2.
        scale: fp32 or power of two.
        largest: bits of the value that replaces Inf: fp32's largest per tensor, the nominal dtype's for blocks.
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
    """fp32 bits of 1 / x for positive fp32 bits, rounded to nearest; Inf where it overflows."""
    return bits.divide(array_namespace(x).full_like(x, bits.ONE), x)


def e8m0_scale(amax: Array, element: ElementFormat, rule: str) -> Array:
    """E8M0 bytes (int32) of block scales; the decode scale is 2^(byte - 127).

    Rule "e8m0_ceil" takes the smallest power of two that is at least amax * fp32(1 / MAX), so that nothing saturates
    (cuBLAS, TransformerEngine). Rule "e8m0_floor" takes floor(log2 amax) - emax (OCP Microscaling Formats v1.0). Zero gives
    0x00, Inf gives 0xFE, and so does whatever would be above.
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
    """Bits of the smallest amax whose product with fp32(1 / MAX), rounded to fp32, is above 2^-127.

    That product is subnormal, so its rounding is not that of a normal number: it stays at 2^-127 up to the tie at
    2^-127 + 2^-150.
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
    """fp32 bits of the decode scale of E8M0 bytes (int32); 255 is NaN."""
    xp = array_namespace(stored)
    return xp.where(stored == 0xFF, bits.NAN, xp.where(stored == 0, 0x400000, stored << 23))


def nvfp4_multiplier(amax: Array, format: Format) -> Array:
    """fp32 bits of NVFP4's global multiplier G = bound * guard * MAX / amax of the tensor; 1 where amax is 0 or Inf.

    `tensor_scale` is its reciprocal. (TransformerEngine's `compute_global_encode_scaling_factor_FP4`.)

    Args:
        amax: int32 bits.
        format: NVFP4, whose bound is 448, or one of 4-over-6, whose name says its bound.
    """
    xp = array_namespace(amax)
    special = (amax == 0) | (amax == bits.INFINITY)
    safe = xp.where(special, bits.ONE, amax)
    multiplier = bits.divide(xp.full_like(amax, LARGEST_TWO_LEVEL[format]), safe)
    return xp.where(special, bits.ONE, bits.at_most(multiplier, bits.FP32_MAX))


def nvfp4_scale(amax: Array, multiplier: Array, format: Format) -> Array:
    """E4M3 bytes (int32) of NVFP4's block scales: E4M3(amax of the block * (G * fp32(1 / (guard * MAX)))), saturating."""
    xp = array_namespace(amax)
    sixth = bits.split(xp.full_like(multiplier, _INVERSE_TWO_LEVEL[format]))
    scaled = bits.multiply(bits.split(amax), bits.multiply(bits.split(multiplier), sixth))
    return xp.where(amax == 0, 0, round_to_element(*scaled, E4M3))


def clamped_reciprocal(scale: Array) -> Array:
    """fp32 bits of min(1 / scale, largest fp32) for non-negative decode scales; of zero, the largest fp32."""
    xp = array_namespace(scale)
    zero = scale == 0
    inverse = bits.at_most(reciprocal(xp.where(zero, bits.ONE, scale)), bits.FP32_MAX)
    return xp.where(zero, bits.FP32_MAX, inverse)


def lift(amax: Array, eps: float) -> Array:
    """Lifts amax to at least eps."""
    check_eps(eps)
    return bits.at_least(amax, bits.constant_bits(eps)) if eps else amax


def record(history: Array, amax: Array) -> Array:
    """Enters an amax into delayed scaling's history: history[0] = max(history[0], amax), a non-finite amax counted as 0.

    Args:
        history: float32 [length, ...], newest first; never negative.
        amax: float32, of the shape of history[0].
    """
    xp = array_namespace(history)
    pattern = bits.from_float(amax) & bits.MAGNITUDE
    newest = xp.maximum(bits.from_float(history[0]), xp.where(pattern >= bits.INFINITY, 0, pattern))
    return xp.concat([newest.view(xp.float32)[None], history[1:]], axis=0)


def delayed_multiplier(scale: Array, amax: Array, format: Format, eps: float = 0.0) -> Array:
    """What a cast by delayed scaling multiplies with, float32: the scale, or that of current scaling where there is none yet.

    Args:
        scale: float32; 0 as long as no amax above 0 was recorded.
        amax: int32 bits of the operand that is cast, of scale's shape.
        format: with one scale per tensor.
        eps: amaxes are lifted to it, see `numerics.quantize`.
    """
    pattern = bits.from_float(scale)
    current = fp8_multiplier(lift(amax, eps_for(format, eps)), format.element, format.scale, bits.FP32_MAX)
    return array_namespace(scale).where(pattern > 0, pattern, current).view(array_namespace(scale).float32)


def largest_with_margin(element: ElementFormat, margin: int) -> int:
    """fp32 bits of MAX * 2^-margin, to which delayed scaling maps an amax."""
    return bits.constant_bits(element.max * 2.0**-margin)


def update(
    history: Array,
    scale: Array,
    element: ElementFormat | Sequence[ElementFormat],
    *,
    margin: int = 0,
    algorithm: str = "max",
) -> tuple[Array, Array]:
    """Takes delayed scaling's step, once per optimizer step: (history, scale) -> (history, scale).

    The amax is the largest of the history ("max") or its newest entry ("most_recent"); the new scale is
    MAX * 2^-margin / amax, fp32's largest where the quotient overflows. The history moves on: [0, history[2], ..,
    history[-1], newest]. (TransformerEngine's `_default_get_amax_and_update_history`.) Where nothing was recorded, history and
    scale stay.

    Args:
        history: float32 [length, ...], newest first, already max-reduced over the ranks that share the amax.
        scale: float32, of the shape of history[0].
        element: format of the operand's elements; or, of scale [operands], the format of each.
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
