"""What the kernels compute, as functions of blocks: plain arrays here, registers of a warpgroup in a kernel.

The definition (`blockfp.numerics`) rounds elements in integer arithmetic, which no library can get wrong; a GPU has
instructions for it. These functions use the instructions that give the definition's bits: one fp32 product, and conversions
that round to nearest even. Scale rules are `blockfp.scaling`'s own, but for powers of two, whose quotients are differences of
exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from array_api_compat import array_namespace

from blockfp import bits, scaling
from blockfp.formats import E2M1, E4M3_SCALE, ElementFormat, Format

Array = Any
Spread = Callable[[Array], Array]
"""Repeats what there is one of for each block over the block's elements."""

FP8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}

# Adding it makes a NaN's magnitude bits a negative int32, and keeps the order of the others.
_NAN_BELOW = 0x7FFFFFFF - bits.INFINITY

_HALF_UNITS = 1.5 * 2.0**22  # fp32 numbers of this size are half units apart
_UNITS = 1.5 * 2.0**23


def to_fp32(x: Array) -> Array:
    """x as float32, exactly."""
    xp = array_namespace(x)
    return x if x.dtype == xp.float32 else xp.astype(x, xp.float32)


def largest(x: Array, axes: Sequence[int]) -> Array:
    """fp32 bits of the largest magnitude of float32 x along axes, NaN ignored."""
    xp = array_namespace(x)
    shifted = (x.view(xp.int32) & bits.MAGNITUDE) + _NAN_BELOW
    for axis in axes:
        shifted = xp.max(shifted, axis=axis)
    return xp.maximum(shifted, _NAN_BELOW) - _NAN_BELOW


def holds_nan(x: Array, axes: Sequence[int]) -> Array:
    """Whether float32 x holds a NaN along axes."""
    xp = array_namespace(x)
    magnitude = x.view(xp.int32) & bits.MAGNITUDE
    for axis in axes:
        magnitude = xp.max(magnitude, axis=axis)
    return magnitude > bits.INFINITY


def scales(x: Array, axes: Sequence[int], format: Format, nominal: str) -> tuple[Array, Array]:
    """(stored scale as int32, multiplier as float32) of blocks of an 8-bit format.

    Args:
        x: float32.
        axes: the axes of x that lie within a block.
        format: the format.
        nominal: see `numerics.quantize`.
    """
    stored, multiplier = scales_of_amax(largest(x, axes), format, nominal)
    if not format.element.has_nan:
        stored = array_namespace(x).where(holds_nan(x, axes), format.scale.nan_code, stored)
    return stored, multiplier


def scales_of_amax(amax: Array, format: Format, nominal: str) -> tuple[Array, Array]:
    """What `scales` gives, NaN apart, from amaxes as fp32 bits."""
    xp = array_namespace(amax)
    if format.scale.name.startswith("e8m0"):
        stored = scaling.e8m0_scale(amax, format.element, format.scale.name)
        return stored, xp.where(stored == 0xFE, 1 << 22, (0xFE - stored) << 23).view(xp.float32)
    maximum = bits.FP32_MAX if format.per_tensor else bits.LARGEST_FINITE[nominal]
    if format.scale.name == "pow2":
        exponent = _power_of_two(amax, format.element, maximum)
        return _exponent_bits(-exponent), _exponent_bits(exponent).view(xp.float32)
    multiplier = scaling.fp8_multiplier(amax, format.element, format.scale, maximum)
    return scaling.reciprocal(multiplier), multiplier.view(xp.float32)


def _power_of_two(amax: Array, element: ElementFormat, maximum: int) -> Array:
    """floor(log2(MAX / amax)), 0 for an amax of 0 or Inf, the exponent of `maximum` where the quotient is beyond fp32.

    fp32's quotient has this exponent too: it is never rounded up to a power of two, because MAX is 1.75 * 2^emax and the
    nearest quotient below a power of two is 2^-22.8 away from it, relative to spacings of 2^-23.
    """
    xp = array_namespace(amax)
    significand, exponent = bits.split(amax)
    quotient = element.emax - exponent - xp.astype(significand > 0xE00000, xp.int32)
    quotient = xp.where(quotient > 127, (maximum >> 23) - 127, quotient)
    return xp.where((amax == 0) | (amax == bits.INFINITY), 0, quotient)


