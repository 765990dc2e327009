"""Plans by which the CUDA kernels quantize an operand from one read: all that is static is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import bits, layout
from blockfp.formats import Format
from blockfp.kernels.cuda_library import library
from blockfp.kernels.format_numbers import format_numbers

from . import cuda
from .allocation import maker
from .cuda import check_beside, check_input_on_device, limits
from .cuda_layouts import align_parts, align_plans, aligned_shapes
from .overflow import marker


def reader(
    x: Tensor,
    format: Format,
    *,
    rows: bool,
    columns: bool,
    rotate: bool,
    eps: float,
    given: bool,
    random: bool,
    aligned: tuple[bool, bool] = (False, False),
    one_scale: bool = False,
) -> Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], list[Tensor]]:
    """Plans to quantize matrices that lie as x does, with adjacent columns, along one axis or both, from one read.

    Scales of a matrix that holds an Inf, or of two levels its tensor scales, are NaN.

    Args:
        x: one of them, [.., rows, columns].
        format: the format.
        rows, columns: the directions wanted.
        rotate: the random Hadamard transform before the transposed direction (NVFP4 in blocks of 1x16).
        eps: as for `quantize`.
        given: whether the amax or a multiplier is given, of a format with one scale per tensor.
        random: whether both directions are rounded stochastically.
        aligned: which directions come aligned, of MX.
        one_scale: whether a scale for the whole tensor is one tensor for both directions, where nobody writes into it.

    Returns:
        A function of a matrix, its amax, int32 [1], a multiplier, float32 of one element, and keys, int32 [2, 2]; each None
        where it isn't given. It returns the parts of the directions, new memory each, and after them the amax of the matrix,
        int32 [1], where there is a multiplier.
    """
    check_input_on_device(x)
    device, run = x.device, library().quantize
    eps_bits, largest = limits(format, eps, bits.dtype_name(x))
    *leading, height, width = x.shape
    if format.per_row:
        return _rows_reader(format, eps_bits, largest, rows, columns, rotate, random)
    wanted = (rows and aligned[0], columns and aligned[1])
    if any(wanted) and wanted[0] == rows and not (format.square or random or rotate) and x.numel():
        return _aligned_reader(x, format, rows, wanted[1] if columns else None)
    outputs: list[Any] = []
    for wanted, shape in ((rows, (*leading, height, width)), (columns, (*leading, width, height))):
        found = [maker(size, getattr(torch, name), device) for size, name in layout.parts(shape, format) if wanted]
        outputs += found + [None] * (3 - len(found))
    absent = [place for place in reversed(range(len(outputs))) if outputs[place] is None]
    one_scale = one_scale and format.per_tensor and rows and columns
    made = [(place, new) for place, new in enumerate(outputs) if new is not None and not (one_scale and place == 4)]
    measures, in_blocks = not given and format.has_tensor_scale, not format.has_tensor_scale
    new_word = maker((2 if rotate and measures else 1,), torch.int32, device)
    numbers = (*format_numbers(format), measures, eps_bits, largest, rotate, True, 0, 0, 0, 0)
    # In a pass of its own, where the kernel that aligns doesn't quantize so.
    shifts = align_plans(x.shape, format if rows else None, format if columns else None, aligned)

    def read(x, amax=None, multiplier=None, keys=None):
        x = x.resolve_neg() if x.is_neg() else x
        known = recorded = None
        if measures:
            known = new_word()
        elif in_blocks:
            recorded = new_word()
        elif multiplier is None:
            known = amax
        else:
            known, recorded = multiplier, new_word()
        if given and known is not None and known.device != device:
            check_beside(x, "x", **{"amax" if multiplier is None else "multiplier": known})
        parts: list[Any] = [None] * 6
        for place, new in made:
            parts[place] = new()
        if one_scale:
            parts[4] = parts[1]
        run(x, known, recorded, keys if random else None, *parts, *numbers)
        for place in absent:
            del parts[place]
        if shifts:
            align_parts(parts, shifts)
        if multiplier is not None:
            parts.append(recorded)
        return parts

    return read


def _aligned_reader(
    x: Tensor, format: Format, row: bool, column: bool | None
) -> Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], list[Tensor]]:
    """Plans to quantize matrices that lie as x does straight to aligned codes, rounded to nearest; otherwise as `reader`.

    The parts are those that `reader` makes, shifted by `cuda_layouts.align`.

    Args:
        x: one of them, with elements.
        format: MX in blocks of 1x32.
        row: whether codes along the rows are wanted, aligned.
        column: whether those of the transposed matrix are aligned, or stay those of the format; None where they aren't wanted.
    """
    device, run = x.device, library().quantize_aligned
    *leading, height, width = x.shape
    turned = (*leading, width, height)
    found = [*(aligned_shapes(x.shape) if row else (None, None)), *(aligned_shapes(turned) if column else (None, None))]
    outputs = [None if shape is None else (shape, i % 2) for i, shape in enumerate(found)]
    stored = layout.parts(turned, format) if column is False else (None, None)
    outputs += [None if one is None else (one[0], False) for one in stored]
    made = [
        (place, maker(one[0], torch.float32 if one[1] else torch.uint8, device))
        for place, one in enumerate(outputs)
        if one is not None
    ]
    absent = [place for place in reversed(range(6)) if outputs[place] is None]
    new_word, numbers = maker((1,), torch.int32, device), format_numbers(format)

    def read(x, amax=None, multiplier=None, keys=None):
        x = x.resolve_neg() if x.is_neg() else x
        parts: list[Any] = [None] * 6
        for place, new in made:
            parts[place] = new()
        run(x, new_word(), *parts, *numbers)
        for place in absent:
            del parts[place]
        return parts

    return read


def _rows_reader(format: Format, eps_bits: int, largest: int, rows: bool, columns: bool, rotate: bool, random: bool):
    """`reader` of a format with a scale for each row."""
    if rotate:
        raise ValueError(f"only NVFP4 in blocks of 1x16 is rotated here, got {format}")
    run, directions = library(), [turned for turned, wanted in ((False, rows), (True, columns)) if wanted]
    mark_each = marker([format] * len(directions), False)

    def read(x, amax=None, multiplier=None, keys=None):
        key = keys.view(4) if random and keys is not None else None
        parts = cuda.outputs_of(x, tuple(x.shape), format) if rows else (None, None)
        both = cuda.quantize_rows(
            run, cuda.stack_of(x), format, None, key, parts, eps_bits, largest, (0, 0, 0, 0), rows, columns
        )
        made = [q[:2] for q in both[:2] if q.codes is not None]
        if x.numel():
            mark_each(x, made, both.amax)
        return [part for parts in made for part in parts]

    return read
