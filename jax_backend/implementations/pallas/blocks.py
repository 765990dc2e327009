"""The arithmetic of the kernels, as functions of blocks: plain arrays here, registers of a warpgroup in a kernel.

The definition (`definition.numerics`) rounds elements in integer arithmetic, which no library can get wrong; a GPU has
instructions for it. These functions use the instructions that give the definition's bits: one fp32 product, and conversions
that round to nearest even. Scale rules are `definition.scaling`'s own, but for powers of two, whose quotients are
differences of exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from array_api_compat import array_namespace

from blockfp.definition import bits, scaling
from blockfp.formats import E2M1, E4M3, E4M3_SCALE, ElementFormat, Format

Array = Any
Spread = Callable[[Array], Array]
"""Repeats what there is one of for each block over the block's elements."""

FP8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}

_HALF_UNITS = 1.5 * 2.0**22  # fp32 numbers of this size are half units apart
_UNITS = 1.5 * 2.0**23  # and of this size, units
_HALF_UNITS_BITS, _UNITS_BITS = bits.constant_bits(_HALF_UNITS), bits.constant_bits(_UNITS)


def to_fp32(x: Array) -> Array:
    """x as float32, exactly."""
    xp = array_namespace(x)
    return x if x.dtype == xp.float32 else xp.astype(x, xp.float32)


def largest(x: Array, axes: Sequence[int]) -> Array:
    """fp32 bits of the largest magnitude of x along axes, NaN ignored; 16-bit inputs are compared as such, two at a time."""
    xp = array_namespace(x)
    magnitude, infinity = _magnitude(x)
    # What is added makes a NaN's magnitude negative, and keeps the order of the others.
    below = (0x7FFFFFFF if x.dtype == xp.float32 else 0x7FFF) - infinity
    shifted = _reduce(magnitude + below, axes)
    amax = xp.where(shifted < below, 0, shifted - below)
    if x.dtype == xp.float32:
        return amax
    if x.dtype == xp.float16:
        return xp.astype(xp.astype(amax, xp.int16).view(xp.float16), xp.float32).view(xp.int32)
    return xp.astype(amax, xp.int32) << 16


def holds_nan(x: Array, axes: Sequence[int]) -> Array:
    """Returns True along axes of x that hold a NaN."""
    magnitude, infinity = _magnitude(x)
    return array_namespace(x).astype(_reduce(magnitude, axes), np.int32) > infinity


def _magnitude(x: Array) -> tuple[Array, int]:
    """(x's bits without the sign, those of Inf)."""
    xp = array_namespace(x)
    if x.dtype == xp.float32:
        return x.view(xp.int32) & bits.MAGNITUDE, bits.INFINITY
    return x.view(xp.int16) & 0x7FFF, 0x7C00 if x.dtype == xp.float16 else 0x7F80


def _reduce(x: Array, axes: Sequence[int]) -> Array:
    for axis in axes:
        x = array_namespace(x).max(x, axis=axis)
    return x


def scales(x: Array, axes: Sequence[int], format: Format, nominal: str) -> tuple[Array, Array]:
    """(stored scale as int32, multiplier as float32) of blocks of an 8-bit format.

    Args:
        x: float32, float16 or bfloat16.
        axes: the axes of x that lie within a block.
        format: the format.
        nominal: see `numerics.quantize`.
    """
    stored, multiplier = scales_of_amax(largest(x, axes), format, nominal)
    if not format.element.has_nan:
        stored = array_namespace(x).where(holds_nan(x, axes), format.scale.nan_code, stored)
    return stored, multiplier


def scales_of_amax(amax: Array, format: Format, nominal: str) -> tuple[Array, Array]:
    """Computes `scales`, NaN apart, from amaxes as fp32 bits."""
    xp = array_namespace(amax)
    if format.scale.e8m0:
        if format.scale.name == "e8m0_ceil":
            stored = _ceil_scale(amax, format.element)
        else:
            stored = scaling.e8m0_scale(amax, format.element, format.scale.name)
        return stored, xp.where(stored == 0xFE, 1 << 22, (0xFE - stored) << 23).view(xp.float32)
    maximum = bits.FP32_MAX if format.per_tensor else bits.LARGEST_FINITE[nominal]
    if format.scale.name == "pow2":
        exponent = _power_of_two(amax, format.element, maximum)
        return _exponent_bits(-exponent), _exponent_bits(exponent).view(xp.float32)
    special = (amax == 0) | (amax == bits.INFINITY)
    multiplier = divide(bits.constant_bits(format.element.max), xp.where(special, bits.ONE, amax))
    multiplier = xp.where(special, bits.ONE, xp.where(multiplier == bits.INFINITY, maximum, multiplier))
    return divide(bits.ONE, multiplier), multiplier.view(xp.float32)


