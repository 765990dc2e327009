"""Scales of quantized values that change a little: the previous scales, or these times a power of two.

A weight without a master copy exists only as codes. An optimizer step dequantizes it, moves it and rounds it back. If scales
were recomputed from amaxes, the values of all elements would change with the largest one of their block or tensor. So scales
are kept and only change by powers of two, which change the codes of a float exactly.

    top  = mul(MAX, decode scale)      for a tensor scale: mul(MAX, mul(240, tensor scale))

A scale is multiplied by 2^k, with the k nearest to 0 that gives

    top / 4  <  new amax  <=  top

Nothing saturates, so the largest elements are rounded like all others. The window spans two binades. With a single binade, an
amax near its edge would move the scale up and down repeatedly, and each increase rounds the codes that become subnormal (two of
E2M1's six, all of INT8's).

A zero or infinite amax keeps the scale. A scale that is 0, NaN, infinite or negative counts as 1. fp32 scales don't become
subnormal, and E8M0 scales stay within 0..254. With two levels, the tensor scale is updated first; a block's E4M3 scale S then
becomes S * 2^(its k - the tensor's k), so that the product of both changes by the block's k. If S would lose a bit below 2^-9,
it is raised as far as needed to lose none. S never has to exceed 448: 240 is E4M3's largest significand in the last binade that
holds all significands.

The result depends only on the old scale and the new amax, so ranks that share a block or a tensor agree.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from ..formats import E4M3, ElementFormat, Format
from . import bits
from .bits import Array
from .scaling import magnitude_bits

_HIGHEST_SCALE = bits.constant_bits(240.0)
# An E4M3 number is an integer times 2^-9, its smallest value; the largest integer has exponent 17.
_ONE, _HIGHEST, _MOST = 512, 17, 448 * 512


def scales(
    stored: Array, tensor_scale: Array | None, amax: Array, tensor_amax: Array | None, format: Format
) -> tuple[Array, Array | None]:
    """Returns the scales for new amaxes as int32 (bytes or fp32 bits) and, with two levels, the tensor scale's bits of shape
    ().

    `stored` and `tensor_scale` (float32) are the present scales. `amax` holds the int32 bits of the blocks' largest magnitudes
    (from `numerics.amax`), `tensor_amax` the tensor's.
    """
    xp, element = array_namespace(stored), format.element
    if format.scale.dtype == "float32":
        return _fp32_scale(stored.view(xp.int32), amax, element), None
    stored = xp.astype(stored, xp.int32)
    if format.scale.e8m0:
        stored = xp.where(stored == 0xFF, 127, stored)
        significand, exponent = bits.split(xp.full_like(stored, bits.constant_bits(element.max)))
        k = _k((significand, exponent + stored - 127), amax)
        return bits.at_most(bits.at_least(stored + k, 0), 0xFE), None
    assert tensor_scale is not None
    assert tensor_amax is not None
    before = _usable(tensor_scale.view(xp.int32))
    tensor = _fp32_scale(before, tensor_amax, element, under=_HIGHEST_SCALE)
    moved = bits.split(tensor)[1] - bits.split(before)[1]
    usable = (stored > 0) & (stored < E4M3.nan_code)
    decode = bits.multiply(
        bits.split(magnitude_bits(xp.where(usable, stored, _code_of(xp.full_like(stored, _ONE))), E4M3)),
        bits.split(xp.zeros_like(stored) + before),
    )
    k = _k(_times(decode, element.max), amax)
    digits = xp.where(usable, _integer_of(stored), _ONE)
    lowest = _exponent(digits & -digits)
    shift = bits.at_most(k - moved, _HIGHEST + 1)
    up = digits << bits.at_least(xp.where(shift > _HIGHEST + 1 - _exponent(digits), _HIGHEST + 1 - _exponent(digits), shift), 0)
    down = digits >> xp.where(-shift > lowest, lowest, bits.at_least(-shift, 0))
    digits = bits.at_most(xp.where(shift > 0, up, down), _MOST)
    return xp.where((stored == 0) & (amax == 0), 0, _code_of(digits)), tensor.reshape(())


def _fp32_scale(pattern: Array, amax: Array, element: ElementFormat, *, under: int = bits.ONE) -> Array:
    """Returns the fp32 bits of the new scale; `under` holds the fp32 bits of the largest block scale below a tensor scale."""
    xp = array_namespace(pattern)
    pattern = _usable(pattern)
    significand, exponent = bits.split(pattern)
    level = bits.multiply((significand, exponent), bits.split(xp.full_like(pattern, under)))
    moved = exponent + _k(_times(level, element.max), amax)
    moved = xp.where(moved < exponent, xp.where(exponent < -126, exponent, bits.at_least(moved, -126)), moved)
    normal = ((bits.at_least(moved, -126) + 127) << 23) | (significand & 0x7FFFFF)
    return xp.where(moved == exponent, pattern, normal)


def _usable(pattern: Array) -> Array:
    return array_namespace(pattern).where((pattern > 0) & (pattern < bits.INFINITY), pattern, bits.ONE)


def _times(number: tuple[Array, Array], constant: float) -> tuple[Array, Array]:
    like = array_namespace(number[0]).full_like(number[0], bits.constant_bits(constant))
    return bits.multiply(number, bits.split(like))


def _k(top: tuple[Array, Array], amax: Array) -> Array:
    """Returns the exponent k nearest to 0 for which top * 2^k / 4 < amax <= top * 2^k."""
    xp = array_namespace(amax)
    significand, exponent = bits.split(amax)
    # top * 2^needed is the smallest such product that is at least amax.
    needed = exponent - top[1] + xp.astype(significand > top[0], xp.int32)
    return xp.where((amax == 0) | (amax == bits.INFINITY), 0, xp.where(needed < 0, bits.at_most(needed + 1, 0), needed))


def _exponent(integer: Array) -> Array:
    """Returns floor(log2) of integers from 1 to 2^24."""
    xp = array_namespace(integer)
    return (xp.astype(integer, xp.float32).view(xp.int32) >> 23) - 127


def _integer_of(code: Array) -> Array:
    """Converts a non-negative E4M3 code (not NaN) to an integer in units of 2^-9."""
    xp = array_namespace(code)
    field, mantissa = code >> 3, code & 7
    return xp.where(field == 0, mantissa, (8 + mantissa) << bits.at_least(field - 1, 0))


def _code_of(integer: Array) -> Array:
    """Converts an integer with at most four significant bits, in units of 2^-9, to its E4M3 code."""
    xp = array_namespace(integer)
    exponent = _exponent(integer)
    normal = ((exponent - 2) << 3) | ((integer >> bits.at_least(exponent - 3, 0)) & 7)
    return xp.where(integer < 8, integer, normal)
