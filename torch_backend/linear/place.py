"""`Place`: which part of a matrix a rank of a tensor-parallel group holds, in words that compiled code takes as constants."""

from __future__ import annotations

from typing import NamedTuple

from blockfp.sharding.placement import Mesh, Shard, Sharding

ROWS, COLUMNS = 0, 1


class Place(NamedTuple):
    """Which part of the matrix of one data-parallel rank, [rows, columns], this rank holds.

    Attributes:
        group: name of the process group that the matrix is cut over.
        ranks: how many ranks it has.
        rank: this rank's number in it.
        axis: `ROWS` or `COLUMNS`, what is cut.
        runs: how many sequences the rows are of, one after another: each is cut alike, and a rank holds its part of every one.
        length: of what is cut, on all ranks together: rows of one sequence, or columns. None where all ranks hold the same.
    """

    group: str
    ranks: int
    rank: int
    axis: int
    runs: int = 1
    length: int | None = None


def sharding_of(place: Place, local: tuple[int, int]) -> Sharding:
    """How the whole matrix lies. Runs are an axis of the mesh, along which this rank has all places.

    Raises:
        ValueError: a part of that shape isn't what this rank holds.
    """
    rows, columns = local
    own = columns if place.axis == COLUMNS else rows // place.runs
    length = own * place.ranks if place.length is None else place.length
    if place.axis == COLUMNS:
        lies = Sharding((rows, length), Mesh((place.ranks,), ("tp",)), (Shard(1),))
    elif place.runs == 1:
        lies = Sharding((length, columns), Mesh((place.ranks,), ("tp",)), (Shard(0),))
    else:
        mesh = Mesh((place.runs, place.ranks), ("sequence", "tp"))
        lies = Sharding((place.runs * length, columns), mesh, (Shard(0), Shard(0)))
    shape = lies.region(place.rank).shape
    if (shape[0] * place.runs, shape[1]) != local:
        raise ValueError(
            f"x: rank {place.rank} of {place.ranks} must hold {shape[0] * place.runs} x {shape[1]} of a matrix that lies "
            f"{lies}, got {rows} x {columns}"
        )
    return lies
