"""Amaxes of many arrays, reduced over the ranks that share them: one collective for all that go over the same groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..custom_ops.collectives import max_reduce_together
from .rank_plan import Quantization, SharedBlocks

Entry = tuple[list[Any], int, SharedBlocks | None, Tensor]
"""Amaxes of an array, the field that is reduced, which of its blocks (None: all of it), and what is sent."""


class AmaxExchange:
    """Collects amaxes of parts of arrays, and reduces them as plans say.

    Rows go first, then columns, because a block may straddle both ways. An amax of a whole tensor goes with the rows. Compiled
    code runs through it too.

    Example:
        >>> exchange = AmaxExchange()
        >>> exchange.add(amaxes, quantization, {"fsdp": group_name})
        >>> exchange.run()  # amaxes are reduced now
    """

    def __init__(self):
        self.parts: list[tuple[list[Any], Quantization, Mapping[str, str]]] = []
        self.waiting: dict[tuple[str, ...], list[Entry]] = {}
        self.rounds = 1

    def add(self, amaxes: list[Any], step: Quantization, groups: Mapping[str, str]) -> None:
        """Adds the amaxes of this rank's part of an array.

        Args:
            amaxes: blocks, nan, tensor and maybe members of `numerics.Amax`, which `run` replaces by the reduced ones. Entries
                that the format doesn't have are ignored.
            step: the part's quantization, from the plan.
            groups: from each mesh axis that the step reduces over to the name of its process group.
        """
        self.parts.append((amaxes, step, groups))
        self.rounds = max(self.rounds, len(step.shared))
        self._put(amaxes, step, groups, 0)

    def run(self) -> None:
        """Reduces all amaxes. Every rank that has a part of one of the arrays must call it, with the arrays in one order."""
        for turn in range(self.rounds):
            if turn:
                for part in self.parts:
                    self._put(*part, turn)
            for groups, entries in self.waiting.items():
                reduced = max_reduce_together([tensor for *_, tensor in entries], groups)
                for (amaxes, field, shared, _), tensor in zip(entries, reduced, strict=True):
                    amaxes[field] = tensor if shared is None else _put(amaxes[field], shared, tensor)
            self.waiting = {}

    def _put(self, amaxes: list[Any], step: Quantization, groups: Mapping[str, str], turn: int) -> None:
        if turn < len(step.shared):
            shared = step.shared[turn]
            for field in step.block_fields:
                self._wait(shared.axes, groups, (amaxes, field, shared, _taken(amaxes[field], shared)))
        if turn == 0 and step.amax_axes:
            field = step.tensor_field
            self._wait(step.amax_axes, groups, (amaxes, field, None, amaxes[field]))

    def _wait(self, axes: tuple[str, ...], groups: Mapping[str, str], entry: Entry) -> None:
        self.waiting.setdefault(tuple([groups[axis] for axis in axes]), []).append(entry)


def _taken(amaxes: Tensor, shared: SharedBlocks) -> Tensor:
    """The entries of shared blocks, among zeros for those that only other ranks have."""
    entries, end = [], 0
    for number, index in (*shared.held, (shared.count, None)):
        if number > end:
            shape = list(amaxes.shape)
            shape[shared.dim] = number - end
            entries.append(amaxes.new_zeros(shape))
        if index is not None:
            entries.append(amaxes.narrow(shared.dim, index, 1))
        end = number + 1
    return torch.cat(entries, shared.dim)


def _put(amaxes: Tensor, shared: SharedBlocks, entries: Tensor) -> Tensor:
    amaxes = amaxes.clone()
    for number, index in shared.held:
        amaxes.select(shared.dim, index).copy_(entries.select(shared.dim, number))
    return amaxes
