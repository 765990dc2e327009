"""`Parallel`: one rank's share of a linear layer that a tensor-parallel group computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from blockfp.formats import Format

from ...sharded.rank_plan import COLUMNS, ROWS, TensorParallelShard

Style = Literal["column", "row", "experts"]


@dataclass(frozen=True)
class Parallel:
    """One rank's share in a `linear` call of a tensor-parallel group. Names the group without holding it.

    Attributes:
        group: name of the process group.
        ranks: number of ranks in it.
        rank: this rank's index in it.
        style: "column" shards the weight's rows (out), "row" its columns (in), "experts" its groups.
        features: length of the sharded axis on all ranks together.
        sequence: whether a column's input or a row's output is sharded along tokens; otherwise these are replicated.
        sequence_dim: axis of tokens in x and the output: -2, after any axes of sequences, or 0.
        runs: number of sequences in x's rows, if tokens are sharded.
        length: tokens per sequence on all ranks together if x is a DTensor; None for plain tensors, of equal length on all
            ranks. `of` converts it to rows.
        reduce_format: format in which a reduce-scatter sends its terms; None for the output's dtype.
        splits: number of pieces on all ranks together in which the sharded axis is computed (`pieces`); None for one per rank.

    Raises ValueError for an unknown style.
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
        """Returns a copy for x of this shape [.., in], with its number of sequences and their rows.

        Raises ValueError if x has no such token axis, or if the ranks must divide its tokens and don't.
        """
        if not self.sequence:
            return self
        # `index` turns symbolic lengths into constants, which a plan needs.
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
            # Nothing is sharded.
            return replace(self, sequence_dim=dim, runs=1, length=None)
        length = None if self.length is None else tokens * rows_of_token
        return replace(self, sequence_dim=dim, runs=runs, length=length)

    def _whole(self, tokens: int) -> int:
        """Returns a sequence's tokens on all ranks, given those in this rank's x."""
        if self.length is not None:
            return self.length
        return tokens * self.ranks if self.gathers_input else tokens

    def output_tokens(self, tokens: int) -> int:
        """Returns a sequence's tokens in this rank's output, given those in its x; call it before `of`."""
        whole = self._whole(tokens)
        if not self.gathers_gradient:
            return whole
        chunk = -(-whole // self.ranks)
        return max(0, min(chunk, whole - self.rank * chunk))

    @property
    def gathers_input(self) -> bool:
        """True if the input is sharded along tokens and every rank needs all of them."""
        return self.style == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        """True if the output's gradient is sharded along tokens and every rank needs all of them."""
        return self.style == "row" and self.sequence

    @property
    def first(self) -> int:
        """Index of this rank's first expert."""
        return min(self.rank * -(-self.features // self.ranks), self.features)

    @property
    def tokens(self) -> TensorParallelShard:
        """This rank's tokens of an operand that will be gathered."""
        return TensorParallelShard(self.group, self.ranks, self.rank, ROWS, self.length, self.runs)

    def scattered(self, rows: int) -> TensorParallelShard:
        """Returns this rank's tokens after a reduce-scatter of `rows` rows."""
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
        """This rank's shard of the weight."""
        return self._features(ROWS if self.style == "column" else COLUMNS)

    def _features(self, dim: int) -> TensorParallelShard:
        return TensorParallelShard(self.group, self.ranks, self.rank, dim, self.features)
