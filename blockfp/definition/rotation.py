"""The random Hadamard transform: spreads outliers over groups of 16 before they meet a coarse format."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from . import bits
from .bits import Array
from .layout import on_device_of
from .rounding import Key, random_bytes

GROUP = 16
RANDOM_GROUP = 128
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_FLIPPED = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)
_SMALLEST = 27 << 23  # bits of 2^-100: sums of multiples of what is not below it are never subnormal
# Sizes of random groups, the whole ones first, and fp32 of one over the root of each.
_FACTORS = {size: float(np.float32(size**-0.5)) for size in (RANDOM_GROUP, 64, 32, GROUP)}


def rotate(x: Array, origin: int = 0) -> Array:
    """Multiplies groups of 16 along the last axis by an orthogonal matrix (signs, then Hadamard over 4).

    Both operands of a product that are rotated alike along their contraction axis have the same product. The sums are a
    fixed butterfly in fp32, rounded once to x's dtype, so the bits are the same everywhere; magnitudes below 2^-100 count as
    zero of their sign. Groups are counted from the unsharded axis's start; a tail of fewer than 16 stays as it is.

    Args:
        x: float32, float16 or bfloat16, [..., k].
        origin: index of the first element in the unsharded axis; a multiple of 16.

    Raises:
        ValueError: `origin` cuts a group.
    """
    if origin % GROUP:
        raise ValueError(f"origin {origin} of a rotated axis must be a multiple of {GROUP}: a group can't be cut")
    xp = array_namespace(x)
    *leading, length = x.shape
    whole = length - length % GROUP
    if whole == 0 or 0 in x.shape:
        return x
    # Made where x is: a list would be copied from the host, which a CUDA graph can't record.
    place = xp.arange(GROUP, dtype=xp.int32, **on_device_of(x))
    flip = -(((place * 0 + _FLIPPED) >> place) & 1) & bits.SIGN
    pattern = _without_tiny(bits.from_float(x[..., :whole]).reshape((*leading, whole // GROUP, GROUP)))
    z = _butterfly(pattern ^ xp.reshape(flip, (*(1 for _ in leading), 1, GROUP)), GROUP, not is_numpy_array(x))
    rotated = bits.to_float(z, bits.dtype_name(x)).reshape((*leading, whole))
    return rotated if whole == length else xp.concat([rotated, x[..., whole:]], axis=-1)


def rotate_randomly(x: Array, key: Key, origin: int | Array = 0, end: Array | None = None) -> Array:
    """Multiplies groups along the last axis by random signs, then by Hadamard's orthogonal matrix, as EDEN wants it.

    Groups have 128 elements. What is left of the unsharded axis is one group each of 64, 32 and 16 where it has that many. The
    last elements, fewer than 16, get signs alone. An element's sign depends on the key and on its place along the axis, and is
    that of its column in every row. The sums are a fixed butterfly in fp32.

    Args:
        x: float32, float16 or bfloat16, [..., k].
        key: a seed or two uint32 words; equal for both operands of a product.
        origin: index of the first element in the unsharded axis; a multiple of 128, also where it is known only at run time. A
            part that ends elsewhere than at such a multiple ends where the axis does.
        end: length of the unsharded axis, int32 (), where that is known only at run time. Then x is a whole number of groups of
            128, filled up with zeros.

    Returns:
        float32, so that no rounding but that of the sums comes before the one to codes.

    Raises:
        ValueError: `origin` cuts a group.
    """
    if isinstance(origin, int) and origin % RANDOM_GROUP:
        raise ValueError(f"origin {origin} of a rotated axis must be a multiple of {RANDOM_GROUP}: a group can't be cut")
    xp = array_namespace(x)
    pattern = bits.from_float(x)
    *leading, length = x.shape
    if 0 in x.shape:
        return bits.to_float(pattern, "float32")
    signed = _without_tiny(pattern, 2) ^ xp.reshape(
        _random_flips(key, pattern, length, origin), (*(1 for _ in leading), length)
    )
    if end is not None:
        return bits.to_float(_in_whole_groups(signed.view(xp.float32), end - origin).view(xp.int32), "float32")
    quiet, spans = not is_numpy_array(x), _spans(length)
    pieces = []
    for start, stop, size in spans:
        group = signed[..., start:stop].reshape((*leading, (stop - start) // size, size))
        pieces.append(_butterfly(group, size, quiet).reshape((*leading, stop - start)))
    pieces.append(signed[..., spans[-1][1] if spans else 0 :])
    return bits.to_float(xp.concat(pieces, axis=-1), "float32")


def rotate_back(z: Array, key: Key, origin: int | Array = 0, end: Array | None = None) -> Array:
    """Multiplies float32 z, [..., k] by the inverse of `rotate_randomly`'s matrix.

    Without an `end` z begins where the axis does; else `origin` and `end` are as for `rotate_randomly`.
    """
    xp = array_namespace(z)
    *leading, length = z.shape
    if 0 in z.shape:
        return z
    flips = _random_flips(key, z.view(xp.int32), length, origin)
    if end is not None:
        back = _in_whole_groups(z, end - origin)
        return xp.where(flips < 0, -back, back)
    pieces, spans = [], _spans(length)
    for start, stop, size in spans:
        group = z[..., start:stop].reshape((*leading, (stop - start) // size, size))
        pieces.append((_sums(group, size) * _FACTORS[size]).reshape((*leading, stop - start)))
    pieces.append(z[..., spans[-1][1] if spans else 0 :])
    back = xp.concat(pieces, axis=-1)
    return xp.where(flips < 0, -back, back)


def _spans(length: int) -> list[tuple[int, int, int]]:
    """(start, stop, size) of the random groups along an axis, or the end of one, of each size that there is."""
    spans, start = [], 0
    for size in _FACTORS:
        stop = start + (length - start) // size * size
        if stop > start:
            spans.append((start, stop, size))
        start = stop
    return spans


def _in_whole_groups(z: Array, length: Array) -> Array:
    """float32 z [..., k], k a multiple of 128: Hadamard's sums over the root of each group among its first `length` elements.

    An element's group is the largest that ends among these. So groups are those of `_spans`, whatever the length.
    """
    xp = array_namespace(z)
    shape, done, turned = z.shape, 1, z
    place = xp.arange(shape[-1], dtype=xp.int32, **on_device_of(z))
    for size in sorted(_FACTORS):
        z = _sums(z.reshape((*shape[:-1], -1, size)), size, done).reshape(shape)
        turned = xp.where((place // size + 1) * size <= length, z * _FACTORS[size], turned)
        done = size
    return turned


def _random_flips(key: Key, like: Array, length: int, origin: int | Array) -> Array:
    """int32 [length]: the sign bit of each place that is flipped, by the low bit of its random byte."""
    xp = array_namespace(like)
    row = xp.zeros((1,), dtype=xp.int32, **on_device_of(like))
    return random_bytes(key, row, length, origin, 0)[0] << 31


def _without_tiny(pattern: Array, higher: int = 0) -> Array:
    """Makes magnitudes below 2^(higher - 100) zeros of their sign."""
    tiny = (pattern & bits.MAGNITUDE) < _SMALLEST + (higher << 23)
    return array_namespace(pattern).where(tiny, pattern & bits.SIGN, pattern)


def _butterfly(pattern: Array, size: int, quiet: bool) -> Array:
    """fp32 bits of the sums of groups [..., size], over the root of size."""
    xp = array_namespace(pattern)
    # Inf and NaN follow IEEE everywhere; NumPy alone would warn of them.
    with nullcontext() if quiet else np.errstate(over="ignore", invalid="ignore"):
        return (_sums(pattern.view(xp.float32), size) * _FACTORS[size]).view(xp.int32)


def _sums(z: Array, size: int, done: int = 1) -> Array:
    """Hadamard's sums of groups along the last axis, in stages of distance 1, 2, 4, ..; of groups of `done` they are there."""
    xp = array_namespace(z)
    h = done
    while h < size:
        pairs = z.reshape((*z.shape[:-1], size // (2 * h), 2, h))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        z = xp.stack([a + b, a - b], axis=-2).reshape(z.shape)
        h *= 2
    return z
