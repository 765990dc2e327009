"""Sums in one fixed order: a binary tree over the numbers of the terms.

0   1   2   3   4   5        (((0 + 1) + (2 + 3)) + (4 + 5))
└─┬─┘   └─┬─┘   └─┬─┘
  └───┬───┘       │          A rank that has a power of two of them, one behind the other and as many as every other rank,
      └─────┬─────┘          makes a whole subtree. So the ranks' sums, added in the same way, give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_internals import functional_collectives as collectives


class TreeSum:
    """A sum of terms that come one after another, in fp32; it keeps a partial sum for each power of two."""

    def __init__(self):
        self._partial: list[tuple[int, Tensor]] = []

    def add(self, term: Tensor, *, owned: bool = False) -> None:
        """Adds the next term.

        Args:
            term: of any float dtype; left as it is, unless it is owned.
            owned: whether it may be kept and written to.
        """
        count = 1
        if term.dtype is not torch.float32:
            term, owned = term.float(), True
        while self._partial and self._partial[-1][0] == count:
            count, term, owned = 2 * count, self._partial.pop()[1].add_(term), True
        self._partial.append((count, term if owned else term.clone()))

    def total(self) -> Tensor:
        """Returns the sum of all terms, at least one, and begins anew."""
        _, total = self._partial.pop()
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total


def tree_sum(terms: Tensor) -> Tensor:
    """Returns the sum over the first axis, float32; a float32 tensor of terms is written over."""
    tree = TreeSum()
    for term in terms:
        tree.add(term, owned=True)
    return tree.total()


def tree_reduce(terms: Tensor, group: str, ranks: int, dtype: torch.dtype) -> Tensor:
    """Sums the ranks' terms, float32, in the order of the ranks, and rounds once to a dtype; every rank gets all of it.

    Each rank adds its share of the elements up, and the shares are gathered in the result's dtype.
    """
    if ranks == 1:
        return terms.to(dtype)
    share = -(-terms.numel() // ranks)
    sent = torch.nn.functional.pad(terms.flatten(), (0, share * ranks - terms.numel())).view(ranks, share)
    ones = [1] * ranks
    received = collectives.wait_tensor(collectives.all_to_all_single(sent, ones, ones, group))
    own = tree_sum(received).to(dtype)
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(own, ranks, group))
    return whole.flatten()[: terms.numel()].view(terms.shape)
