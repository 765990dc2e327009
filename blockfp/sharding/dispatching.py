"""Dispatch of tokens to experts on other ranks, and back: the order in which rows are sent and received.

Each rank has its own tokens and some of the experts: rank r has the experts from r * chunk (`chunk_of`). A token goes to k
experts, one per slot: slot t * k + j holds the j-th expert of token t.

    sent        a rank's slots sorted by expert, stable
    arrived     sorted by expert, then by rank, then in the order sent

An expert's rows are thus in the order of a single process with the tokens of all ranks concatenated. Rows move unchanged, as
values or as codes with scales. If no scale spans several rows, or one covers all of them, quantizing before or after gives the
same.

`dispatched` and `combined` do this on lists of NumPy arrays, one per rank; other executors are tested against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..formats import Format


class Sending(NamedTuple):
    """The order in which a rank sends its slots.

    Attributes:
        slots: int64 [tokens * k], the slot of each row sent.
        counts: int64 [experts], the number of rows per expert.
    """

    slots: np.ndarray
    counts: np.ndarray


def chunk_of(experts: int, ranks: int) -> int:
    """Returns the number of experts per rank, by torch's chunk rule: the last ranks may have fewer."""
    return -(-experts // ranks)


def check_rows(format: Format) -> None:
    """Raises ValueError if rows of a matrix in this format share blocks, so that single rows can't be sent."""
    if format.block is not None and format.block[0] != 1:
        raise ValueError(
            f"tokens in {format} share blocks of {format.block[0]} rows, which can't go to different experts: use blocks of "
            "one row, or one scale per tensor, for the input and the gradient"
        )


def sending(experts: np.ndarray, total: int) -> Sending:
    """Sorts a rank's slots by expert; `experts` is int [tokens, k] in 0..total - 1, `total` counts the experts of all ranks."""
    flat = experts.reshape(-1)
    return Sending(np.argsort(flat, kind="stable"), np.bincount(flat, minlength=total))


def arrival(counts: np.ndarray) -> np.ndarray:
    """Returns the permutation that sorts received rows (ordered by rank) by expert.

    `counts` is int [ranks, own experts]: rows from each rank to each local expert.
    """
    ranks, own = counts.shape
    expert = np.repeat(np.tile(np.arange(own), ranks), counts.reshape(-1))
    return np.argsort(expert, kind="stable")


def _counts(experts: Sequence[np.ndarray], total: int, rank: int) -> np.ndarray:
    chunk = chunk_of(total, len(experts))
    own = slice(rank * chunk, min((rank + 1) * chunk, total))
    return np.stack([sending(each, total).counts[own] for each in experts])


def _between(experts: Sequence[np.ndarray], total: int) -> list[list[int]]:
    """Returns the number of rows from each rank to each rank."""
    counts = [_counts(experts, total, rank).sum(1) for rank in range(len(experts))]
    return np.stack(counts, 1).tolist()


def dispatched(rows: Sequence[np.ndarray], experts: Sequence[np.ndarray], total: int) -> list[np.ndarray]:
    """Moves rows to the ranks of their experts.

    Args:
        rows: per rank, [tokens, ..]: values, codes or scales.
        experts: per rank, [tokens, k].
        total: number of experts on all ranks.

    Returns:
        Per rank [rows received, ..], sorted by expert.
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
    """Moves rows back from the experts to their slots; inverts `dispatched`.

    Args:
        rows: per rank, [rows, ..], sorted by expert.
        experts: per rank, [tokens, k].
        total: number of experts on all ranks.

    Returns:
        Per rank [tokens, k, ..].
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
