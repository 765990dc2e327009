"""Sums of matrix units: the bits of their steps, in integer arithmetic on any array library.

A `Summation` names the sums of one kind of matrix unit. Its step adds `length` products and the accumulator c at once:

    e  = the largest exponent of the products and c       exponents of factors, added; subnormals have the smallest normal one
    t  = trunc(term * 2^(fraction - e))                   each product and c, exact before it is truncated towards zero
    c' = trunc(sum of t * 2^(e - fraction))               the exact sum, truncated to fp32 with `mantissa` mantissa bits

A product's significand stays below 4 and isn't normalized. Zeros don't count for e, which is at least `floor`. Steps follow
each other along k, beginning with c = 0. This is the truncated fused dot-product-add of "MMA-Sim: Bit-Accurate Reference Model
of Tensor Cores and Matrix Cores" (arXiv 2511.10909), with the numbers of bits measured there; "Accurate Models of NVIDIA Tensor
Cores" (arXiv 2512.07004) measures V100, A100, H100 and B200. NaN results are canonical here, whatever a device writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from array_api_compat import array_namespace

from ..formats import ELEMENTS, ElementFormat
from . import bits, layout, wide
from .bits import Array


@dataclass(frozen=True)
class Summation:
    """How a matrix unit adds products.

    Attributes:
        name: such as "hopper_fp8".
        elements: names of the elements or float dtypes that it multiplies.
        length: number of products that are added at once.
        fraction: bits kept below the largest exponent; None: an IEEE fused multiply-add for each product, rounded to nearest.
        mantissa: mantissa bits of the accumulator, whose exponent has fp32's 8 bits.
        floor: smallest exponent to which terms are aligned.
        scale_block: number of elements that share a scale inside the matrix unit; None: it takes no scales.
        group: number of products that are added exactly before their scales multiply them; 1 for units without such groups.
        promotion: number of elements of k after which the kernel adds the accumulator to an fp32 sum; None: never.
    """

    name: str
    elements: tuple[str, ...]
    length: int
    fraction: int | None
    mantissa: int = 23
    floor: int = -133
    scale_block: int | None = None
    group: int = 1
    promotion: int | None = None

    def __str__(self) -> str:
        return self.name


_FP8 = ("e4m3", "e5m2")
_NARROW = (*_FP8, "e3m2", "e2m3", "e2m1")
_HALF = ("bfloat16", "float16")

SUMMATIONS = {
    summation.name: summation
    for summation in (
        Summation("fp32_in_order", (*_NARROW, *_HALF), 1, None, promotion=128),
        Summation("volta_fp16", ("float16",), 4, 23, floor=-131),
        Summation("turing_fp16", ("float16",), 8, 24, floor=-132),
        Summation("ampere_bf16", _HALF, 8, 24, floor=-132),
        Summation("ada_fp8", _FP8, 16, 13, mantissa=13, floor=-132),
        Summation("hopper_bf16", _HALF, 16, 25),
        Summation("hopper_fp8", _FP8, 32, 13, mantissa=13, promotion=128),
        Summation("blackwell_bf16", _HALF, 16, 25),
        Summation("blackwell_fp8", _NARROW, 32, 25),
        Summation("blackwell_mx", _NARROW, 32, 25, scale_block=32),
        Summation("blackwell_mxfp4", ("e2m1",), 64, 35, floor=-139, scale_block=32, group=16),
        Summation("blackwell_nvfp4", ("e2m1",), 64, 35, floor=-139, scale_block=16, group=16),
    )
}
"""All summations by name. "fp32_in_order" adds one product after another in fp32. "hopper_fp8" is this library's own kernel, of
which each step is one wgmma of k = 32."""


def named(summation: Summation | str) -> Summation:
    """Returns the summation of a name; raises ValueError for an unknown one."""
    if isinstance(summation, Summation):
        return summation
    if summation not in SUMMATIONS:
        raise ValueError(f"unknown summation {summation!r}, expected one of {', '.join(SUMMATIONS)}")
    return SUMMATIONS[summation]


class Terms(NamedTuple):
    """Numbers taken apart: sign * digits / 2^point * 2^exponent, all int32. Zeros and specials have digits 0.

    Attributes:
        digits: non-negative, below 2^(point + 1).
        exponent: of normal numbers their own, of subnormal ones the smallest normal exponent, of zeros far below all others.
        sign: 1 or -1.
        nan, infinite: bools; `infinite` is None for elements without infinities.
        point: number of fraction bits.
    """

    digits: Array
    exponent: Array
    sign: Array
    nan: Array
    infinite: Array | None
    point: int

    def part(self, start: int, stop: int) -> Terms:
        """Returns the terms of a range of the last axis."""
        fields = [None if x is None else x[..., start:stop] for x in self[:-1]]
        return Terms(*fields, self.point)  # type: ignore[arg-type]


_BELOW_ALL = -4096  # exponent of zeros; a product of two zeros stays far inside int32


def terms_of_codes(codes: Array, element: ElementFormat) -> Terms:
    """Takes codes apart, one per uint8."""
    xp = array_namespace(codes)
    code = xp.astype(codes, xp.int32)
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    negative = code >> (element.bits - 1) == 1
    nan, infinite = xp.zeros_like(negative), None
    if element.has_nan:
        top = ((1 << element.exponent_bits) - 1) << element.mantissa_bits
        infinities = element.exponent_bits == 5
        nan = magnitude > top if infinities else magnitude == element.nan_code
        infinite = magnitude == top if infinities else None
    return _terms(magnitude, negative, element.mantissa_bits, element.bias, nan, infinite)


def terms_of_powers(scales: Array) -> Terms:
    """Takes E8M0 bytes apart: powers of two."""
    xp = array_namespace(scales)
    stored = xp.astype(scales, xp.int32)
    one = xp.ones_like(stored)
    return Terms(one, stored - 127, one, stored == 0xFF, None, 0)


def terms_of_values(x: Array) -> Terms:
    """Takes bfloat16 or float16 values apart."""
    xp = array_namespace(x)
    mantissa, bias = {"bfloat16": (7, 127), "float16": (10, 15)}[bits.dtype_name(x)]
    pattern = xp.astype(x.view(xp.int16), xp.int32)
    magnitude, top = pattern & 0x7FFF, 0x7FFF >> mantissa << mantissa
    return _terms(magnitude, pattern < 0, mantissa, bias, magnitude > top, magnitude == top)


def _terms(magnitude: Array, negative: Array, mantissa: int, bias: int, nan: Array, infinite: Array | None) -> Terms:
    xp = array_namespace(magnitude)
    field = magnitude >> mantissa
    digits = (magnitude & ((1 << mantissa) - 1)) | (xp.astype(field > 0, xp.int32) << mantissa)
    zero = (digits == 0) | nan
    zero = zero if infinite is None else zero | infinite
    exponent = xp.where(zero, _BELOW_ALL, bits.at_least(field, 1) - bias)
    sign = 1 - 2 * xp.astype(negative, xp.int32)
    return Terms(xp.where(zero, 0, digits), exponent, sign, nan, infinite, mantissa)


def accumulate(a: Terms, b: Terms, c: Array, summation: Summation, scales: Sequence[Terms] | None = None) -> Array:
    """Adds products to accumulators: one step after another along k, without promotion.

    Args:
        a, b: terms [.., m, k] and [.., n, k].
        c: fp32 bits [.., m, n].
        summation: the matrix unit.
        scales: terms of the scales of a and b, [.., m or n, k / scale_block], for a unit that takes scales.

    Returns:
        fp32 bits [.., m, n].
    """
    block = summation.scale_block
    if (scales is None) != (block is None):
        raise ValueError(f"{summation} takes {'no scales' if block is None else f'a scale for {block} elements of both sides'}")
    for start in range(0, a.digits.shape[-1], summation.length):
        stop = start + summation.length
        ranged = None
        if scales is not None and block is not None:
            ranged = [x.part(start // block, -(-stop // block)) for x in scales]
        c = _step(a.part(start, stop), b.part(start, stop), c, summation, ranged)
    return c


def _pairs(a: Array, b: Array) -> tuple[Array, Array]:
    """Gives [.., m, k] and [.., n, k] the axes [.., m, 1, k] and [.., 1, n, k]."""
    return a[..., :, None, :], b[..., None, :, :]


def _step(a: Terms, b: Terms, c: Array, summation: Summation, scales: Sequence[Terms] | None) -> Array:
    if summation.fraction is None:
        return _special(wide.multiply_add(*_pairs(_fp32(a), _fp32(b)), c[..., None])[..., 0], a, b, c, scales)
    xp, fraction = array_namespace(c), summation.fraction
    own = _terms(c & bits.MAGNITUDE, c < 0, 23, 127, (c & bits.MAGNITUDE) >= bits.INFINITY, None)
    products = _products(a, b, scales) if summation.group == 1 else _grouped_products(a, b, scales, summation)
    largest = xp.max(products.exponent, axis=-1)
    top = bits.at_least(xp.where(own.exponent > largest, own.exponent, largest), summation.floor)
    terms = _aligned(products, top[..., None], fraction), _aligned(own, top, fraction)
    total = [xp.sum(x * products.sign, axis=-1, dtype=xp.int32) + y * own.sign for x, y in zip(*terms, strict=True)]
    negative, total = wide.magnitude(total)
    significand, position = wide.leading(total)
    exponent = bits.at_most(top + (position - fraction), 128)
    result = bits.truncate(xp.where(significand == 0, 1 << 25, significand), exponent, 23, -126, 25)
    result = bits.at_most(result, bits.INFINITY) & -(1 << (23 - summation.mantissa))
    # No zero is negative, not even of a negative sum that falls below fp32's smallest number.
    result = xp.where((significand == 0) | (result == 0), 0, result | (xp.astype(negative, xp.int32) << 31))
    return _special(result, a, b, c, scales)


def _fp32(x: Terms) -> Array:
    """Returns the fp32 bits of finite terms."""
    xp = array_namespace(x.digits)
    normalized = xp.astype(x.digits, xp.float32).view(xp.int32)
    magnitude = bits.fp32((normalized & 0x7FFFFF) | 0x800000, (normalized >> 23) - 127 + x.exponent - x.point)
    return xp.where(x.digits == 0, 0, magnitude) | (xp.astype(x.sign < 0, xp.int32) << 31)


def _products(a: Terms, b: Terms, scales: Sequence[Terms] | None) -> Terms:
    """Returns the products [.., m, n, k] of a step, which has at most one scale on each side, a power of two."""
    (left, right), (of_a, of_b), (sign_a, sign_b) = (_pairs(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    exponent = of_a + of_b
    if scales is not None:
        scale_a, scale_b = _pairs(scales[0].exponent, scales[1].exponent)
        exponent = exponent + (scale_a + scale_b)
    return Terms(left * right, exponent, sign_a * sign_b, a.nan, None, a.point + b.point)


def _grouped_products(a: Terms, b: Terms, scales: Sequence[Terms] | None, summation: Summation) -> Terms:
    """Returns exact sums of groups of products, times their scales: [.., m, n, groups].

    Scales alone give exponents, even to sums that are zero.
    """
    assert scales is not None
    assert summation.scale_block is not None
    xp = array_namespace(a.digits)
    emin = 1 - ELEMENTS[summation.elements[0]].bias
    # Integers in units of the smallest code.
    whole = [layout.split_groups((x.digits * x.sign) << bits.at_least(x.exponent - emin, 0), summation.group) for x in (a, b)]
    sums = xp.sum(whole[0][..., :, None, :, :] * whole[1][..., None, :, :, :], axis=-1, dtype=xp.int32)
    repeats = summation.scale_block // summation.group
    scaled = [[xp.repeat(x, repeats, axis=-1)[..., : sums.shape[-1]] for x in scale[:2]] for scale in scales]
    (left, right), (of_a, of_b) = (_pairs(x, y) for x, y in zip(*scaled, strict=True))
    negative = sums < 0
    digits = xp.where(negative, -sums, sums) * left * right
    point = a.point + b.point - 2 * emin + scales[0].point + scales[1].point
    return Terms(digits, of_a + of_b, 1 - 2 * xp.astype(negative, xp.int32), a.nan, None, point)


def _aligned(x: Terms, top: Array, fraction: int) -> wide.Wide:
    """Returns limbs of floor(|x| * 2^(fraction - top)). Their sum over a step fits in int32, with signs too."""
    left = fraction - x.point
    if fraction > 27:
        return wide.shifted(x.digits, x.exponent - top + left, 3)
    kept = (x.digits << max(left, 0)) >> bits.at_most(top - x.exponent - min(left, 0), 31)
    return [kept] if fraction < 20 else wide.carried([kept, array_namespace(kept).zeros_like(kept)])


def _special(result: Array, a: Terms, b: Terms, c: Array, scales: Sequence[Terms] | None) -> Array:
    """Replaces results of a step that has NaN or infinities among its operands or in the accumulator."""
    xp = array_namespace(result)
    nan = (c & bits.MAGNITUDE) > bits.INFINITY
    for x, y in ((a, b), *([] if scales is None else [scales])):
        nan = nan | xp.any(x.nan, axis=-1)[..., :, None] | xp.any(y.nan, axis=-1)[..., None, :]
    positive, negative = c == bits.INFINITY, c == (bits.INFINITY | bits.SIGN)
    if a.infinite is not None or b.infinite is not None:
        (inf_a, zero_a, sign_a), (inf_b, zero_b, sign_b) = (_kinds(x) for x in (a, b))
        nan = nan | (_count(inf_a, zero_b) + _count(zero_a, inf_b) > 0)
        # Infinite products, each counted once or twice, and the sum of their signs.
        number = _count(inf_a, 1 - zero_b) + _count(1 - zero_a, inf_b)
        signs = _count(inf_a * sign_a, (1 - zero_b) * sign_b) + _count((1 - zero_a) * sign_a, inf_b * sign_b)
        positive, negative = positive | (number + signs > 0), negative | (number - signs > 0)
    result = xp.where(positive, bits.INFINITY, xp.where(negative, bits.INFINITY | bits.SIGN, result))
    return xp.where(nan | (positive & negative), bits.NAN, result)


def _kinds(x: Terms) -> list[Array]:
    """Returns whether terms are infinite or zero, and their signs, as float32."""
    xp = array_namespace(x.digits)
    special = x.nan if x.infinite is None else x.nan | x.infinite
    infinite = xp.zeros_like(x.nan) if x.infinite is None else x.infinite
    return [xp.astype(kind, xp.float32) for kind in (infinite, (x.digits == 0) & ~special, x.sign)]


def _count(a: Array, b: Array) -> Array:
    """Returns a @ b^T of zeros and ones with signs, which is exact in any precision and order."""
    return array_namespace(a).matmul(a, layout.swap_matrix(b))
