"""Codes and scales in the small dtypes that ml_dtypes, JAX and PyTorch have, instead of bytes, and back.

An 8-bit code is an element of its dtype, so the bytes are only called otherwise. ml_dtypes and JAX keep narrower elements one a
byte: their codes are unpacked and packed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..formats import Format
from . import bits, layout
from .bits import Array

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy's dtypes of values, by name."""


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a `native_dtype`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def view_codes(codes: Array, columns: int, format: Format) -> Array:
    """Codes as elements [..., rows, columns]; of NumPy arrays, and of JAX arrays of 8 bits.

    Args:
        codes: uint8 [..., rows, bytes].
        columns: length of the last axis.
        format: their format.
    """
    return layout.unpack(codes, format.element.bits, columns).view(dtype_of(format.element.native_dtype))


def view_scales(scales: Array, format: Format) -> Array:
    """Scales as numbers: fp32 ones as they are."""
    return scales.view(dtype_of(format.scale.native_dtype))


def stored_codes(codes: Array, format: Format) -> Array:
    """Codes as uint8 [..., rows, bytes], where they are elements of the format's own dtype; of another dtype as they are."""
    element = format.element
    if bits.dtype_name(codes) != element.native_dtype:
        return codes
    as_bytes = codes.view(np.uint8)
    return layout.pack(as_bytes & (2**element.bits - 1), element.bits) if element.packed else as_bytes


def stored_scales(scales: Array, format: Format) -> Array:
    """Scales as they are stored, where they are of the format's own dtype; of another dtype as they are."""
    return scales.view(np.dtype(format.scale.dtype)) if bits.dtype_name(scales) == format.scale.native_dtype else scales
