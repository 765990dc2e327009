"""Marks operands that hold an Inf, so that every element of their products is NaN.

Codes saturate: an Inf becomes the largest code, and where its scale is 1 nothing tells it from a finite value. So the scales
that products get of such an operand are NaN (byte 255 of E8M0). Codes, and what `quantize` returns, stay as the definition
says.

The CUDA kernels that quantize a whole operand see an Inf themselves, and mark it (kernels/cuda/exports.cu). Here is what marks
the others.

    on a CPU          the host looks, first at the scales: only where one is what an Inf leaves does it look at the values
    parts on a GPU    the amax where it is at hand; of MXFP8 the scales, where only an Inf has byte 254; others are read again
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockfp.definition.bits import INFINITY
from blockfp.formats import FP8_E4M3, Format

from .kernels import kernels_for

_OF_INF, _NAN = 254, 255  # E8M0


def mark(x: Tensor, directions: Sequence[tuple[Format, Sequence[Tensor]]], amax: Tensor | None = None) -> None:
    """Writes NaN into the scales of an operand that holds an Inf; those of other operands keep their bits.

    A NaN needs no mark: its code, or the scale of its block, is NaN already.

    Args:
        x: the operand, or this rank's part of it.
        directions: format and parts of each direction, the parts new memory. The last of them, the tensor scale or else the
            scales, goes into every element of a product.
        amax: int32 of one element, fp32 bits: the largest magnitude of the whole operand, where it is known.
    """
    if x.numel() and directions:
        formats, parts = zip(*directions, strict=True)
        marker(formats, x.is_cpu)(x, parts, amax)


def marker(formats: Sequence[Format], on_cpu: bool) -> Callable[[Tensor, Sequence[Sequence[Tensor]], Tensor | None], None]:
    """Plans `mark` for a format each direction; returns a function of the operand, the parts of each, and the amax."""
    bytes_of_scales = [format.scale.e8m0 for format in formats]
    # Of elements without NaN, the scale of a block that holds one is NaN too.
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
        # NaN is left out of it.
        pattern: Tensor = kernels_for(x).amax(x, FP8_E4M3).blocks if amax is None else amax
        largest = pattern.view(torch.float32).view(())
        for in_bytes, parts in zip(bytes_of_scales, directions, strict=True):
            if in_bytes:
                parts[-1].masked_fill_(~largest.isfinite(), _NAN)
            else:
                # Times zero: NaN of an Inf, nothing of all else.
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
