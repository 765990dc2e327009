"""`Matrix`, an operand of a product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition.bits import INFINITY
from blockfp.formats import FP8_E4M3, Format

from ..dequantize_plans import dequantize_parts
from ..kernels import kernels_for


class Matrix(NamedTuple):
    """An operand of a product, [size, contracted].

    Attributes:
        parts: codes, scales and any tensor scale; or the values alone; or one `QuantizedTensor`, which has its own origin.
        format: format of the codes; None for values.
        origin: (row, column) of the first element in the matrix from whose corner blocks are counted.
        transposed: whether it is stored as [contracted, size].
        laid: whether the parts are laid out as the CUDA library's product reads them (`OperandCast.laid`): scales of 1x128 or
            of rows as [blocks, size rounded up to 4], and so those of MX, whose codes are aligned.
    """

    parts: Sequence[Tensor]
    format: Format | None
    origin: tuple[int, int] = (0, 0)
    transposed: bool = False
    laid: bool = False

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


# ---- overflow


_OF_INF, _NAN = 254, 255  # E8M0


def mark(x: Tensor, directions: Sequence[tuple[Format, Sequence[Tensor]]], amax: Tensor | None = None) -> None:
    """Writes NaN into the scales of an operand that contains an Inf; other operands are unchanged.

    A NaN needs no mark, since its code or its block's scale is NaN already. x is the operand or this rank's shard. `directions`
    holds each direction's format and parts; the last part, the tensor scale or else the scales, is overwritten. `amax`, int32
    [1] as fp32 bits, is the whole operand's if known.
    """
    if x.numel() and directions:
        formats, parts = zip(*directions, strict=True)
        marker(formats, x.is_cpu)(x, parts, amax)


def marker(formats: Sequence[Format], on_cpu: bool) -> Callable[[Tensor, Sequence[Sequence[Tensor]], Tensor | None], None]:
    """Plans `mark` for formats by direction; returns a function of the operand, each direction's parts, and the amax."""
    bytes_of_scales = [format.scale.e8m0 for format in formats]
    # Without NaN codes, a block with a NaN has scale byte 255, which the test below would take for an Inf.
    tell = all(format.scale.e8m0 and format.element.has_nan for format in formats)

    def on_the_host(x: Tensor, directions: Sequence[Sequence[Tensor]], amax: Tensor | None) -> None:
        if _overflows(x, directions[0][-1], amax):
            for in_bytes, parts in zip(bytes_of_scales, directions, strict=True):
                parts[-1].fill_(_NAN if in_bytes else math.nan)

    def on_the_device(x: Tensor, directions: Sequence[Sequence[Tensor]], amax: Tensor | None) -> None:
        if amax is None and tell:
            overflow = directions[0][1].amax() >= _OF_INF
            for parts in directions:
                parts[1].masked_fill_(overflow, _NAN)
            return
        # This amax ignores NaN.
        pattern: Tensor = kernels_for(x).amax(x, FP8_E4M3).blocks if amax is None else amax
        largest = pattern.view(torch.float32).view(())
        for in_bytes, parts in zip(bytes_of_scales, directions, strict=True):
            if in_bytes:
                parts[-1].masked_fill_(~largest.isfinite(), _NAN)
            else:
                # Times zero: NaN for an Inf, otherwise no change.
                parts[-1].add_(largest, alpha=0)

    return on_the_host if on_cpu else on_the_device


def _overflows(x: Tensor, factor: Tensor, amax: Tensor | None) -> bool:
    if amax is not None:
        return int(amax) >= INFINITY
    if factor.dtype is torch.uint8:
        suspect = int(factor.max()) >= _OF_INF
    elif factor.numel() == 1:
        suspect = float(factor) == 1
    else:
        suspect = bool((factor == 1).any())
    return suspect and bool(x.isinf().any())
