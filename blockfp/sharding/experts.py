"""Tokens that travel to the experts of a mixture as codes and scales: the rules that all backends share.

Sending. A token's codes and scales must be its own: blocks of one row, and no scale of a whole tensor. Then rows may be
quantized before they travel or behind, in any order, and

    dispatch(quantize(x)) == quantize(dispatch(x))        bit for bit

Arriving. Rows lie expert by expert; those of one expert in the order of ranks, then of the sender's tokens: as they would lie
if one rank held all tokens. The form along the tokens, for the weight's gradient, is never sent: it is the quantization of the
transposed values that arrived, as `dequantize` gives them in the nominal dtype, in blocks that begin at each expert's first row.

Gradients. Where scales are powers of two, quantizing values that were quantized changes none of them (another scale may give
other codes for the same values). So a gradient may travel quantized, arrive as values, and be quantized by the layer it arrives
at: its product takes the values that it would have taken. With other scales it would be rounded twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..formats import Format


class Row(NamedTuple):
    """One row that arrives at an expert."""

    rank: int
    token: int
    choice: int


def why_not_sent(format: Format) -> str | None:
    """The reason why tokens in this format can't be sent one by one, or None."""
    if format.has_tensor_scale:
        return f"{format} has a scale for the whole tensor, which the rows of one expert on all ranks would share"
    if format.block is not None and format.block[0] > 1:
        return f"{format} has blocks of {format.block[0]} rows, which would be taken apart"
    return None


def why_not_twice(format: Format) -> str | None:
    """The reason why values in this format may change where they are quantized once more, or None."""
    return None if format.scale.power_of_two else f"{format} has scales that are no powers of two"


def arrivals(chosen: Sequence[np.ndarray], experts: int) -> list[list[list[Row]]]:
    """The rows that arrive: by rank, by expert of that rank, in their order.

    Args:
        chosen: of each rank, the experts [tokens, choices] of its tokens, -1 for none.
        experts: how many all ranks have, divided evenly.
    """
    ranks = len(chosen)
    if experts % ranks:
        raise ValueError(f"experts = {experts} must be a multiple of the {ranks} ranks")
    rows: list[list[Row]] = [[] for _ in range(experts)]
    for rank, of_rank in enumerate(chosen):
        for (token, choice), expert in np.ndenumerate(np.asarray(of_rank)):
            if expert >= 0:
                rows[expert].append(Row(rank, token, choice))
    each = experts // ranks
    return [rows[rank * each : (rank + 1) * each] for rank in range(ranks)]