def divide(a: int, b: Array) -> Array:
    """fp32 bits of the IEEE quotient of two positive numbers given as bits, a normal; overflow gives Inf.

    The remainder of a near quotient of the significands, exact modulo 2^32, tells how many units off it is.
    """
    xp = array_namespace(b)
    divisor, exponent = bits.split(b)
    dividend = (a & 0x7FFFFF) | 0x800000
    smaller = xp.astype(dividend < divisor, xp.int32)
    quotient = _near_quotient(dividend * 2.0**-23, (divisor + (bits.ONE - 0x800000)).view(xp.float32))
    # In units of its last place it is a whole number below 2^25.
    quotient = xp.astype(quotient * xp.astype((smaller + 1) << 23, xp.float32), xp.int32)
    remainder = _wrapped(dividend << 23) + smaller * _wrapped(dividend << 23) - quotient * divisor
    for _ in range(3):
        over = remainder >> 31
        quotient, remainder = quotient + over, remainder + (divisor & over)
    for _ in range(2):
        under = ~((remainder - divisor) >> 31)
        quotient, remainder = quotient - under, remainder - (divisor & under)
    twice = remainder << 1
    rounding = (xp.astype(twice >= divisor, xp.int32) << 1) | xp.astype((twice != divisor) & (twice != 0), xp.int32)
    exponent = (a >> 23) - 127 - exponent - smaller
    return bits.fp32((quotient << 2) | rounding, exponent, 25)


def _near_quotient(a: float, b: Array) -> Array:
    """a / b of numbers in [1, 2), two units in the last place off at most: no library promises more on a GPU."""
    return a / b


