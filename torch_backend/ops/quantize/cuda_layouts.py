"""Codes and scales laid out as the products of a GPU read them: MX with a scale for 128 elements, scales in order, turned."""

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


def empty_laid(x: Array, shape: Sequence[int], format: Format) -> list[Array]:
    """Codes and scales of matrices of this shape as products read them, not filled, on x's device."""
    return [x.new_empty(part, dtype=getattr(torch, dtype)) for part, dtype in calls.laid_parts(shape, format)]


def align(codes: Array, scales: Array, format: Format | str, *, columns: int, transposed: bool = False) -> tuple[Array, Array]:
    """Shifts MX codes [.., rows, bytes] to one scale for 128 elements, as the library's product takes them
    (`calls.laid_parts`).

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


def ordered(scales: Array) -> Array:
    """Scales of 1x128 or of rows, [lines, blocks], as the library's products read them."""
    out = scales.new_zeros((scales.shape[1], -(-scales.shape[0] // 4) * 4))
    out[:, : scales.shape[0]] = scales.mT
    return out


LayPlan = tuple[int, Align]
"""The index of the codes among the parts of an operand that was just quantized, and what lays that direction out."""


def lay_plans(x: Array, cast: OperandCast, *, by_library: bool) -> list[LayPlan]:
    """Plans what is left to lay out (`OperandCast.laid`) behind the cast of matrices that lie as x does, [.., rows, columns].

    `by_library`: the CUDA library casts, which orders scales itself.
    """
    behind_row = 0 if cast.row is None else 3 if cast.row.scale.two_level else 2
    plans: list[LayPlan] = []
    for first, y, format, laid in ((0, x, cast.row, cast.laid[0]), (behind_row, x.mT, cast.column, cast.laid[1])):
        if format is not None and laid and format.scale.e8m0:
            plans.append((first, _aligner(tuple(y.shape), x.device, format, False)))
        elif format is not None and laid and not by_library:
            plans.append((first, lambda codes, scales: (codes, ordered(scales))))
    return plans


def lay_parts(parts: list[Any], plans: Sequence[LayPlan]) -> None:
    """Puts codes and scales that are laid out in the place of those that the plans name."""
    for first, run in plans:
        parts[first : first + 2] = run(parts[first], parts[first + 1])


def laid_behind(run: Callable[..., list[Any]], plans: Sequence[LayPlan]) -> Callable[..., list[Any]]:
    """Returns `run`, whose parts are laid out by these plans behind it."""

    def laid(*arguments: Any) -> list[Any]:
        parts = run(*arguments)
        lay_parts(parts, plans)
        return parts

    return laid


def transpose_words(x: Array) -> Array:
    """[columns, rows] of x [rows, columns] with four bytes an element: fp32 scales, as some matrix units want them."""
    out = x.new_empty((x.shape[1], x.shape[0]))
    library().transpose(x.contiguous(), out, 32, *x.shape)
    return out
