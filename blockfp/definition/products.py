"""Products with defined bits: what a kernel does around the sums of matrix units (`matrix_units`), on any array library.

`product` adds promotion, scales, bias, accumulation and the rounding of the result. The library's own Hopper kernel computes
"hopper_fp8" and "hopper_bf16"; `kernels.native.product` and `jax_backend.implementations.product` run the same on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from ..formats import ELEMENTS, Format
from . import bits, layout, wide
from .bits import Array
from .matrix_units import SUMMATIONS, Summation, Terms, accumulate, named, terms_of_codes, terms_of_powers, terms_of_values


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

    def converted(self, convert: Callable[[Any], Any]) -> Operand:
        """Returns the same arrays in another library."""
        return self._replace(codes=convert(self.codes), scales=None if self.scales is None else convert(self.scales))


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
    return bits.to_float(multiply(*sides(a, b, summation), summation, bias, addend), dtype)


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


def _side(x: Operand, summation: Summation) -> Side:
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


def multiply(a: Side, b: Side, summation: Summation, bias: Array | None = None, addend: Array | None = None) -> Array:
    """Returns the fp32 bits of `product` before they are rounded to a dtype."""
    xp, left, right = array_namespace(a.codes), a.terms(), b.terms()
    shape = (*a.codes.shape[:-1], b.codes.shape[-2])
    zero = xp.zeros(shape, dtype=xp.int32, **layout.on_device_of(a.codes))
    one, negative_zero = zero + bits.ONE, zero | bits.SIGN
    of_parts = a.of_parts or b.of_parts
    if summation.scale_block is not None:
        total = accumulate(left, right, zero, summation, [terms_of_powers(x.scales) for x in (a, b)])
    elif summation.promotion is None:
        total = accumulate(left, right, zero, summation)
    else:
        total, scales = zero, [bits.from_float(x.scales) for x in (a, b)]
        for index, start in enumerate(range(0, a.codes.shape[-1], summation.promotion)):
            stop = start + summation.promotion
            sums = accumulate(left.part(start, stop), right.part(start, stop), zero, summation)
            factor = one
            if of_parts:
                of_a, of_b = (x[..., min(index, x.shape[-1] - 1)] for x in scales)
                factor = wide.multiply_add(of_a[..., :, None], of_b[..., None, :], negative_zero)
            total = wide.multiply_add(factor, sums, total)
    if summation.scale_block is None and not of_parts:
        for side in (a, b):
            total = wide.multiply_add(total, zero + bits.from_float(side.scales), negative_zero)
    for other in (None if bias is None else bias[..., None, :], addend):
        if other is not None:
            total = wide.multiply_add(total, one, zero + bits.from_float(other))
    return total


def sides(a: Operand, b: Operand, summation: Summation) -> tuple[Side, Side]:
    """Lays out both operands; raises ValueError if they have different lengths, or the summation doesn't take them."""
    left, right = _side(a, summation), _side(b, summation)
    if left.codes.shape[-1] != right.codes.shape[-1]:
        raise ValueError(f"a and b must have rows of one length, got {left.codes.shape[-1]} and {right.codes.shape[-1]}")
    return left, right


def _promoted(format: Format, summation: Summation) -> bool:
    """Returns whether scales per row or block fit into promotion."""
    assert format.block is not None
    return summation.promotion is not None and (format.per_row or format.block[1] == summation.promotion)
