"""Matrices whose rows are sorted by group, such as the tokens of experts: each group is quantized as its own tensor.

In both directions, blocks, rotations and indices of random bytes start at a group's first row. Each group has its own amax,
tensor scale and key. All groups share one array of codes and one array of scales:

    rowwise         codes [tokens, features], packed, in the rows of x
                    scales of 1xb [tokens, features / b]
    columnwise      codes [features, columns], packed: each group is padded with zero rows to a multiple of 128
                    scales of 1xb [features, columns / b]
    square blocks   scales [columns / b, features / b], columnwise [features / b, columns / b]
    a scale per row scales [tokens, 1]; columnwise [features, groups]
    one scale       scales [groups]; with two levels tensor_scale [groups]

Scales of 1x128 have the layout that products read: block-major, [features / 128, tokens] and [columns / 128, features], with
the last axis padded to a multiple of four. `columns` (`columns_for`) is an upper bound for any group sizes. Unused columns, and
rows after the last group, are zero here and undefined in the output of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace

from ..formats import Format
from . import layout
from .bits import Array
from .layout import on_device_of
from .numerics import Quantized, quantize

UNIT = 128
"""Columns of a group are padded to a multiple of this, to align the operands of products."""

_TILE_WORDS = 8


def columns_for(tokens: int, groups: int) -> int:
    """Returns the number of columns of columnwise codes, enough for any group sizes."""
    return (tokens + groups * (UNIT - 1)) // UNIT * UNIT


def words_for(tokens: int, groups: int) -> int:
    """Returns the length of `group_rows`' output in the CUDA library: ends, the matching column offsets, and a table of
    tiles."""
    return -(-2 * groups // _TILE_WORDS) * _TILE_WORDS + _TILE_WORDS * (tokens // UNIT + groups)


class Group(NamedTuple):
    """Position of a group: rows begin .. end of x, its first column in columnwise codes, and its index."""

    begin: int
    end: int
    first_column: int
    number: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin

    @property
    def end_column(self) -> int:
        """First column after the group's padding."""
        return self.first_column + -(-self.rows // UNIT) * UNIT


def groups_of(ends: Sequence[int], tokens: int) -> Iterator[Group]:
    """Yields each group. Ends are clamped to x and to the previous end."""
    begin = column = 0
    for number, end in enumerate(ends):
        group = Group(begin, max(begin, min(end, tokens)), column, number)
        yield group
        begin, column = group.end, group.end_column


def shapes(shape: Sequence[int], groups: int, format: Format, *, columnwise: bool) -> list[tuple[tuple[int, ...], str]]:
    """Returns shapes and dtypes of codes, scales and (with two levels) tensor scales of x [tokens, features]."""
    tokens, features = shape
    filled = columns_for(tokens, groups)
    lines, length = (features, filled) if columnwise else (tokens, features)
    codes = (layout.codes_shape((lines, length), format), "uint8")
    grid: tuple[int, ...] = (groups,)
    if format.block is not None:
        rows, columns = format.block
        down = -(-(filled if rows > 1 and not columnwise else lines) // rows)
        grid = (down, groups if format.per_row and columnwise else -(-length // columns))
        if ordered(format):
            grid = (grid[1], -(-lines // 4) * 4)
    scales = (grid, format.scale.dtype)
    return [codes, scales, ((groups,), "float32")] if format.scale.two_level else [codes, scales]


def ordered(format: Format) -> bool:
    """Returns whether scales are block-major, the layout that products read."""
    return format.block == (1, 128)


def quantize_groups(
    x: Array,
    ends: Sequence[int],
    format: Format | str,
    *,
    columnwise: bool = False,
    keys: Array | None = None,
    eps: float = 0.0,
    multiplier: Array | None = None,
    turn: Callable[[Array], Array] = lambda x: x,
) -> Quantized:
    """Quantizes each group of x separately and lays out the results as described above.

    x is float32, float16 or bfloat16 [tokens, features]. `ends` ascend. `columnwise` transposes each group; `turn` is applied
    to each group's values before quantization (a rotation). `keys` int32 [groups, 2] round stochastically; `eps` and
    `multiplier` are those of `numerics.quantize`.
    """
    format = Format.parse(format)
    each = []
    for number, group in enumerate(groups_of(ends, x.shape[0])):
        rows = x[group.begin : group.end]
        values = turn(rows.mT if columnwise else rows)
        each.append(quantize(values, format, key=None if keys is None else keys[number], eps=eps, multiplier=multiplier))
    return lay_out(each, x, ends, format, columnwise=columnwise, eps=eps)


@lru_cache(maxsize=1024)
def _zero_scale(format: Format, eps: float) -> float:
    """Returns the scale of a block of zeros."""
    return quantize(np.zeros((1, 1), np.float32), format, eps=eps).scales.item()


def lay_out(
    each: Sequence[Quantized], x: Array, ends: Sequence[int], format: Format, *, columnwise: bool, eps: float = 0.0
) -> Quantized:
    """Lays out the codes, scales and tensor scales of the groups (`each`) as described above.

    x [tokens, features] gives shapes and device. `columnwise` says whether `each` holds transposed groups. `eps` determines the
    scale of the padding.
    """
    xp, place = array_namespace(x), on_device_of(x)
    found = shapes(x.shape, len(each), format, columnwise=columnwise)
    parts = [xp.zeros(shape, dtype=getattr(xp, dtype), **place) for shape, dtype in found]
    codes, scales = parts[:2]
    zero = _zero_scale(format, eps)
    for number, (group, own) in enumerate(zip(groups_of(ends, x.shape[0]), each, strict=True)):
        lines, grid = _slices(group, format, columnwise)
        codes[lines] = own.codes
        if format.block is None:
            scales[number] = own.scales.reshape(())
        else:
            by_line = scales.mT[: x.shape[1] if columnwise else x.shape[0]] if ordered(format) else scales
            if columnwise or format.block[0] > 1:
                by_line[_filled(group, format, columnwise)] = zero
            by_line[grid] = own.scales
        if format.scale.two_level:
            parts[2][number] = own.tensor_scale
    return Quantized(codes, scales, parts[2] if format.scale.two_level else None)


def group_parts(parts: Quantized, ends: Sequence[int], tokens: int, features: int, format: Format, *, columnwise: bool):
    """Inverts `lay_out`: returns the parts of each group as `quantize` gives them."""
    each = []
    for number, group in enumerate(groups_of(ends, tokens)):
        lines, grid = _slices(group, format, columnwise)
        if format.block is None:
            scales = parts.scales[number].reshape((1, 1))
        else:
            by_line = parts.scales.mT[: features if columnwise else tokens] if ordered(format) else parts.scales
            scales = by_line[grid]
        two_level = None if parts.tensor_scale is None else parts.tensor_scale[number]
        each.append(Quantized(parts.codes[lines], scales, two_level))
    return each


def _slices(group: Group, format: Format, columnwise: bool) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Returns the indices of a group's codes and of its scales."""
    rows, columns = format.block or (1, 1)
    if not columnwise:
        codes = (slice(group.begin, group.end), slice(None))
        if rows == 1:
            return codes, codes
        first = group.first_column // rows
        return codes, (slice(first, first + -(-group.rows // rows)), slice(None))
    bits = format.element.bits
    first = layout.packed_columns(group.first_column, bits)
    packed = slice(first, first + layout.packed_columns(group.rows, bits))
    if format.per_row:
        return (slice(None), packed), (slice(None), slice(group.number, group.number + min(group.rows, 1)))
    blocks = group.first_column // columns
    return (slice(None), packed), (slice(None), slice(blocks, blocks + -(-group.rows // columns)))


def _filled(group: Group, format: Format, columnwise: bool) -> tuple[slice, ...]:
    """Returns the indices of the scales of a group and its padding."""
    assert format.block is not None
    if format.per_row:
        return slice(None), slice(group.number, group.number + 1)
    rows, columns = format.block
    step = columns if columnwise else rows
    along = slice(group.first_column // step, group.end_column // step)
    return (slice(None), along) if columnwise else (along, slice(None))
