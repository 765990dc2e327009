"""Views of codes and scales as the small dtypes of ml_dtypes, JAX and PyTorch, and back to bytes.

An 8-bit code is an element of its dtype, so only the dtype changes. ml_dtypes and JAX store narrower elements one per byte, so
packed codes are unpacked and packed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..formats import Format
from . import bits, layout
from .bits import Array

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy dtypes of values by name."""


def dtype_of(name: str) -> np.dtype:
    """Returns the NumPy dtype of a `native_dtype`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def view_codes(codes: Array, columns: int, format: Format) -> Array:
    """Returns codes uint8 [..., rows, bytes] as elements [..., rows, columns]; for NumPy arrays, and 8-bit codes of JAX
    arrays."""
    return layout.unpack(codes, format.element.bits, columns).view(dtype_of(format.element.native_dtype))


def view_scales(scales: Array, format: Format) -> Array:
    """Returns scales as numbers; fp32 scales are returned unchanged."""
    return scales.view(dtype_of(format.scale.native_dtype))


def stored_codes(codes: Array, format: Format) -> Array:
    """Returns codes as uint8 [..., rows, bytes] if they are elements of the format's dtype; returns other dtypes unchanged."""
    element = format.element
    if bits.dtype_name(codes) != element.native_dtype:
        return codes
    as_bytes = codes.view(np.uint8)
    return layout.pack(as_bytes & (2**element.bits - 1), element.bits) if element.packed else as_bytes


def stored_scales(scales: Array, format: Format) -> Array:
    """Returns scales in their storage dtype if they are elements of the format's dtype; returns other dtypes unchanged."""
    return scales.view(np.dtype(format.scale.dtype)) if bits.dtype_name(scales) == format.scale.native_dtype else scales
