"""Layout of codes and scales: shapes, blocks, packing, and the order of scales that matrix products read.

The last two axes of an array are the matrix. Codes keep its shape and are packed along the last axis; scales have one entry per
block, row-major. `origin` is the (row, column) of an array's first element in the unsharded matrix. Blocks are counted from the
start of the unsharded matrix, so a shard's first block may have begun on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from array_api_compat import array_namespace, is_torch_array

from ..formats import WHOLE_ROW, Format
from . import bits
from .bits import Array

Length = TypeVar("Length", int, np.ndarray)

Materialize = Callable[[Array], Array]
"""A function that returns its argument and makes a compiler store it.

Scales per block, random words and unpacked codes are used many times. A compiler that fuses everything into one loop would
recompute them at each use.
"""


def as_stored(x: Array) -> Array:
    """Returns x unchanged, for libraries that store every result anyway."""
    return x


def codes_shape(shape: Sequence[int], format: Format) -> tuple[int, ...]:
    """Returns the shape in bytes of the stored codes of an array of `shape`."""
    return (*shape[:-1], packed_columns(shape[-1], format.element.bits))


def scales_shape(shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """Returns the shape of the stored scales of an array of `shape` whose first element is at `origin`."""
    if format.block is None:
        return (1,) * len(shape)
    if format.per_row and shape[-1] > WHOLE_ROW:
        raise ValueError(f"a row of {format} has at most {WHOLE_ROW} columns, got {shape[-1]}")
    grid = (block_grid(n, b, o) for n, b, o in zip(shape[-2:], format.block, origin, strict=True))
    return (*shape[:-2], *grid)


@lru_cache(maxsize=4096)
def parts(shape: tuple[int, ...], format: Format, origin: tuple[int, int] = (0, 0)) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Returns shapes and dtypes of codes, scales and (with two levels) tensor scale.

    Raises TypeError for a symbolic length of a compiler, which has no hash; call `parts.__wrapped__` then.
    """
    codes = (codes_shape(shape, format), "uint8")
    scales = (scales_shape(shape, format, origin), format.scale.dtype)
    return (codes, scales, ((), "float32")) if format.scale.two_level else (codes, scales)


