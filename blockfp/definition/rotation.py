"""The random Hadamard transform, which spreads outliers over groups of 16 elements before coarse quantization."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from . import bits
from .bits import Array
from .layout import on_device_of

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_FLIPPED = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)
_SMALLEST = 27 << 23  # bits of 2^-100: sums of multiples of larger magnitudes are never subnormal


def rotate(x: Array, origin: int = 0) -> Array:
    """Multiplies groups of 16 along the last axis by an orthogonal matrix (signs, then Hadamard over 4).

    Rotating both operands of a product along the contracted axis doesn't change the product. Sums follow a fixed butterfly in
    fp32 and are rounded once to x's dtype, so bits are the same everywhere; magnitudes below 2^-100 become zero with their
    sign. Groups start at the unsharded axis's start; a tail of fewer than 16 elements is not rotated.

    x is float32, float16 or bfloat16 [..., k]. `origin` is the index of its first element in the unsharded axis. Raises
    ValueError unless it is a multiple of 16.
    """
    if origin % GROUP:
        raise ValueError(f"origin {origin} of a rotated axis must be a multiple of {GROUP}: groups can't be divided")
    xp = array_namespace(x)
    *leading, length = x.shape
    whole = length - length % GROUP
    if whole == 0 or 0 in x.shape:
        return x
    # Created on x's device: copying a list from the host can't be captured in a CUDA graph.
    place = xp.arange(GROUP, dtype=xp.int32, **on_device_of(x))
    flip = -(((place * 0 + _FLIPPED) >> place) & 1) & bits.SIGN
    pattern = bits.from_float(x[..., :whole]).reshape((*leading, whole // GROUP, GROUP))
    pattern = xp.where((pattern & bits.MAGNITUDE) < _SMALLEST, pattern & bits.SIGN, pattern)
    z = (pattern ^ xp.reshape(flip, (*(1 for _ in leading), 1, GROUP))).view(xp.float32)
    # Inf and NaN follow IEEE; only NumPy warns about them.
    with np.errstate(over="ignore", invalid="ignore") if is_numpy_array(x) else nullcontext():
        for h in (1, 2, 4, 8):
            pairs = z.reshape((*z.shape[:-1], GROUP // (2 * h), 2, h))
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            z = xp.stack([a + b, a - b], axis=-2).reshape(z.shape)
    rotated = bits.to_float((z * 0.25).view(xp.int32), bits.dtype_name(x)).reshape((*leading, whole))
    return rotated if whole == length else xp.concat([rotated, x[..., whole:]], axis=-1)
