"""Products with defined bits: what a device's matrix units add, in integer arithmetic on any array library.

A `Summation` names the sums of one kind of matrix unit. Its step adds `length` products and the accumulator c at once:

    e  = the largest exponent of the products and c       exponents of factors, added; subnormals have the smallest normal one
    t  = trunc(term * 2^(fraction - e))                   each product and c, exact before it is truncated towards zero
    c' = trunc(sum of t * 2^(e - fraction))               the exact sum, truncated to fp32 with `mantissa` mantissa bits

A product's significand stays below 4 and isn't normalized. Zeros don't count for e, which is at least `floor`. Steps follow
each other along k, beginning with c = 0. This is the truncated fused dot-product-add of "MMA-Sim: Bit-Accurate Reference Model
of Tensor Cores and Matrix Cores" (arXiv 2511.10909), with the numbers of bits measured there; "Accurate Models of NVIDIA Tensor
Cores" (arXiv 2512.07004) measures V100, A100, H100 and B200. NaN results are canonical here, whatever a device writes.

`product` adds what a kernel does around the steps: promotion, scales, bias, accumulation and the rounding of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from array_api_compat import array_namespace

from ..formats import E4M3, ELEMENTS, ElementFormat, Format
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


class Operand(NamedTuple):
    """One side of a product.

    Attributes:
        codes: uint8 codes [.., rows, bytes] in their stored form, or bfloat16 or float16 values [.., rows, k].
        scales: scales in their stored form; for values, one float32, or None for 1.
        format: the format of the codes; None for values.
    """

    codes: Array
    scales: Array | None
    format: Format | None = None


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


def product(
    a: Operand,
    b: Operand,
    summation: Summation | str,
    *,
    dtype: str = "float32",
    bias: Array | None = None,
    addend: Array | None = None,
) -> Array:
    """Returns a @ b^T with the bits of a kernel that adds by this summation.

    With scales per block or row, every `promotion` elements of k:  total = fma(mul(scale_a, scale_b), sums, total), in fp32 and
    ascending order. Without:  total = total + sums  every `promotion` elements, or the sums of all of k, and at the end
    total = mul(mul(total, scale_a), scale_b). Then  total + bias,  + addend  in fp32, and one rounding to nearest even. The
    order of k is all that matters: tiles and other rows change nothing.

    Args:
        a, b: operands of [.., m, k] and [.., n, k].
        summation: a `Summation` or its name.
        dtype: of the result.
        bias: [.., n] in any float dtype.
        addend: [.., m, n], what the result is accumulated into.

    Raises:
        ValueError: the summation has no such operands.
    """
    summation = named(summation)
    left, right = sides(a, b, summation)
    xp, (of_a, of_b) = array_namespace(a.codes), (left.terms(), right.terms())
    shape = (*a.codes.shape[:-1], b.codes.shape[-2])
    zero = xp.zeros(shape, dtype=xp.int32, **layout.on_device_of(a.codes))
    one, negative_zero = zero + bits.ONE, zero | bits.SIGN
    if summation.scale_block is not None:
        total = accumulate(
            of_a, of_b, zero, summation, [terms_of_scales(x.scales, y.format) for x, y in ((left, a), (right, b))]
        )
    elif summation.promotion is None:
        total = accumulate(of_a, of_b, zero, summation)
    else:
        total, of_parts = zero, left.of_parts or right.of_parts
        scales = [bits.from_float(x.scales) for x in (left, right)]
        for index, start in enumerate(range(0, left.codes.shape[-1], summation.promotion)):
            stop = start + summation.promotion
            sums = accumulate(of_a.part(start, stop), of_b.part(start, stop), zero, summation)
            factor = one
            if of_parts:
                scale_a, scale_b = (x[..., min(index, x.shape[-1] - 1)] for x in scales)
                factor = wide.multiply_add(scale_a[..., :, None], scale_b[..., None, :], negative_zero)
            total = wide.multiply_add(factor, sums, total)
    if summation.scale_block is None and not (left.of_parts or right.of_parts):
        for each in (left, right):
            total = wide.multiply_add(total, zero + bits.from_float(each.scales), negative_zero)
    for other in (None if bias is None else bias[..., None, :], addend):
        if other is not None:
            total = wide.multiply_add(total, one, zero + bits.from_float(other))
    return bits.to_float(total, dtype)


class Side(NamedTuple):
    """One operand as a matrix unit reads it.

    Attributes:
        codes: uint8, one code per element, or bfloat16 or float16 values.
        kind: name of the element or dtype.
        scales: of rows or blocks repeated for each row: float32 [.., rows, parts of k], or E8M0 bytes [.., rows, blocks] for a
            unit that takes scales; otherwise one float32 for all.
        of_parts: whether scales multiply the sums of a part of k or of a row.
    """

    codes: Array
    kind: str
    scales: Array
    of_parts: bool = False

    def terms(self) -> Terms:
        """Takes the codes apart."""
        return terms_of_codes(self.codes, ELEMENTS[self.kind]) if self.kind in ELEMENTS else terms_of_values(self.codes)


def side(x: Operand, summation: Summation) -> Side:
    """Lays out one operand for a matrix unit; raises ValueError if the summation doesn't take it."""
    xp, format = array_namespace(x.codes), x.format
    kind = bits.dtype_name(x.codes) if format is None else format.element.name
    if kind not in summation.elements:
        fitting = [name for name, other in SUMMATIONS.items() if kind in other.elements]
        raise ValueError(f"{summation} multiplies {', '.join(summation.elements)}, not {kind}; these do: {', '.join(fitting)}")
    if format is None:
        one = xp.ones((1, 1), dtype=xp.float32, **layout.on_device_of(x.codes))
        return Side(x.codes, kind, one if x.scales is None else xp.reshape(x.scales, (1, 1)))
    element, block, rows = format.element, format.block, x.codes.shape[-2]
    codes = layout.unpack(x.codes, element.bits, x.codes.shape[-1] * 8 // element.bits)
    if summation.scale_block is not None:
        if block is None or block[1] != summation.scale_block or format.scale.two_level:
            raise ValueError(f"{summation} takes E8M0 scales of {summation.scale_block} elements, not {format}")
    elif format.scale.dtype != "float32" or (block is not None and not _promoted(format, summation)):
        fits = f"blocks of {summation.promotion}, rows or the tensor" if summation.promotion else "the tensor"
        raise ValueError(f"{summation} takes float32 scales of {fits}, not {format}")
    if block is None:
        return Side(codes, kind, x.scales)
    return Side(codes, kind, layout.repeat_scales(x.scales, block[0], rows), summation.scale_block is None)


def sides(a: Operand, b: Operand, summation: Summation) -> tuple[Side, Side]:
    """Lays out both operands; raises ValueError if they have different lengths, or the summation doesn't take them."""
    left, right = side(a, summation), side(b, summation)
    if left.codes.shape[-1] != right.codes.shape[-1]:
        raise ValueError(f"a and b must have rows of one length, got {left.codes.shape[-1]} and {right.codes.shape[-1]}")
    return left, right


def _promoted(format: Format, summation: Summation) -> bool:
    """Returns whether scales per row or block fit into promotion."""
    assert format.block is not None
    return summation.promotion is not None and (format.per_row or format.block[1] == summation.promotion)


def terms_of_scales(scales: Array, format: Format | None) -> Terms:
    """Takes one-byte scales apart: powers of two, or E4M3."""
    xp = array_namespace(scales)
    assert format is not None
    if not format.scale.e8m0:
        return terms_of_codes(scales, E4M3)
    stored = xp.astype(scales, xp.int32)
    one = xp.ones_like(stored)
    return Terms(one, stored - 127, one, stored == format.scale.nan_code, None, 0)


def named(summation: Summation | str) -> Summation:
    """Returns the summation of a name; raises ValueError for an unknown one."""
    if isinstance(summation, Summation):
        return summation
    if summation not in SUMMATIONS:
        raise ValueError(f"unknown summation {summation!r}, expected one of {', '.join(SUMMATIONS)}")
    return SUMMATIONS[summation]
