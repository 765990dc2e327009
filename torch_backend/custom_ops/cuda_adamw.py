"""The optimizer's calls of the CUDA kernel library, on torch tensors.

They enqueue work on the current stream, wait for nothing, and may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockfp.definition.bits import Array
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
