"""Plans of the CUDA library's casts of what an activation makes, which never lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.bits import dtype_name
from blockfp.definition.layout import parts as parts_of
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.format_numbers import cuda_rotates, format_numbers

from . import cuda

MadeRun = Callable[[Sequence[Tensor | None], Tensor | None, Tensor | None], list[Tensor]]
"""Quantizes what is made of some inputs: (inputs, amax, multiplier) -> [row parts .., column parts .., amax of formats with one
scale per tensor]."""

_FORMATS = {("e4m3", None), ("e4m3", 128), ("e4m3", 32), ("e3m2", 32), ("e2m1", 32), ("e2m1", 16)}
"""Elements and lengths of 1-D blocks, None for the whole tensor (kMadeBlock in kernels/cuda/quantize/sources.cuh)."""


def known(format: Format) -> bool:
    """Says whether the kernels are compiled for a format."""
    length = None if format.block is None else format.block[1]
    return (format.element.name, length) in _FORMATS and (format.block is None or format.block[0] == 1)


def measures(format: Format | None, knows_amax: bool, multiplied: bool) -> bool:
    """Says whether the amax of what is made has to be found first."""
    return format is not None and format.has_tensor_scale and not multiplied and not knows_amax


def plan_of(
    run: Callable[..., None],
    first: tuple[float, ...],
    x: Tensor,
    row: Format | None,
    column: Format | None,
    knows_amax: bool,
    multiplied: bool,
    rotate: bool,
    eps: float,
) -> MadeRun | None:
    """Makes the plan for inputs that lie as these do; None where the kernels don't have the format or the lengths.

    Args:
        run: the library's function.
        first: the numbers that it takes before those of the format.
        x: an input as large as what is made of it, [rows, columns].
        row, column: formats of the directions, None for one that isn't wanted.
        knows_amax: whether the amax of what is made will be given, of formats with one scale per tensor.
        multiplied: whether a multiplier will be given: delayed scaling.
        rotate: whether the random Hadamard transform comes before the columnwise direction.
        eps: lifts amaxes, of formats where it has a meaning.
    """
    format = row or column
    assert format is not None
    if rotate and column is not None and not cuda_rotates(column):
        return None
    if (row is not None and column is not None and row is not column) or format.scale.four_over_six:
        return None
    if not known(format):
        return None
    length, (rows, columns) = None if format.block is None else format.block[1], x.shape
    fits = rows % (32 if format.element.bits == 4 else 16) == 0 if column is not None else columns % (length or 1) == 0
    if not fits:
        return None
    measured, device = measures(format, knows_amax, multiplied), x.device
    eps_bits, largest = cuda.limits(format, eps_for(format, eps), dtype_name(x))
    outputs: list[Any] = []
    for one, shape in ((row, (rows, columns)), (column, (columns, rows))):
        found = [] if one is None else [(size, getattr(torch, name)) for size, name in parts_of(shape, one)]
        outputs += found + [None] * (3 - len(found))
    rotated = rotate and column is not None
    whole = format.per_tensor
    numbers = (*first, *format_numbers(format), measured, eps_bits, largest, rotated)
    empty, int32 = torch.empty, torch.int32

    def quantize(inputs: Sequence[Tensor | None], amax: Tensor | None, multiplier: Tensor | None) -> list[Tensor]:
        given = recorded = None
        if measured:
            given = empty(1 + rotated, dtype=int32, device=device)
        elif knows_amax:
            given = amax
        else:
            recorded = empty(1, dtype=int32, device=device)
        if multiplier is not None:
            if multiplier.device != device:
                raise ValueError(f"multiplier is on {multiplier.device} and x on {device}: pass multiplier.to(x.device)")
            given = multiplier.detach().view(1)
        made = [None if one is None else empty(one[0], dtype=one[1], device=device) for one in outputs]
        run(*inputs, given, recorded, *made, *numbers)
        parts = [part for part in made if part is not None]
        found = given if recorded is None else recorded
        # What was given is no result of its own.
        return [*parts, found.clone() if knows_amax else found] if whole and found is not None else parts

    return quantize
