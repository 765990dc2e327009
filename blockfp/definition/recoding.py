"""Codes of an operand in the other direction, from its rowwise codes alone.

A token that travels between ranks as codes (`sharding.dispatching`) is seen in high precision by its sender only. The weight's
gradient contracts tokens, in blocks along them. These blocks are quantized from the values that the rowwise codes stand for:

    columnwise(q) = quantize(dequantize(q) transposed)     the values in the nominal dtype; float32 for float16
                    codes transposed, scale as it is       where the whole tensor has one scale, and both have one format

So it is a function of codes, and the same on any rank that has a group's rows. Where scales are powers of two (MX, FP8 blocks)
a value changes only if it is below the smallest normal number of its new block: with E4M3, below 2^-13.8 of the largest there.
"""

from __future__ import annotations

from ..formats import Format
from . import layout, rotation, scaling
from .numerics import Quantized, dequantize, quantize
from .rounding import Key


def columnwise(
    quantized: Quantized,
    format: Format | str,
    into: Format | str,
    *,
    columns: int,
    nominal: str = "float32",
    rotate: bool = False,
    eps: float = 0.0,
    key: Key | None = None,
) -> Quantized:
    """Returns the codes and scales of the transposed matrix, [columns, rows], in blocks along the rows.

    Args:
        quantized: rows in blocks along their columns, [rows, columns].
        format: theirs.
        into: the format of the result.
        columns: how many there are, which packing hides.
        nominal: name of the dtype of what was quantized.
        rotate: the random Hadamard transform along the rows, before they are quantized.
        eps: lifts amaxes, see `numerics.quantize`.
        key: rounds to the new scales stochastically, see there.

    Raises:
        ValueError: the parts don't fit the format.
    """
    format, into = Format.parse(format), Format.parse(into)
    if keeps_codes(format, into, rotate):
        width = format.element.bits
        turned = layout.swap_matrix(layout.unpack(quantized.codes, width, columns))
        return Quantized(layout.pack(turned, width), quantized.scales, quantized.tensor_scale)
    values = dequantize(
        quantized.codes, quantized.scales, quantized.tensor_scale, format, value_dtype(nominal), columns=columns
    )
    turned = layout.swap_matrix(values)
    return quantize(rotation.rotate(turned) if rotate else turned, into, eps=scaling.eps_for(into, eps), key=key)


def value_dtype(nominal: str) -> str:
    """Returns the dtype of the values between: float16 may not hold what its own numbers are rounded to."""
    return "float32" if nominal == "float16" else nominal


def keeps_codes(format: Format, into: Format, rotate: bool) -> bool:
    """Says whether the result is the codes transposed."""
    return format is into and format.per_tensor and not rotate
