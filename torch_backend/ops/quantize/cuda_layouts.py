"""Codes and scales laid out as the products of a GPU read them: MX with a scale for 128 elements, and turned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockfp.definition.bits import Array
from blockfp.formats import Format
from blockfp.kernels import calls, switch
from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

from ..cuda import check_beside
from ..library import maker

Align = Callable[[Array, Array], tuple[Array, Array]]
"""Aligns (codes, scales)."""


def empty_aligned(x: Array, shape: Sequence[int]) -> list[Array]:
    """Aligned codes and scales of matrices of this shape, not filled, on x's device."""
    return [x.new_empty(part, dtype=getattr(torch, dtype)) for part, dtype in calls.aligned_parts(shape)]


def align(codes: Array, scales: Array, format: Format | str, *, columns: int, transposed: bool = False) -> tuple[Array, Array]:
    """Shifts MX codes [.., rows, bytes] to one scale for 128 elements, as the library's product takes them
    (`calls.aligned_parts`).

    The values are those of `alignment.align`; `transposed` gives those of the transposed matrices, of blocks of 32x32.
    """
    if scales.device != codes.device:
        check_beside(codes, "codes", scales=scales)
    return _aligner((*codes.shape[:-1], columns), codes.device, Format.parse(format), transposed)(codes, scales)


def aligner(codes: Array, format: Format, columns: int, transposed: bool) -> Align:
    """Plans `align` for matrices that lie as these do."""
    return _aligner((*codes.shape[:-1], columns), codes.device, format, transposed)


@switch.memo
def _aligner(shape: tuple[int, ...], device: torch.device, format: Format, transposed: bool) -> Align:
    call = calls.align(shape, format, transposed)
    run, numbers = library().align, tuple(call.numbers.values())
    new, new_powers = (maker(part[0], getattr(torch, part[1]), device) for part in call.arrays.values() if part is not None)

    def aligned(codes: Array, scales: Array) -> tuple[Array, Array]:
        out, powers = new(), new_powers()
        run(codes.contiguous(), scales.contiguous(), out, powers, *numbers)
        return out, powers

    return aligned


AlignPlan = tuple[int, Align]
"""The index of the codes among the parts of an operand that was just quantized, and what aligns that direction."""


def align_plans(x: Array, cast: OperandCast) -> list[AlignPlan]:
    """Plans `align` for the directions of matrices that lie as x does, [.., rows, columns], and come aligned."""
    behind_row = 0 if cast.row is None else 3 if cast.row.scale.two_level else 2
    directions = ((0, x, cast.row, cast.aligned[0]), (behind_row, x.mT, cast.column, cast.aligned[1]))
    return [(i, _aligner(tuple(y.shape), x.device, f, False)) for i, y, f, wanted in directions if f is not None and wanted]


def align_parts(parts: list[Any], plans: Sequence[AlignPlan]) -> None:
    """Puts aligned codes and scales in the place of those that the plans name."""
    for first, run in plans:
        parts[first : first + 2] = run(parts[first], parts[first + 1])


def aligned_behind(run: Callable[..., list[Any]], plans: Sequence[AlignPlan]) -> Callable[..., list[Any]]:
    """Returns `run`, whose parts are aligned by these plans behind it."""

    def aligned(*arguments: Any) -> list[Any]:
        parts = run(*arguments)
        align_parts(parts, plans)
        return parts

    return aligned


def transpose_words(x: Array) -> Array:
    """[columns, rows] of x [rows, columns] with four bytes an element: fp32 scales, as some matrix units want them."""
    out = x.new_empty((x.shape[1], x.shape[0]))
    library().transpose(x.contiguous(), out, 32, *x.shape)
    return out
