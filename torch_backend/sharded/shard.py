"""`TensorParallelShard`: the part of an array that one rank of a tensor-parallel group holds."""

from __future__ import annotations

from typing import NamedTuple

from blockfp.sharding.placement import Mesh, Shard, Sharding

ROWS, COLUMNS = 0, 1

AXIS = "tp"
"""The mesh axis of a tensor-parallel group in the core's plans."""


class TensorParallelShard(NamedTuple):
    """The part of an array that this rank holds, in values that compiled code takes as constants.

    Attributes:
        group: name of the process group that the array is cut over.
        ranks: how many ranks it has.
        rank: this rank's number in it.
        dim: the array axis that is cut; `ROWS` or `COLUMNS` of a matrix.
        length: of that axis, on all ranks together (of one run's rows); None where all ranks hold the same.
        runs: sequences that the rows are of, one after another: each is cut alike, and a rank holds its part of every one.
    """

    group: str
    ranks: int
    rank: int
    dim: int
    length: int | None = None
    runs: int = 1

    def sharding(self, local: tuple[int, int]) -> Sharding:
        """The sharding of the whole matrix. Runs are an axis of the mesh, along which this rank has all places.

        Args:
            local: shape [rows, columns] of this rank's part.

        Raises:
            ValueError: a part of that shape isn't what this rank holds.
        """
        rows, columns = local
        own = columns if self.dim == COLUMNS else rows // self.runs
        length = own * self.ranks if self.length is None else self.length
        if self.dim == COLUMNS:
            sharding = Sharding((rows, length), Mesh((self.ranks,), (AXIS,)), (Shard(1),))
        elif self.runs == 1:
            sharding = Sharding((length, columns), Mesh((self.ranks,), (AXIS,)), (Shard(0),))
        else:
            mesh = Mesh((self.runs, self.ranks), ("sequence", AXIS))
            sharding = Sharding((self.runs * length, columns), mesh, (Shard(0), Shard(0)))
        shape = sharding.region(self.rank).shape
        if (shape[0] * self.runs, shape[1]) != local:
            raise ValueError(
                f"x: rank {self.rank} of {self.ranks} must hold {shape[0] * self.runs} x {shape[1]} of a matrix that lies "
                f"{sharding}, got {rows} x {columns}"
            )
        return sharding
