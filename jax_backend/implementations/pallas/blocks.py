"""Arithmetic of the kernels as functions of blocks: plain arrays here, registers of a warpgroup in a kernel.

The definition (`definition.numerics`) uses integer arithmetic, which every library computes correctly; a GPU has faster
instructions. These functions use instructions that give the definition's bits: one fp32 product, and conversions that round to
nearest even. Scales follow `definition.scaling`, except that quotients for power-of-two scales are differences of exponents.
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
"""Repeats one value per block over the block's elements."""

FP8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}

_HALF_UNITS = 1.5 * 2.0**22  # fp32 numbers of this size are half units apart
_UNITS = 1.5 * 2.0**23  # fp32 numbers of this size are units apart
_HALF_UNITS_BITS, _UNITS_BITS = bits.constant_bits(_HALF_UNITS), bits.constant_bits(_UNITS)


def to_fp32(x: Array) -> Array:
    """Converts x to float32, exactly."""
    xp = array_namespace(x)
    return x if x.dtype == xp.float32 else xp.astype(x, xp.float32)


def largest(x: Array, axes: Sequence[int]) -> Array:
    """Returns the fp32 bits of x's largest magnitude along axes, ignoring NaN; compares 16-bit inputs in pairs."""
    xp = array_namespace(x)
    magnitude, infinity = _magnitude(x)
    # The offset makes a NaN's magnitude negative and keeps the order of all others.
    below = (0x7FFFFFFF if x.dtype == xp.float32 else 0x7FFF) - infinity
    shifted = _reduce(magnitude + below, axes)
    amax = xp.where(shifted < below, 0, shifted - below)
    if x.dtype == xp.float32:
        return amax
    if x.dtype == xp.float16:
        return xp.astype(xp.astype(amax, xp.int16).view(xp.float16), xp.float32).view(xp.int32)
    return xp.astype(amax, xp.int32) << 16


def holds_nan(x: Array, axes: Sequence[int]) -> Array:
    """Returns whether x holds a NaN along axes."""
    magnitude, infinity = _magnitude(x)
    return array_namespace(x).astype(_reduce(magnitude, axes), np.int32) > infinity


def _magnitude(x: Array) -> tuple[Array, int]:
    """Returns x's bits without the sign, and the bits of Inf."""
    xp = array_namespace(x)
    if x.dtype == xp.float32:
        return x.view(xp.int32) & bits.MAGNITUDE, bits.INFINITY
    return x.view(xp.int16) & 0x7FFF, 0x7C00 if x.dtype == xp.float16 else 0x7F80


def _reduce(x: Array, axes: Sequence[int]) -> Array:
    for axis in axes:
        x = array_namespace(x).max(x, axis=axis)
    return x


def scales(x: Array, axes: Sequence[int], format: Format, nominal: str, amax: Array | None = None) -> tuple[Array, Array]:
    """Returns (stored scale as int32, multiplier as float32) of blocks of an 8-bit format.

    `axes` are the axes of x within a block; `nominal` is that of `numerics.quantize`. `amax` is `largest(x, axes)`, if known.
    """
    stored, multiplier = scales_of_amax(largest(x, axes) if amax is None else amax, format, nominal)
    if not format.element.has_nan:
        stored = array_namespace(x).where(holds_nan(x, axes), format.scale.nan_code, stored)
    return stored, multiplier


def scales_of_amax(amax: Array, format: Format, nominal: str) -> tuple[Array, Array]:
    """Computes `scales`, without NaN, from amaxes as fp32 bits."""
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
    """Returns the fp32 bits of the IEEE quotient of two positive numbers given as bits, a normal; overflow gives Inf.

    The remainder of an approximate quotient of the significands, exact modulo 2^32, gives the correction in units.
    """
    xp = array_namespace(b)
    divisor, exponent = bits.split(b)
    dividend = (a & 0x7FFFFF) | 0x800000
    smaller = xp.astype(dividend < divisor, xp.int32)
    quotient = _near_quotient(dividend * 2.0**-23, (divisor + (bits.ONE - 0x800000)).view(xp.float32))
    # In units of its last place, the quotient is an integer below 2^25.
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
    """Returns a / b for numbers in [1, 2), with an error of at most two units in the last place, as on GPUs."""
    return a / b


