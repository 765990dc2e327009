"""The optimizer's calls of the CUDA kernel library, on torch tensors.

They enqueue work on the current stream, wait for nothing, and may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from blockfp.definition import scaling
from blockfp.definition.bits import Array
from blockfp.definition.recipe import Delayed
from blockfp.formats import ElementFormat
from blockfp.kernels.cuda_library import library


def addresses(arrays: Sequence[Array | None], expected: np.ndarray) -> tuple[np.ndarray, int]:
    """Finds the addresses of arrays on one CUDA device, in a small part of the time that it takes to ask each of them.

    Args:
        arrays: torch tensors, or None.
        expected: of `step_table.Table`, for as many.

    Returns:
        int64, 0 for None; and the index of the first that is not contiguous, on the device of the first and as expected, or -1.
    """
    found = np.empty(len(arrays), np.int64)
    return found, library().addresses(found, expected, *arrays)


def count_steps(steps: Sequence[Array]) -> list[int] | None:
    """Raises step numbers by one, in place: float32 CPU tensors of shape (). None, with nothing changed, if one is no such."""
    found = np.empty(len(steps), np.int64)
    return None if library().count_steps(found, *steps) >= 0 else found.tolist()


def adamw(table: Any, on: Any) -> None:
    """AdamW steps in place, of torch tensors on one CUDA device; see `native.adamw`.

    Constants and step numbers may be tensors on the device. Addresses are part of what a CUDA graph captures.

    Args:
        table: of `step_table.pack`.
        on: any of the tensors, whose device and stream are used.
    """
    library().adamw(table, on.detach())


def adamw_codes(table: Any, on: Any) -> None:
    """Writes codes and scales of new masters whose formats need the amax of the whole parameter, which is known by now.

    Args:
        table: of `step_table.second_pass`.
        on: any of the tensors, whose device and stream are used.
    """
    library().adamw_codes(table, on.detach())


# ---- delayed scaling


Numbers = tuple[int, bool]
"""What the kernel is told of an operand, see `numbers`."""


def numbers(element: ElementFormat, options: Delayed) -> Numbers:
    """Returns what the kernel is told of an operand, besides where its state lies."""
    return scaling.largest_with_margin(element, options.margin), options.algorithm == "most_recent"


def update_scales(operands: Sequence[Numbers], newest: Tensor | None, state: Sequence[Tensor]) -> bool:
    """Takes the step of `definition.scaling.update`, in place.

    Args:
        operands: `numbers` of each.
        newest: int32 [operands], fp32 bits that stand instead of the histories' first entries; or None.
        state: of each operand its history, [length], and its scale, one operand after the other.

    Returns:
        False, with nothing changed, where the state is not of float32, contiguous, on one device and each in memory of its own.
    """
    return library().update_scales(np.array(operands, np.int32), newest, *state) < 0


def newest_amaxes(out: Tensor, state: Sequence[Tensor]) -> bool:
    """Writes the first entry of each history to `out`, int32 [operands], as fp32 bits.

    Returns:
        False, with nothing written, where `update_scales` would return it.
    """
    return library().newest_amaxes(out, *state) < 0