def block_grid(size: int, block: int, origin: int = 0) -> int:
    """Returns how many blocks of length `block`, counted from 0, the elements origin .. origin + size touch."""
    return 0 if size == 0 else -(-(origin % block + size) // block)


def packed_columns(columns: Length, bits: int) -> Length:
    """Returns the bytes of a row of `columns` codes of `bits` bits: 4-bit codes in pairs, 6-bit codes in fours."""
    if bits == 8:
        return columns
    return -(-columns // 2) if bits == 4 else 3 * -(-columns // 4)


def split_blocks(x: Array, block: tuple[int, int], origin: tuple[int, int] = (0, 0)) -> Array:
    """Reshapes [..., rows, columns] to [..., row blocks, block rows, column blocks, block columns], padded with zeros.

    A block that is a whole row gets the length of x's rows, wherever the row was sharded.
    """
    *leading, rows, columns = x.shape
    if block[1] == WHOLE_ROW:
        block, origin = (block[0], max(columns, 1)), (origin[0], 0)
    for axis, size, length, start in ((-2, rows, block[0], origin[0]), (-1, columns, block[1], origin[1])):
        before = start % length if size else 0
        x = _pad(x, before, block_grid(size, length, start) * length - before - size, axis)
    grid = (x.shape[-2] // block[0], x.shape[-1] // block[1])
    return x.reshape((*leading, grid[0], block[0], grid[1], block[1]))


def join_blocks(x: Array, shape: Sequence[int], origin: tuple[int, int] = (0, 0)) -> Array:
    """Inverts `split_blocks`: returns an array of `shape`."""
    *leading, row_blocks, block_rows, column_blocks, block_columns = x.shape
    x = x.reshape((*leading, row_blocks * block_rows, column_blocks * block_columns))
    row, column = origin[0] % block_rows, origin[1] % block_columns
    return x[..., row : row + shape[-2], column : column + shape[-1]]


def _pad(x: Array, before: int, after: int, axis: int) -> Array:
    if before == after == 0:
        return x
    xp = array_namespace(x)

    def zeros(width: int) -> Array:
        shape = list(x.shape)
        shape[axis] = width
        return xp.zeros(tuple(shape), dtype=x.dtype, **on_device_of(x))

    return xp.concat([zeros(before), x, zeros(after)], axis=axis)


def on_device_of(x: Array) -> dict[str, Any]:
    """Returns the keyword that creates an array on x's device. Only torch needs it; JAX places arrays itself, also in a
    trace."""
    return {"device": x.device} if is_torch_array(x) else {}


def pack(codes: Array, bits: int) -> Array:
    """Packs codes (one per byte) along the last axis, padded with zero codes.

    Two 4-bit codes per byte, low nibble first. Four 6-bit codes in three bytes, the first in the low bits.
    """
    if bits == 8:
        return codes
    xp = array_namespace(codes)
    if bits == 4:
        pairs = split_groups(codes, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4)
    fours = xp.astype(split_groups(codes, 4), xp.int32)
    word = fours[..., 0] | (fours[..., 1] << 6) | (fours[..., 2] << 12) | (fours[..., 3] << 18)
    threes = xp.stack([word & 0xFF, (word >> 8) & 0xFF, word >> 16], axis=-1)
    return xp.astype(threes, xp.uint8).reshape((*codes.shape[:-1], packed_columns(codes.shape[-1], 6)))


def unpack(packed: Array, bits: int, columns: int) -> Array:
    """Inverts `pack`: returns rows of `columns` uint8 codes, one per byte."""
    if bits == 8:
        return packed
    xp = array_namespace(packed)
    if bits == 4:
        codes = xp.stack([packed & 0xF, packed >> 4], axis=-1)
    else:
        threes = xp.astype(split_groups(packed, 3), xp.int32)
        word = threes[..., 0] | (threes[..., 1] << 8) | (threes[..., 2] << 16)
        codes = xp.astype(xp.stack([(word >> (6 * i)) & 0x3F for i in range(4)], axis=-1), xp.uint8)
    *leading, groups, size = codes.shape
    return codes.reshape((*leading, groups * size))[..., :columns]


def split_groups(x: Array, size: int) -> Array:
    """Reshapes [..., n] to [..., ceil(n / size), size], padded with zeros."""
    groups = -(-x.shape[-1] // size)
    x = _pad(x, 0, groups * size - x.shape[-1], -1)
    return x.reshape((*x.shape[:-1], groups, size))


def pad_scales(scales: Array, rows: int = 128, columns: int = 4) -> Array:
    """Pads scales [..., m, n] with zeros to multiples of `rows` and `columns`."""
    m, n = scales.shape[-2:]
    return _pad(_pad(scales, 0, -m % rows, -2), 0, -n % columns, -1)


def interleave_scales(scales: Array) -> Array:
    """Arranges one-byte scales [..., m, n] in tiles of 128 rows by 4 scales, as block-scaled tensor-core products read them.

    Scale (i, j) of the matrix padded to [128 a, 4 b] goes to byte
    ((i // 128) * b + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4 (cuBLAS, "1D block scaling factors").
    The input has one scale per row of the operand (see `repeat_scales`); the result is uint8 [..., 512 * a * b].
    """
    xp = array_namespace(scales)
    padded = pad_scales(scales)
    *leading, m, n = padded.shape
    tiles = padded.reshape((*leading, m // 128, 4, 32, n // 4, 4))
    return _permute(xp, tiles, (0, 3, 2, 1, 4)).reshape((*leading, m * n))


def _permute(xp, x: Array, last_axes: tuple[int, ...]) -> Array:
    leading = x.ndim - len(last_axes)
    return xp.permute_dims(x, (*range(leading), *(leading + axis for axis in last_axes)))


def repeat_scales(scales: Array, block_rows: int, rows: int) -> Array:
    """Repeats scales of square blocks [..., ceil(rows / block_rows), n] for each row: [..., rows, n]."""
    xp = array_namespace(scales)
    return xp.repeat(scales, block_rows, axis=-2)[..., :rows, :]


def swap_matrix(x: Array) -> Array:
    """Returns x with its last two axes swapped."""
    return _permute(array_namespace(x), x, (1, 0))


# ---- Views of codes and scales


DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy dtypes of values by name."""


def dtype_of(name: str) -> np.dtype:
    """Returns the NumPy dtype of a `native_dtype`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def view_codes(codes: Array, columns: int, format: Format) -> Array:
    """Returns codes uint8 [..., rows, bytes] as elements [..., rows, columns]; for NumPy arrays, and 8-bit codes of JAX
    arrays."""
    return unpack(codes, format.element.bits, columns).view(dtype_of(format.element.native_dtype))


def view_scales(scales: Array, format: Format) -> Array:
    """Returns scales as numbers; fp32 scales are returned unchanged."""
    return scales.view(dtype_of(format.scale.native_dtype))


def stored_codes(codes: Array, format: Format) -> Array:
    """Returns codes as uint8 [..., rows, bytes] if they are elements of the format's dtype; returns other dtypes unchanged."""
    element = format.element
    if bits.dtype_name(codes) != element.native_dtype:
        return codes
    as_bytes = codes.view(np.uint8)
    return pack(as_bytes & (2**element.bits - 1), element.bits) if element.packed else as_bytes


def stored_scales(scales: Array, format: Format) -> Array:
    """Returns scales in their storage dtype if they are elements of the format's dtype; returns other dtypes unchanged."""
    return scales.view(np.dtype(format.scale.dtype)) if bits.dtype_name(scales) == format.scale.native_dtype else scales
