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
        parts: codes, scales and any tensor scale; or the values alone; or one `QuantizedTensor`, which has its own origin.
        format: format of the codes; None for values.
        origin: (row, column) of the first element in the matrix from whose corner blocks are counted.
        transposed: whether it is stored as [contracted, size].
        ordered: whether 1x128 scales are stored as the CUDA library's product reads them, [blocks, size rounded up to 4].
        aligned: whether MX codes were aligned when quantized (`definition.alignment`); scales are then `ordered`.
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
        """The tensor scale, float32 of one element; only for formats that have one."""
        return self.parts[-1]

    def values(self, dtype: torch.dtype, columns: int, *, factored: bool = False) -> Tensor:
        """Returns the values in `dtype`; `factored` leaves out the tensor scale."""
        if self.format is None:
            return self.parts[0].to(dtype)
        parts = self.parts
        if factored and len(parts) == 2 and self.format.per_tensor:
            parts = [parts[0], torch.ones_like(parts[1])]
        return dequantize_parts(parts, self.format, dtype, columns, self.origin, factored=factored and len(parts) > 2)
