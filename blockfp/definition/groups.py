"""Matrices whose rows are sorted by group, such as the tokens of experts: each group is a tensor of its own.

Blocks of both directions begin at a group's first row, and so do its rotation and the indices of its random bytes; it has its
own amax, scale of the whole tensor, and key. Codes and scales of all groups lie in one array each:

    rowwise         codes [tokens, features], packed, as those of the whole x
                    scales of 1xb [tokens, features / b]
    columnwise      codes [features, columns], packed: each group is filled up with rows of zeros to a multiple of 128
                    scales of 1xb [features, columns / b]
    square blocks   scales [columns / b, features / b], columnwise [features / b, columns / b]
    a scale per row scales [tokens, 1]; columnwise [features, groups]
    one scale       scales [groups]; of two levels tensor_scale [groups]

Scales of 1x128 lie as products take them: block after block, [features / 128, tokens] and [columns / 128, features], with the
last axis filled up to a multiple of four. `columns` is a bound that holds for any ends (`columns_for`): what no group has is
zero here, and undefined in what kernels write. So are rows past the last end.
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
"""Columns of a group come in so many, so that operands of products are aligned."""

_TILE_WORDS = 8


def columns_for(tokens: int, groups: int) -> int:
    """Columns of the columnwise codes: enough for any ends."""
    return (tokens + groups * (UNIT - 1)) // UNIT * UNIT


def words_for(tokens: int, groups: int) -> int:
    """Length of what the CUDA library's `group_rows` writes: ends, their counterparts along the columns, a table of tiles."""
    return -(-2 * groups // _TILE_WORDS) * _TILE_WORDS + _TILE_WORDS * (tokens // UNIT + groups)


class Group(NamedTuple):
    """The place of a group: its rows begin .. end of x, its first column along the columns, and its number among the groups."""

    begin: int
    end: int
    first_column: int
    number: int

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self.end - self.begin

    @property
    def end_column(self) -> int:
        """The column behind its zeros."""
        return self.first_column + -(-self.rows // UNIT) * UNIT


def groups_of(ends: Sequence[int], tokens: int) -> Iterator[Group]:
    """Yields each group; ends that descend, or lie outside of x, count as those before them, or as x's."""
    begin = column = 0
    for number, end in enumerate(ends):
        group = Group(begin, max(begin, min(end, tokens)), column, number)
        yield group
        begin, column = group.end, group.end_column


def shapes(shape: Sequence[int], groups: int, format: Format, *, columnwise: bool) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of codes, scales and maybe tensor scales of x [tokens, features] in so many groups."""
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
    """True if scales lie block after block, as products take them."""
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
    """Quantizes each group of x by itself, and lays out the results as this module says.

    Args:
        x: float32, float16 or bfloat16, [tokens, features].
        ends: of the groups, ascending.
        format: a `Format` or its name.
        columnwise: quantizes each group transposed.
        keys: int32 [groups, 2], of stochastic rounding.
        eps, multiplier: as for `numerics.quantize`.
        turn: what is done to each group before, such as `rotation.rotate`.
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
    """The scale of a block of zeros."""
    return quantize(np.zeros((1, 1), np.float32), format, eps=eps).scales.item()


def lay_out(
    each: Sequence[Quantized], x: Array, ends: Sequence[int], format: Format, *, columnwise: bool, eps: float = 0.0
) -> Quantized:
    """Lays out the groups' parts as this module says.

    Args:
        each: codes, scales and tensor scale of each group.
        x: what they are of, [tokens, features].
        ends: of the groups.
        format: of the codes.
        columnwise: whether the parts are of the groups transposed.
        eps: of the scales, for those of the zeros that fill up groups.
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
    """Lists the parts of each group, as `quantize` would give them, from what `lay_out` made."""
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
    """The places of a group's codes and scales."""
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
    """The places of the scales of a group and of the zeros behind it."""
    assert format.block is not None
    if format.per_row:
        return slice(None), slice(group.number, group.number + 1)
    rows, columns = format.block
    step = columns if columnwise else rows
    along = slice(group.first_column // step, group.end_column // step)
    return (slice(None), along) if columnwise else (along, slice(None))