def _wrapped(x: int) -> int:
    """Returns x modulo 2^32 as an int32."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _power_of_two(amax: Array, element: ElementFormat, maximum: int) -> Array:
    """Returns floor(log2(MAX / amax)); 0 for an amax of 0 or Inf, the exponent of `maximum` if the quotient exceeds fp32.

    The fp32 quotient has the same exponent, because it is never rounded up to a power of two: MAX is 1.75 * 2^emax, and the
    nearest quotient below a power of two is 2^-22.8 away from it, relative to a spacing of 2^-23.
    """
    xp = array_namespace(amax)
    # The quotient is below a power of two if amax's mantissa exceeds MAX's. A subnormal amax overflows like 2^-127.
    quotient = element.emax + 127 - ((amax + 0x1FFFFF) >> 23)
    quotient = xp.where(quotient > 127, (maximum >> 23) - 127, quotient)
    return xp.where((amax == 0) | (amax == bits.INFINITY), 0, quotient)


def _ceil_scale(amax: Array, element: ElementFormat) -> Array:
    """Returns E8M0 bytes by the ceil rule, from the product in its definition; see `scaling.e8m0_scale`."""
    xp = array_namespace(amax)
    product = (amax.view(xp.float32) * _fp32(1 / element.max)).view(xp.int32)
    # Round up to a power of two; half the smallest normal number and less gives byte 0.
    return xp.minimum(xp.where(product <= 0x400000, 0, (product + 0x7FFFFF) >> 23), 0xFE)


def _fp32(value: float) -> float:
    """Rounds a constant to fp32."""
    return float(np.float32(value))


def _exponent_bits(exponent: Array) -> Array:
    """Returns the fp32 bits of 2^exponent, -127 <= exponent <= 127."""
    xp = array_namespace(exponent)
    return xp.where(exponent == -127, 1 << 22, (exponent + 127) << 23)


def codes(x: Array, multiplier: Array, element: ElementFormat, *, on_gpu: bool) -> Array:
    """Returns uint8 codes (E4M3, E5M2 or INT8) of float32 x times its multiplier, of x's shape or a scalar.

    `on_gpu` says that conversions to FP8 saturate and computed NaNs are positive, as only the GPU's instructions guarantee.
    """
    xp = array_namespace(x)
    y = x * multiplier
    if element.signed == "complement":
        # The low bits of a number near _UNITS count units. NaN is positive on a GPU, so it clamps to 127, NaN's code.
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
    """Returns int32 codes (sign above three magnitude bits) of float32 x times its multiplier; NaN gives 7.

    Adding a number whose spacing is E2M1's at |y| rounds |y|: half a unit below 2, doubled above 2 and again above 4. The added
    bits count spacings, and each doubling skips two codes. `on_gpu` is that of `codes`.
    """
    xp = array_namespace(x)
    pattern = (x * multiplier).view(xp.int32)
    magnitude = xp.minimum(pattern & bits.MAGNITUDE, bits.constant_bits(6.0))
    power = xp.maximum(magnitude & bits.INFINITY, bits.ONE)
    # Integer operations separate product and sum, which would otherwise fuse and round only once.
    spaced = (magnitude.view(xp.float32) + power.view(xp.float32) * _HALF_UNITS).view(xp.int32)
    code = spaced - power + (power >> 22) - (_HALF_UNITS_BITS - bits.ONE + (bits.ONE >> 22))
    code = code | ((pattern >> 28) & 8)
    return code if on_gpu else xp.where(_is_nan(x), 7, code)


def nvfp4_scales(
    amax: Array, nan: Array, multiplier: Array, tensor_scale: Array, format: Format, *, on_gpu: bool
) -> tuple[Array, Array]:
    """Returns (stored E4M3 scale as int32, multiplier as float32) of NVFP4 blocks.

    `amax` holds int32 bits, `nan` whether the block holds a NaN. `multiplier` is the tensor's (float32, amax's shape or a
    scalar), `tensor_scale` its reciprocal.
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
    """Returns the float32 values of E4M3 codes (uint8)."""
    return array_namespace(stored).astype(stored.view(FP8["e4m3"]), np.float32)


def decode_scale(stored: Array, format: Format) -> Array:
    """Returns the float32 decode scales of stored fp32 or E8M0 scales."""
    xp = array_namespace(stored)
    if format.scale.dtype == "float32":
        return stored
    return scaling.e8m0_bits(xp.astype(stored, xp.int32)).view(xp.float32)


def values(code: Array, decode: Array, element: ElementFormat, dtype: str) -> Array:
    """Returns uint8 codes times their decode scale (float32), rounded to `dtype`; NaN is canonical."""
    xp = array_namespace(code)
    if element.signed == "complement":
        element_value = xp.astype(code.view(xp.int8), xp.float32) * (1 / 64)
    else:
        element_value = xp.astype(code.view(FP8[element.name]), xp.float32)
    return rounded(element_value * decode, dtype)


def rounded(value: Array, dtype: str) -> Array:
    """Rounds float32 values to `dtype`; NaN is canonical."""
    xp = array_namespace(value)
    nan = _is_nan(value)
    if dtype == "float32":
        return xp.where(nan, bits.NAN, value.view(xp.int32)).view(xp.float32)
    narrow = xp.astype(value, ml_dtypes.bfloat16 if dtype == "bfloat16" else xp.float16)
    canonical = xp.asarray(0x7FC0 if dtype == "bfloat16" else 0x7E00, dtype=xp.int16)
    return xp.where(nan, canonical, narrow.view(xp.int16)).view(narrow.dtype)


def e2m1_values(code: Array, *, on_gpu: bool) -> Array:
    """Returns the float32 values of E2M1 codes (int32).

    On a GPU, which keeps subnormals, the code's bits are an fp32 number 2^126 times too small.
    """
    xp = array_namespace(code)
    magnitude, sign = (code & 7) << 22, (code & 8) << 28
    if on_gpu:
        return (magnitude | sign).view(xp.float32) * 2.0**126
    # 0 and 0.5, then normal numbers.
    normal = xp.where(code & 6 == 0, (code & 1) * 126 << 23, magnitude + (126 << 23))
    return (normal | sign).view(xp.float32)
