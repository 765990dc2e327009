"""Rows as codes, quantized once as parts of one tensor of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.recipes import Cast

from ..custom_ops import part_ops
from ..custom_ops.collectives import max_reduce
from ..custom_ops.operand_ops import quantize_operand
from ..quantized_tensor.tensor import QuantizedTensor


def quantize_rows(x: Tensor, cast: Cast, eps: float, groups: Sequence[str], key: Tensor | None = None) -> list[Tensor]:
    """Quantizes this rank's rows of a matrix whose rows all ranks of a group have together.

    Args:
        x: [rows, columns].
        cast: how; with a format.
        eps: lifts amaxes.
        groups: names of the process groups whose ranks share the scale of the whole tensor, where the format has one.
        key: of stochastic rounding, int32 [2]; the random index counts this rank's own rows.

    Returns:
        Codes, scales and maybe tensor scale.
    """
    format = cast.format
    assert format is not None
    if not groups or not format.has_tensor_scale:
        return quantize_operand(x, format, None, row_key=key, eps=eps).row
    blocks, nan, tensor = part_ops.part_amaxes(x, format.name, False, False, [0, 0])
    if format.per_tensor:
        blocks = max_reduce(blocks, groups)
    else:
        tensor = max_reduce(tensor.view(1), groups).view(())
    return part_ops.quantize_part(x, [blocks, nan, tensor], key, format.name, False, False, [0, 0], list(x.shape), eps)


def joined(parts: Sequence[Tensor], format: Format) -> Tensor:
    """Lays what travels with each row into one row of bytes: its codes, and its scales where it has scales of its own."""
    codes, scales = parts[:2]
    if format.per_tensor:
        return codes
    return torch.cat([codes, as_bytes(scales)], 1)


def parted(rows: Tensor, format: Format, like: Sequence[Tensor]) -> list[Tensor]:
    """Undoes `joined`; scales of the whole tensor are those of `like`."""
    codes, scales, *tensor_scale = like
    if format.per_tensor:
        return [rows, scales]
    width = codes.shape[1]
    own = rows[:, width:].contiguous()
    own = own.view(scales.dtype) if own.numel() else scales.new_empty((len(rows), scales.shape[1]))
    return [rows[:, :width].contiguous(), own, *tensor_scale]


def as_bytes(rows: Tensor) -> Tensor:
    """Returns the bytes of a matrix, [rows, bytes]."""
    rows = rows.contiguous()
    if rows.numel():
        return rows.view(torch.uint8)
    return rows.new_empty((len(rows), rows.shape[1] * rows.itemsize), dtype=torch.uint8)


def tensor_of(parts: Sequence[Tensor], format: Format, columns: int, dtype: torch.dtype) -> QuantizedTensor:
    """Makes a quantized tensor of parts."""
    return QuantizedTensor(parts[0], parts[1], parts[2] if len(parts) > 2 else None, format, columns, dtype)
