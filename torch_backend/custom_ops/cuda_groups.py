"""The CUDA kernels for rows in groups: each call is a few launches, whatever the groups, whose ends stay on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition import bits
from blockfp.definition.groups import columns_for, shapes, words_for
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.cuda_library import library
from blockfp.kernels.format_numbers import format_numbers

from .cuda import check_beside, limits
from .cuda_layouts import align, empty_aligned
from .quantize_plans import NEITHER, Aligned


class GroupedParts(NamedTuple):
    """Parts in each direction, None where it was not asked for; and the groups' amaxes, int32 [groups], for a multiplier."""

    row: list[Tensor] | None
    column: list[Tensor] | None
    amaxes: Tensor | None


def group_rows(ends: Tensor, tokens: int) -> Tensor:
    """Finds where groups lie.

    Args:
        ends: int32 [groups] on a CUDA device.
        tokens: rows of x.

    Returns:
        int32, as the CUDA library lays it out: the ends, their counterparts along the columns, a table of tiles.
    """
    words = ends.new_empty(words_for(tokens, ends.shape[0]))
    library().group_rows(ends.contiguous(), words, tokens)
    return words


def quantize_groups(
    x: Tensor,
    words: Tensor,
    groups: int,
    row: Format | None,
    column: Format | None,
    *,
    keys: Tensor | None = None,
    row_keyed: bool = False,
    column_keyed: bool = False,
    rotate: bool = False,
    eps: float = 0.0,
    multiplier: Tensor | None = None,
    aligned: Aligned = NEITHER,
) -> GroupedParts:
    """Quantizes groups of rows along the rows, the columns, or both; see `definition.groups`, whose bits these are.

    Scales of a group that holds an Inf are NaN, so that its products are.

    Args:
        x: [tokens, features] on a CUDA device.
        words: of `group_rows`.
        groups: how many.
        row, column: formats; from one read of x if they are the same.
        keys: int32 [groups, 2, 2], of stochastic rounding.
        row_keyed, column_keyed: the directions that round so.
        rotate: the random Hadamard transform before the columnwise direction.
        eps: as for `numerics.quantize`, of formats where it has a meaning.
        multiplier: float32 of one element, instead of amaxes: delayed scaling.
        aligned: which directions of MX come aligned (`cuda_layouts.align`), as the products of groups take them.
    """
    check_beside(x, "x", words=words, keys=keys, multiplier=multiplier)
    x = (x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()).resolve_neg()
    if row is not None and column is not None and row is not column:
        own = {"eps": eps, "multiplier": multiplier, "keys": keys}
        first = quantize_groups(x, words, groups, row, None, row_keyed=row_keyed, aligned=aligned, **own)
        second = quantize_groups(
            x, words, groups, None, column, column_keyed=column_keyed, rotate=rotate, aligned=aligned, **own
        )
        return GroupedParts(first.row, second.column, first.amaxes)
    format = row or column
    assert format is not None
    wanted = (row is not None and aligned[0], column is not None and aligned[1])
    if any(wanted) and wanted[0] == (row is not None) and not (row_keyed or column_keyed or rotate) and x.numel():
        return _aligned(x, words, groups, format, wanted[0], None if column is None else wanted[1])
    by_row, by_column = (_empty(x, groups, one, columnwise) for one, columnwise in ((row, False), (column, True)))
    amaxes = overflows = recorded = None
    if multiplier is not None:
        amaxes, recorded = multiplier.reshape(1), x.new_empty(groups, dtype=torch.int32)
    elif format.has_tensor_scale:
        amaxes = x.new_empty((groups, 2) if rotate else (groups,), dtype=torch.int32)
    else:
        overflows = x.new_empty(groups, dtype=torch.int32)
    scale = scale_t = None
    if format.scale.two_level:
        scale, scale_t = (x.new_empty(groups, dtype=torch.float32) if one is None else one[2] for one in (by_row, by_column))
    eps_bits, largest = limits(format, eps_for(format, eps), bits.dtype_name(x))
    library().quantize_groups(
        x.detach(), words, keys, amaxes, recorded, overflows, *(by_row or (None, None))[:2], scale,
        *(by_column or (None, None))[:2], scale_t, groups, row_keyed, column_keyed, *format_numbers(format),
        multiplier is None, eps_bits, largest, rotate,
    )  # fmt: skip
    if by_row is not None and aligned[0]:
        by_row = list(align(by_row[0], by_row[1], format, columns=x.shape[1]))
    if by_column is not None and aligned[1]:
        by_column = list(align(by_column[0], by_column[1], format, columns=columns_for(x.shape[0], groups)))
    return GroupedParts(by_row, by_column, recorded)


def _aligned(x: Tensor, words: Tensor, groups: int, format: Format, row: bool, column: bool | None) -> GroupedParts:
    """Quantizes straight to aligned codes, rows and columns that are wanted; `column` False: columns to those of the format."""
    stored = _empty(x, groups, format, True) if column is False else None
    by_row = empty_aligned(x, x.shape) if row else None
    by_column = empty_aligned(x, (x.shape[1], columns_for(x.shape[0], groups))) if column else None
    overflows, nothing = x.new_empty(groups, dtype=torch.int32), (None, None)
    library().quantize_groups_aligned(
        x.detach(), words, overflows, *(by_row or nothing), *(by_column or nothing), *(stored or nothing), groups,
        *format_numbers(format),
    )  # fmt: skip
    return GroupedParts(by_row, by_column or stored, None)


def _empty(x: Tensor, groups: int, format: Format | None, columnwise: bool) -> list[Tensor] | None:
    if format is None:
        return None
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in _parts_of(x.shape, groups, format, columnwise)]


@lru_cache(maxsize=4096)
def _parts_of(shape: torch.Size, groups: int, format: Format, columnwise: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(part, getattr(torch, dtype)) for part, dtype in shapes(shape, groups, format, columnwise=columnwise)]


def sum_groups(x: Tensor, words: Tensor, groups: int) -> Tensor:
    """Adds up the rows of each group in a fixed order: float32 [groups, features] of x [tokens, features]."""
    check_beside(x, "x", words=words)
    out = x.new_empty((groups, x.shape[1]), dtype=torch.float32)
    library().sum_groups(x.detach().contiguous().resolve_neg(), words, out)
    return out


def clear_groups(words: Tensor, groups: int, rows: Tensor | None = None, matrices: Tensor | None = None) -> None:
    """Writes zeros where no group has anything.

    Args:
        words: of `group_rows`.
        groups: how many.
        rows: [tokens, ..], whose rows past the last end become zero.
        matrices: [groups, ..], of which those of groups without rows do.
    """
    check_beside(words, "words", rows=rows, matrices=matrices)
    library().clear_groups(words, rows, matrices, groups)
