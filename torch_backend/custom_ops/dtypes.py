"""torch's dtypes of values, and views of codes and scales as numbers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from blockfp.definition.bits import FLOAT_DTYPES
from blockfp.formats import ELEMENTS, Format

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in FLOAT_DTYPES)
"""Dtypes that can be quantized and dequantized to."""

# torch's 4-bit dtype holds two codes; it has no 6-bit dtype.
_CODES = {e.name: getattr(torch, e.native_dtype + ("_x2" if e.bits == 4 else ""), None) for e in ELEMENTS.values()}
_SCALES = {name: getattr(torch, name) for name in ("float8_e8m0fnu", "float8_e4m3fn", "float32")}


@cache
def name_of(dtype: torch.dtype) -> str:
    """Returns the core's name of a dtype: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def view_codes(codes: Tensor, format: Format) -> Tensor:
    """Returns a view of codes as elements, 4-bit ones as pairs; raises TypeError for 6-bit elements."""
    dtype = _CODES[format.element.name]
    if dtype is None:
        raise TypeError(
            f"torch has no dtype for {format.element}: q.codes has four of them in three bytes, and "
            "blockfp.definition.layout.unpack one a byte"
        )
    return codes.view(dtype)


def view_scales(scales: Tensor, format: Format) -> Tensor:
    """Returns a view of scales as numbers; fp32 scales unchanged."""
    return scales.view(_SCALES[format.scale.native_dtype])


def stored(codes: Tensor, scales: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Returns codes and scales as uint8 if they have the format's native dtypes; other dtypes unchanged."""
    if codes.dtype is _CODES[format.element.name]:
        codes = codes.view(torch.uint8)
    if scales.dtype is _SCALES[format.scale.native_dtype] and format.scale.dtype == "uint8":
        scales = scales.view(torch.uint8)
    return codes, scales
