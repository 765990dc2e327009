"""Codes and scales laid out as the products of a GPU read them: MX with a scale for 128 elements; turned, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from blockfp.definition.bits import Array
from blockfp.definition.layout import codes_shape
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.cuda_library import library
from blockfp.kernels.format_numbers import format_numbers

from .allocation import maker, strides_of
from .cuda import check_beside


def aligned_columns(columns: int) -> int:
    """The columns of what `align` makes of so many."""
    return -(-columns // 16) * 16


def aligned_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the codes, uint8, and the scales, float32, of aligned matrices [.., lines, length]."""
    *leading, lines, length = shape
    return (*leading, lines, aligned_columns(length)), (*leading, -(-length // 128), -(-lines // 4) * 4)


def empty_aligned(x: Array, shape: Sequence[int]) -> list[Array]:
    """Aligned codes and scales of matrices of this shape, not filled, on x's device."""
    codes, scales = aligned_shapes(shape)
    return [x.new_empty(codes, dtype=torch.uint8), x.new_empty(scales, dtype=torch.float32)]


def align(codes: Array, scales: Array, format: Format | str, *, columns: int, transposed: bool = False) -> tuple[Array, Array]:
    """The codes and scales of MX matrices, shifted to one scale for 128 elements, as the library's product takes them.

    Args:
        codes: uint8 [.., rows, bytes].
        scales: uint8 E8M0.
        format: MXFP8, MXFP6 or MXFP4.
        columns: of a matrix.
        transposed: whether the transposed matrices are wanted; in blocks of 32x32.

    Returns:
        Codes uint8 [.., rows, `aligned_columns`] with zeros at the end, and scales float32 [.., ceil(columns / 128), rows
        filled up to a multiple of 4], rows and columns exchanged if transposed; the values are those of `alignment.align`.
    """
    if scales.device != codes.device:
        check_beside(codes, "codes", scales=scales)
    run, shape, grid, numbers = _aligned(codes.shape, format, columns, transposed)
    out = torch.empty_strided(shape, strides_of(shape), dtype=torch.uint8, device=codes.device)
    powers = torch.empty_strided(grid, strides_of(grid), dtype=torch.float32, device=codes.device)
    run(codes.contiguous(), scales.contiguous(), out, powers, *numbers)
    return out, powers


def aligner(codes: Array, format: Format, columns: int, transposed: bool) -> Callable[[Array, Array], tuple[Array, Array]]:
    """Plans `align` for matrices that lie as these do."""
    run, shape, grid, numbers = _aligned(codes.shape, format, columns, transposed)
    new, new_powers = maker(shape, torch.uint8, codes.device), maker(grid, torch.float32, codes.device)

    def aligned(codes: Array, scales: Array) -> tuple[Array, Array]:
        out, powers = new(), new_powers()
        run(codes.contiguous(), scales.contiguous(), out, powers, *numbers)
        return out, powers

    return aligned


class AlignPlan(NamedTuple):
    """The plan by which one direction of an operand that was just quantized is aligned.

    Attributes:
        first: index of its codes among the parts; its scales come next.
        run: the library's function.
        codes, scales: shape and strides of what it writes.
        numbers: its last arguments.
    """

    first: int
    run: Any
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[tuple[int, ...], tuple[int, ...]]
    numbers: tuple[Any, ...]


def align_plans(shape: Sequence[int], row: Format | None, column: Format | None, aligned: tuple[bool, bool]) -> list[AlignPlan]:
    """Plans `align` for the directions of a matrix [.., rows, columns] that come aligned; None stands for no format."""
    *leading, rows, columns = shape
    behind_row = 0 if row is None else 3 if row.scale.two_level else 2
    plans: list[AlignPlan] = []
    for first, format, lines, wanted in (
        (0, row, (rows, columns), aligned[0]),
        (behind_row, column, (columns, rows), aligned[1]),
    ):
        if format is not None and wanted:
            made = codes_shape((*leading, *lines), format)
            run, codes, scales, numbers = _aligned(torch.Size(made), format, lines[1], False)
            plans.append(AlignPlan(first, run, (codes, strides_of(codes)), (scales, strides_of(scales)), numbers))
    return plans


def align_parts(parts: list[Any], plans: Sequence[AlignPlan]) -> None:
    """Puts aligned codes and scales in the place of those that the plans name."""
    for first, run, codes, scales, numbers in plans:
        device = parts[first].device
        out = torch.empty_strided(*codes, dtype=torch.uint8, device=device)
        powers = torch.empty_strided(*scales, dtype=torch.float32, device=device)
        run(parts[first], parts[first + 1], out, powers, *numbers)
        parts[first : first + 2] = out, powers


def aligned_behind(run: Callable[..., list[Any]], plans: Sequence[AlignPlan]) -> Callable[..., list[Any]]:
    """Returns `run`, whose parts are aligned by these plans behind it."""

    def aligned(*arguments: Any) -> list[Any]:
        parts = run(*arguments)
        align_parts(parts, plans)
        return parts

    return aligned


@lru_cache(maxsize=4096)
def _aligned(codes: torch.Size, format: Format | str, columns: int, transposed: bool) -> tuple[Any, ...]:
    """The library's function, the shapes of what `align` gives, codes and scales, and the numbers that the function wants."""
    *leading, rows, _ = codes
    element, block_rows, *_ = format_numbers(Format.parse(format))
    shape, grid = aligned_shapes((*leading, columns, rows) if transposed else (*leading, rows, columns))
    return library().align, shape, grid, (element, block_rows, columns, transposed)


switch.when_turned(_aligned.cache_clear)


def transpose_words(x: Array) -> Array:
    """[columns, rows] of x [rows, columns] with four bytes an element: fp32 scales, as some matrix units want them."""
    out = x.new_empty((x.shape[1], x.shape[0]))
    library().transpose(x.contiguous(), out, 32, *x.shape)
    return out


def interleave_scales(scales: Array, *, rows: int | None = None, repeat: int = 1) -> Array:
    """One-byte scales padded and in tensor-core order; see `layout.interleave_scales`.

    Args:
        scales: uint8 [..., m, n].
        rows: rows of the operand; m by default.
        repeat: rows of the operand that share a row of scales (16 for 16x16 blocks).
    """
    m, n = scales.shape[-2:]
    lines = m if rows is None else rows
    out = scales.new_empty((*scales.shape[:-2], -(-lines // 128) * -(-n // 4) * 512))
    library().interleave(scales.contiguous(), out, lines, repeat)
    return out
