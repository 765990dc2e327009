"""`Matrix`, an operand of a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.formats import Format

from .dequantize_plans import dequantize_parts


class Matrix(NamedTuple):
    """An operand of a product, [size, contracted].

    Attributes:
        parts: codes, scales and maybe tensor scale; the values alone; or a `QuantizedTensor`, which knows its own origin.
        format: of the codes; None for values.
        origin: (row, column) of its first element in the matrix whose blocks are counted.
        transposed: whether it is stored as [contracted, size].
        ordered: whether its scales of 1x128 come as the CUDA library's product reads them, [blocks, size filled up to fours].
        aligned: whether its MX codes were quantized straight to those of `definition.alignment`, and its scales are `ordered`.
    """

    parts: Sequence[Tensor]
    format: Format | None
    origin: tuple[int, int] = (0, 0)
    transposed: bool = False
    ordered: bool = False
    aligned: bool = False

    @property
    def is_one_tensor(self) -> bool:
        """True for a `QuantizedTensor`, False for parts."""
        return self.format is not None and len(self.parts) == 1

    @property
    def factor(self) -> Tensor:
        """The scale of the whole tensor, float32 of one element, of formats that have one."""
        return self.parts[-1]

    def values(self, dtype: torch.dtype, columns: int, *, factored: bool = False) -> Tensor:
        """The values in `dtype`; `factored` leaves out the scale of the whole tensor."""
        if self.format is None:
            return self.parts[0].to(dtype)
        parts = self.parts
        if factored and len(parts) == 2 and self.format.per_tensor:
            parts = [parts[0], torch.ones_like(parts[1])]
        return dequantize_parts(parts, self.format, dtype, columns, self.origin, factored=factored and len(parts) > 2)
