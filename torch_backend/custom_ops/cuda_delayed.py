"""Delayed scaling's calls of the CUDA kernel library, on torch tensors: a step of all operands in one.

They enqueue work on the current stream, wait for nothing, and may be captured in a graph, of which addresses are part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from blockfp.definition import scaling
from blockfp.definition.recipe import Delayed
from blockfp.formats import ElementFormat
from blockfp.kernels.cuda_library import library

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
