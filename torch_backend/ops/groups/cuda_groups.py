"""The CUDA kernels for rows in groups: each call is a few launches, whatever the groups, whose ends stay on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition.groups import columns_for, words_for
from blockfp.definition.scaling import eps_for
from blockfp.kernels import calls
from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

from ..cuda import carry_out, check_beside
from ..library import name_of
from ..quantize.cuda_layouts import align


class GroupedParts(NamedTuple):
    """Parts in each direction, None where it was not asked for; and the groups' amaxes, int32 [groups], for a multiplier."""

    row: list[Tensor] | None
    column: list[Tensor] | None
    amaxes: Tensor | None


def group_rows(ends: Tensor, tokens: int) -> Tensor:
    """Finds where groups lie: int32 words for the other functions, of ends, int32 [groups], and the number of rows of x."""
    words = ends.new_empty(words_for(tokens, ends.shape[0]))
    library().group_rows(ends.contiguous(), words, tokens)
    return words


def quantize_groups(
    x: Tensor, words: Tensor, groups: int, cast: OperandCast, *, keys: Tensor | None = None, multiplier: Tensor | None = None
) -> GroupedParts:
    """Quantizes groups of rows of x [tokens, features] along one axis or both; see `definition.groups`.

    Scales of a group that holds an Inf are NaN. `words` are of `group_rows`, keys int32 [groups, 2, 2]; a multiplier, float32
    of one element, stands for the amaxes, as `cast.given` says.
    """
    check_beside(x, "x", words=words, keys=keys, multiplier=multiplier)
    x = (x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()).resolve_neg()
    if cast.row is not None and cast.column is not None and cast.row is not cast.column:
        by_row, by_column = (
            quantize_groups(x, words, groups, one, keys=keys, multiplier=multiplier) for one in cast.directions
        )
        return GroupedParts(by_row.row, by_column.column, by_row.amaxes)
    cast = cast._replace(eps=eps_for(cast.format, cast.eps))
    call = calls.quantize_groups(tuple(x.shape), name_of(x.dtype), cast, groups)
    scale = None if multiplier is None else multiplier.reshape(1)
    found = carry_out(call, x.detach(), words, keys=keys, amax=scale)

    shifts, directions = call.function == "quantize_groups", []
    for side, format in enumerate((cast.row, cast.column)):
        if format is None:
            directions.append(None)
            continue
        parts = [found[name] for name in (calls.PARTS, calls.PARTS_T)[side] if found.get(name) is not None]
        if cast.laid[side] and shifts and format.scale.e8m0:
            length = columns_for(x.shape[0], groups) if side else x.shape[1]
            parts = list(align(parts[0], parts[1], format, columns=length))
        directions.append(parts or [found["stored_t"], found["stored_scales_t"]])
    return GroupedParts(directions[0], directions[1], found.get("recorded"))


def sum_groups(x: Tensor, words: Tensor, groups: int) -> Tensor:
    """Adds up the rows of each group in a fixed order: float32 [groups, features] of x [tokens, features]."""
    check_beside(x, "x", words=words)
    out = x.new_empty((groups, x.shape[1]), dtype=torch.float32)
    library().sum_groups(x.detach().contiguous().resolve_neg(), words, out)
    return out


def clear_groups(words: Tensor, groups: int, rows: Tensor | None = None, matrices: Tensor | None = None) -> None:
    """Writes zeros to the rows [tokens, ..] past the last end, and to the matrices [groups, ..] of empty groups."""
    check_beside(words, "words", rows=rows, matrices=matrices)
    library().clear_groups(words, rows, matrices, groups)
