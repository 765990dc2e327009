"""Columnwise codes of an operand, computed from its rowwise codes alone.

If a token travels between ranks as codes (`sharding.dispatching`), only the sender has its high-precision values. The weight
gradient contracts tokens, so it needs blocks along them, which are quantized from the values of the rowwise codes:

    columnwise(q) = quantize(dequantize(q) transposed)     in the nominal dtype; in float32 for float16
                    transposed codes, same scale           if one scale per tensor applies and both formats are the same

The result only depends on codes, so every rank that has a group's rows gets the same. With power-of-two scales (MX, FP8 blocks)
a value changes only if it is below the smallest normal number of its new block; with E4M3, below 2^-13.8 of the block's
largest.
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
    """Returns codes and scales of the transposed matrix, [columns, rows], in blocks along the rows.

    Args:
        quantized: codes and scales of [rows, columns] in blocks along the columns.
        format: format of `quantized`.
        into: format of the result.
        columns: number of columns, which packed codes don't show.
        nominal: name of the original's dtype.
        rotate: whether to apply the random Hadamard transform along the rows first.
        eps, key: see `numerics.quantize`.

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
    """Returns the dtype of the intermediate values; float16 may overflow, so it becomes float32."""
    return "float32" if nominal == "float16" else nominal


def keeps_codes(format: Format, into: Format, rotate: bool) -> bool:
    """Returns whether the result is just the transposed codes."""
    return format is into and format.per_tensor and not rotate