def _exponent_bits(exponent: Array) -> Array:
    """fp32 bits of 2^exponent, -127 <= exponent <= 127."""
    xp = array_namespace(exponent)
    return xp.where(exponent == -127, 1 << 22, (exponent + 127) << 23)


def codes(x: Array, multiplier: Array, element: ElementFormat, *, saturates: bool) -> Array:
    """uint8 codes of float32 x times its multiplier.

    Args:
        x: float32.
        multiplier: float32, of x's shape or a scalar.
        element: E4M3, E5M2 or INT8.
        saturates: whether a conversion to FP8 saturates, as the GPU's instruction does (NumPy's gives NaN or Inf).
    """
    xp = array_namespace(x)
    y = x * multiplier
    if element.signed == "complement":
        pattern = (y * 64.0 + _UNITS).view(xp.int32) - bits.constant_bits(_UNITS)
        code = xp.minimum(xp.maximum(pattern, -127), 127) & 0xFF
        return xp.astype(xp.where(_is_nan(x), element.nan_code, code), xp.uint8)
    if saturates:
        return xp.astype(y, FP8[element.name]).view(xp.uint8)
    narrow = xp.astype(xp.minimum(xp.maximum(y, -element.max), element.max), FP8[element.name]).view(xp.uint8)
    return xp.where(_is_nan(x), xp.asarray(element.nan_code, dtype=xp.uint8), narrow)


def _is_nan(x: Array) -> Array:
    return (x.view(array_namespace(x).int32) & bits.MAGNITUDE) > bits.INFINITY


def e2m1_codes(x: Array, multiplier: Array) -> Array:
    """int32 codes (sign above three magnitude bits) of float32 x times its multiplier; NaN gives 7.

    Below 1 the codes are half units apart, so adding a number whose spacing is half a unit rounds. From 1 on, the pattern
    is rounded to one mantissa bit.
    """
    xp = array_namespace(x)
    pattern = (x * multiplier).view(xp.int32)
    magnitude = xp.minimum(pattern & bits.MAGNITUDE, bits.constant_bits(6.0))
    # An integer operation stands between the product and the sum: as one fused operation they would round once.
    small = (magnitude.view(xp.float32) + _HALF_UNITS).view(xp.int32) - bits.constant_bits(_HALF_UNITS)
    large = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 0xFC
    code = xp.where(magnitude < bits.ONE, small, large) | ((pattern >> 28) & 8)
    return xp.where(_is_nan(x), 7, code)


def nvfp4_scales(amax: Array, nan: Array, multiplier: Array, tensor_scale: Array) -> tuple[Array, Array]:
    """(stored E4M3 scale as int32, multiplier as float32) of NVFP4 blocks.

    Args:
        amax: int32 bits of the blocks' amaxes.
        nan: whether the block holds a NaN.
        multiplier: int32 bits of the tensor's multiplier, of amax's shape or a scalar.
        tensor_scale: float32 reciprocal of it.
    """
    xp = array_namespace(amax)
    stored = scaling.nvfp4_scale(amax, multiplier, E2M1)
    decode = e4m3_values(xp.astype(stored, xp.uint8)) * tensor_scale
    inverse = scaling.clamped_reciprocal(decode.view(xp.int32))
    return xp.where(nan, E4M3_SCALE.nan_code, stored), inverse.view(xp.float32)


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


def e2m1_values(code: Array) -> Array:
    """float32 values of E2M1 codes (int32)."""
    xp = array_namespace(code)
    magnitude = code & 7
    normal = (magnitude << 22) + (126 << 23)
    value = xp.where(magnitude < 2, xp.where(magnitude == 0, 0, bits.constant_bits(0.5)), normal)
    return (value | ((code & 8) << 28)).view(xp.float32)