def _wrapped(x: int) -> int:
    """x modulo 2^32, as an int32."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _power_of_two(amax: Array, element: ElementFormat, maximum: int) -> Array:
    """floor(log2(MAX / amax)), 0 for an amax of 0 or Inf, the exponent of `maximum` where the quotient is beyond fp32.

    fp32's quotient has this exponent too: it is never rounded up to a power of two, because MAX is 1.75 * 2^emax and the
    nearest quotient below a power of two is 2^-22.8 away from it, relative to spacings of 2^-23.
    """
    xp = array_namespace(amax)
    # MAX / amax is below a power of two where amax's mantissa is above MAX's. A subnormal amax overflows as 2^-127 does.
    quotient = element.emax + 127 - ((amax + 0x1FFFFF) >> 23)
    quotient = xp.where(quotient > 127, (maximum >> 23) - 127, quotient)
    return xp.where((amax == 0) | (amax == bits.INFINITY), 0, quotient)


def _ceil_scale(amax: Array, element: ElementFormat) -> Array:
    """E8M0 bytes of rule "ceil" from the product that the rule is stated with; see `scaling.e8m0_scale`."""
    xp = array_namespace(amax)
    product = (amax.view(xp.float32) * _fp32(1 / element.max)).view(xp.int32)
    # Rounded up to a power of two; half the smallest normal number and less is byte 0.
    return xp.minimum(xp.where(product <= 0x400000, 0, (product + 0x7FFFFF) >> 23), 0xFE)


def _fp32(value: float) -> float:
    """A constant as fp32 has it."""
    return float(np.float32(value))


def _exponent_bits(exponent: Array) -> Array:
    """fp32 bits of 2^exponent, -127 <= exponent <= 127."""
    xp = array_namespace(exponent)
    return xp.where(exponent == -127, 1 << 22, (exponent + 127) << 23)


def codes(x: Array, multiplier: Array, element: ElementFormat, *, on_gpu: bool) -> Array:
    """uint8 codes of float32 x times its multiplier.

    Args:
        x: float32.
        multiplier: float32, of x's shape or a scalar.
        element: E4M3, E5M2 or INT8.
        on_gpu: whether a conversion to FP8 saturates and a NaN that is computed is positive, which holds for the GPU's
            instructions alone.
    """
    xp = array_namespace(x)
    y = x * multiplier
    if element.signed == "complement":
        # The low bits of a number near _UNITS count units; NaN is positive on a GPU, and so ends at 127 = NaN's code.
        pattern = (y * 64.0 + _UNITS).view(xp.int32)
        pattern = xp.minimum(xp.maximum(pattern, _UNITS_BITS - 127), _UNITS_BITS + 127) & 0xFF
        return xp.astype(pattern if on_gpu else xp.where(_is_nan(x), element.nan_code, pattern), xp.uint8)
    if on_gpu:
        return xp.astype(y, FP8[element.name]).view(xp.uint8)
    narrow = xp.astype(xp.minimum(xp.maximum(y, -element.max), element.max), FP8[element.name]).view(xp.uint8)
    return xp.where(_is_nan(x), xp.asarray(element.nan_code, dtype=xp.uint8), narrow)


def _is_nan(x: Array) -> Array:
    return (x.view(array_namespace(x).int32) & bits.MAGNITUDE) > bits.INFINITY


def e2m1_codes(x: Array, multiplier: Array, *, on_gpu: bool) -> Array:
    """int32 codes (sign above three magnitude bits) of float32 x times its multiplier; NaN gives 7.

    Adding a number whose spacing is that of E2M1 at |y| rounds |y|: half a unit below 2, and twice as much above 2 and
    above 4. What it adds to the bits counts those spacings, and each doubling skipped two codes.

    Args:
        x: float32.
        multiplier: float32, of x's shape or a scalar.
        on_gpu: as for `codes`.
    """
    xp = array_namespace(x)
    pattern = (x * multiplier).view(xp.int32)
    magnitude = xp.minimum(pattern & bits.MAGNITUDE, bits.constant_bits(6.0))
    power = xp.maximum(magnitude & bits.INFINITY, bits.ONE)
    # Integer operations stand between product and sum: as one fused operation they would round once.
    spaced = (magnitude.view(xp.float32) + power.view(xp.float32) * _HALF_UNITS).view(xp.int32)
    code = spaced - power + (power >> 22) - (_HALF_UNITS_BITS - bits.ONE + (bits.ONE >> 22))
    code = code | ((pattern >> 28) & 8)
    return code if on_gpu else xp.where(_is_nan(x), 7, code)


def nvfp4_scales(
    amax: Array, nan: Array, multiplier: Array, tensor_scale: Array, format: Format, *, on_gpu: bool
) -> tuple[Array, Array]:
    """(stored E4M3 scale as int32, multiplier as float32) of NVFP4 blocks.

    Args:
        amax: int32 bits of the blocks' amaxes.
        nan: whether the block holds a NaN.
        multiplier: float32, the tensor's multiplier, of amax's shape or a scalar.
        tensor_scale: float32 reciprocal of it.
        format: whose blocks these are.
        on_gpu: as for `codes`.
    """
    xp = array_namespace(amax)
    factor = multiplier * _fp32(1 / (E2M1.max * format.scale.guard))
    narrow = codes(amax.view(xp.float32), factor, E4M3, on_gpu=on_gpu)
    decode = e4m3_values(narrow) * tensor_scale
    pattern = decode.view(xp.int32)
    inverse = divide(bits.ONE, xp.where(pattern == 0, bits.ONE, pattern))
    inverse = xp.where((pattern == 0) | (inverse == bits.INFINITY), bits.FP32_MAX, inverse)
    return xp.where(nan, E4M3_SCALE.nan_code, xp.astype(narrow, xp.int32)), inverse.view(xp.float32)


def e4m3_values(stored: Array) -> Array:
    """float32 values of E4M3 codes (uint8)."""
    return array_namespace(stored).astype(stored.view(FP8["e4m3"]), np.float32)


def decode_scale(stored: Array, format: Format) -> Array:
    """float32 decode scale of stored scales that are fp32 or E8M0."""
    xp = array_namespace(stored)
    if format.scale.dtype == "float32":
        return stored
    return scaling.e8m0_bits(xp.astype(stored, xp.int32)).view(xp.float32)


def values(code: Array, decode: Array, element: ElementFormat, dtype: str) -> Array:
    """Values of uint8 codes times their decode scale (float32), rounded to `dtype`; every NaN is the canonical one."""
    xp = array_namespace(code)
    if element.signed == "complement":
        element_value = xp.astype(code.view(xp.int8), xp.float32) * (1 / 64)
    else:
        element_value = xp.astype(code.view(FP8[element.name]), xp.float32)
    return rounded(element_value * decode, dtype)


def rounded(value: Array, dtype: str) -> Array:
    """float32 values rounded to `dtype`; every NaN is the canonical one."""
    xp = array_namespace(value)
    nan = _is_nan(value)
    if dtype == "float32":
        return xp.where(nan, bits.NAN, value.view(xp.int32)).view(xp.float32)
    narrow = xp.astype(value, ml_dtypes.bfloat16 if dtype == "bfloat16" else xp.float16)
    canonical = xp.asarray(0x7FC0 if dtype == "bfloat16" else 0x7E00, dtype=xp.int16)
    return xp.where(nan, canonical, narrow.view(xp.int16)).view(narrow.dtype)


def e2m1_values(code: Array, *, on_gpu: bool) -> Array:
    """float32 values of E2M1 codes (int32): fp32's subnormal numbers, which a GPU keeps, continue its own, 2^126 below."""
    xp = array_namespace(code)
    magnitude, sign = (code & 7) << 22, (code & 8) << 28
    if on_gpu:
        return (magnitude | sign).view(xp.float32) * 2.0**126
    # 0 and 0.5, then normal numbers.
    normal = xp.where(code & 6 == 0, (code & 1) * 126 << 23, magnitude + (126 << 23))
    return (normal | sign).view(xp.float32)
