"""`Parallel`: the share of one rank in a linear layer that a tensor-parallel group computes together."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from blockfp.formats import Format

from ..sharded.rank_plan import COLUMNS, ROWS, TensorParallelShard

Style = Literal["column", "row", "experts"]


@dataclass(frozen=True)
class Parallel:
    """One rank's share in a call of `linear` by a tensor-parallel group. A value: it names the group, and holds none.

    Attributes:
        group: name of the process group.
        ranks: how many ranks it has.
        rank: this rank's number in it.
        style: "column" cuts the weight's rows (out), "row" its columns (in), "experts" its groups.
        features: length of what is cut, on all ranks together.
        sequence: whether tokens are cut where they would be whole otherwise: a column's input, a row's output.
        sequence_dim: which axis of x and of the output is cut then: -2, behind axes of sequences, or 0.
        runs: sequences that x is of, where tokens are cut.
        length: tokens of one sequence on all ranks together, of x as a DTensor; None for plain tensors, of which all ranks have
            the same number. `of` makes rows of tokens.
        reduce_format: in which the terms of a reduce-scatter travel; None for the output's own dtype.
        splits: pieces in which what is cut is computed on all ranks together (`pieces`); None for one on each rank.

    Raises:
        ValueError: an unknown style.
    """

    group: str
    ranks: int
    rank: int
    style: Style
    features: int
    sequence: bool = False
    sequence_dim: int = -2
    runs: int = 1
    length: int | None = None
    reduce_format: Format | None = None
    splits: int | None = None

    def __post_init__(self):
        if self.style not in get_args(Style):
            raise ValueError(f"style must be one of {get_args(Style)}, got {self.style!r}")
        if self.sequence and self.style == "experts":
            raise ValueError("experts get the tokens that are sent to them: sequence must be False")

    def of(self, shape: Sequence[int]) -> Parallel:
        """Returns this for x of a shape [.., in], with the number of sequences in its rows and the rows of each.

        Raises:
            ValueError: x doesn't have the axis that is cut, or tokens that the ranks would have to divide, and don't.
        """
        if not self.sequence:
            return self
        # `index` makes compiled code take lengths as constants, which a plan needs.
        sizes = [operator.index(size) for size in shape]
        dim = self.sequence_dim % len(sizes)
        if len(sizes) < 2 or dim > len(sizes) - 2:
            raise ValueError(f"x must have its tokens on axis {self.sequence_dim}, before the last, got shape {tuple(shape)}")
        runs, rows_of_token, tokens = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 : -1]), self._whole(sizes[dim])
        if tokens % self.ranks and (self.length is None or rows_of_token > 1):
            raise ValueError(
                f"x {tuple(shape)} is {tokens} tokens on axis {dim}, which {self.ranks} ranks don't divide: pad them"
                + (", or pass a DTensor, whose parts may be uneven" if rows_of_token == 1 else "")
            )
        if self.ranks == 1 or not tokens * runs * rows_of_token:
            # Nothing is cut.
            return replace(self, sequence_dim=dim, runs=1, length=None)
        length = None if self.length is None else tokens * rows_of_token
        return replace(self, sequence_dim=dim, runs=runs, length=length)

    def _whole(self, tokens: int) -> int:
        """Tokens of one sequence on all ranks, from the number in this rank's x."""
        if self.length is not None:
            return self.length
        return tokens * self.ranks if self.gathers_input else tokens

    def output_tokens(self, tokens: int) -> int:
        """Tokens of one sequence in this rank's output, from the number in its x; call it before `of`."""
        whole = self._whole(tokens)
        if not self.gathers_gradient:
            return whole
        chunk = -(-whole // self.ranks)
        return max(0, min(chunk, whole - self.rank * chunk))

    @property
    def gathers_input(self) -> bool:
        """True if the input is cut along tokens, and every rank needs all of it."""
        return self.style == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        """True if the output's gradient is cut along tokens, and every rank needs all of it."""
        return self.style == "row" and self.sequence

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return min(self.rank * -(-self.features // self.ranks), self.features)

    @property
    def tokens(self) -> TensorParallelShard:
        """This rank's tokens of an operand that is gathered."""
        return TensorParallelShard(self.group, self.ranks, self.rank, ROWS, self.length, self.runs)

    def scattered(self, rows: int) -> TensorParallelShard:
        """This rank's tokens after a reduce-scatter of so many rows."""
        return self.tokens._replace(length=rows // self.runs)

    @property
    def cut_input(self) -> TensorParallelShard | None:
        """This rank's columns of a row-parallel input; None for other styles."""
        return self._features(COLUMNS) if self.style == "row" else None

    @property
    def cut_gradient(self) -> TensorParallelShard | None:
        """This rank's columns of a column-parallel output's gradient; None for other styles."""
        return self._features(COLUMNS) if self.style == "column" else None

    @property
    def cut_weight(self) -> TensorParallelShard:
        """This rank's part of the weight."""
        return self._features(ROWS if self.style == "column" else COLUMNS)

    def _features(self, dim: int) -> TensorParallelShard:
        return TensorParallelShard(self.group, self.ranks, self.rank, dim, self.features)
