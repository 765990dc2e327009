"""Tokens on their way to experts that ranks share, and back: where each row goes, and where it stands when it has arrived.

Each of `ranks` has tokens of its own, and some of the experts: rank r those from r * chunk on (`chunk_of`). A token goes to k
experts, each of which is a slot: slot t * k + j is the j-th expert of token t.

    sent        a rank's slots in the order of their experts, and within one expert in their own order
    arrived     by expert, and within one expert by rank, in the order in which they were sent

So an expert's rows are those that one process would have with the tokens of all ranks one after another. They are moved as they
are, values or codes with their scales: rows that share no scale, or all of them one, may be quantized before or after.

`dispatched` and `combined` carry this out on lists of NumPy arrays, one for each rank; other executors are held against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..formats import Format


class Sending(NamedTuple):
    """The order in which a rank sends its slots.

    Attributes:
        slots: int64 [tokens * k], the slot of each row that is sent.
        counts: int64 [experts], how many rows go to each.
    """

    slots: np.ndarray
    counts: np.ndarray


def chunk_of(experts: int, ranks: int) -> int:
    """Returns how many experts a rank has, but for the last ones, which may have fewer: as torch cuts an axis."""
    return -(-experts // ranks)


def check_rows(format: Format) -> None:
    """Checks that rows can be taken out of a quantized matrix.

    Raises:
        ValueError: rows of it share blocks.
    """
    if format.block is not None and format.block[0] != 1:
        raise ValueError(
            f"tokens in {format} share blocks of {format.block[0]} rows, which can't go to different experts: use blocks of "
            "one row, or one scale per tensor, for the input and the gradient"
        )


def sending(experts: np.ndarray, total: int) -> Sending:
    """Orders a rank's slots by expert.

    Args:
        experts: int [tokens, k], from 0 to total - 1.
        total: how many experts there are on all ranks.
    """
    flat = experts.reshape(-1)
    return Sending(np.argsort(flat, kind="stable"), np.bincount(flat, minlength=total))


def arrival(counts: np.ndarray) -> np.ndarray:
    """Returns which of the rows that arrived, rank after rank, stands at each place once they are sorted by expert.

    Args:
        counts: int [ranks, own experts], rows from each rank to each of the experts here.
    """
    ranks, own = counts.shape
    expert = np.repeat(np.tile(np.arange(own), ranks), counts.reshape(-1))
    return np.argsort(expert, kind="stable")


def _counts(experts: Sequence[np.ndarray], total: int, rank: int) -> np.ndarray:
    chunk = chunk_of(total, len(experts))
    own = slice(rank * chunk, min((rank + 1) * chunk, total))
    return np.stack([sending(each, total).counts[own] for each in experts])


def _between(experts: Sequence[np.ndarray], total: int) -> list[list[int]]:
    """Rows from each rank to each."""
    counts = [_counts(experts, total, rank).sum(1) for rank in range(len(experts))]
    return np.stack(counts, 1).tolist()


def dispatched(rows: Sequence[np.ndarray], experts: Sequence[np.ndarray], total: int) -> list[np.ndarray]:
    """Moves rows to their experts' ranks.

    Args:
        rows: of each rank, [tokens, ..]: values, codes or scales.
        experts: of each rank, [tokens, k].
        total: how many experts there are.

    Returns:
        For each rank [rows that came, ..], sorted by expert.
    """
    between, found = _between(experts, total), []
    for rank in range(len(rows)):
        came = []
        for source, (own, to) in enumerate(zip(rows, experts, strict=True)):
            first = sum(between[source][:rank])
            slots = sending(to, total).slots[first : first + between[source][rank]]
            came.append(own[slots // max(to.shape[1], 1)])
        found.append(np.concatenate(came)[arrival(_counts(experts, total, rank))])
    return found


def combined(rows: Sequence[np.ndarray], experts: Sequence[np.ndarray], total: int) -> list[np.ndarray]:
    """Moves rows, as `dispatched` left them, back to the slots that they are for.

    Args:
        rows: of each rank, [rows, ..], sorted by expert.
        experts: of each rank, [tokens, k].
        total: how many experts there are.

    Returns:
        For each rank [tokens, k, ..].
    """
    between, arrived = _between(experts, total), []
    for rank, own in enumerate(rows):
        back = np.empty_like(own)
        back[arrival(_counts(experts, total, rank))] = own
        arrived.append(back)
    found = []
    for source, to in enumerate(experts):
        parts = []
        for rank, back in enumerate(arrived):
            first = sum(between[other][rank] for other in range(source))
            parts.append(back[first : first + between[source][rank]])
        came = np.concatenate(parts)
        slots = np.empty_like(came)
        slots[sending(to, total).slots] = came
        found.append(slots.reshape(*to.shape, *came.shape[1:]))
    return found
