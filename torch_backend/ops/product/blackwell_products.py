"""Products of MX and NVFP4 operands on Blackwell's matrix units, through torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from blockfp.definition import layout
from blockfp.formats import Format

from ..library import view_codes, view_scales
from .matrix import Matrix


def _elements(a: Matrix, b: Matrix) -> tuple[list[Tensor], list[Format]]:
    formats = [x.format for x in (a, b) if x.format is not None]
    return [view_codes(x.parts[0], f) for x, f in zip((a, b), formats, strict=True)], formats


def _interleaved(x: Matrix) -> Tensor:
    """Returns one scale for each row and block along k, in the matrix units' order."""
    assert x.format is not None
    assert x.format.block is not None
    codes, scales = x.parts[:2]
    if x.format.block[0] > 1:
        scales = layout.repeat_scales(scales, x.format.block[0], codes.shape[0])
    return layout.interleave_scales(scales)


def _mx(a: Matrix, b: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [view_scales(_interleaved(x), f) for x, f in zip((a, b), formats, strict=True)]
    kind, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    sums = dtype if bias is None else torch.float32
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kind, scales[1], kind, swizzle, swizzle, output_dtype=sums)
    return out if bias is None else (out + bias).to(dtype)


def _nvfp4(a: Matrix, b: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [[view_scales(_interleaved(x), f), x.factor] for x, f in zip((a, b), formats, strict=True)]
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    sums = dtype if bias is None else torch.float32
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kinds, scales[1], kinds, swizzles, swizzles, output_dtype=sums)
    return out if bias is None else (out + bias).to(dtype)


BLACKWELL = {"mx": _mx, "nvfp4": _nvfp4}
"""Products by route mode: (a, b, bias, dtype) -> a @ b^T + bias."""
