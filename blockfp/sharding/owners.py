"""One owner rank for each matrix of sharded parameters, and the parts that travel to it and back.

An operation on whole matrices (Newton-Schulz) gives the bits of one process on every mesh if one rank does it on the whole
matrix. Owners are chosen so that all ranks have about equal work. Parts travel along one mesh axis after another, in one
all-to-all each: towards the owner's coordinate along that axis, and back in the opposite order. Along replicated axes nothing
is gathered, and every replica gets a copy of the result.

`travel` simulates this on NumPy arrays of all ranks; other executors are tested against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .placement import Mesh, Region, Shard, Sharding, StridedShard


class Part(NamedTuple):
    """A rank's part of a matrix.

    Attributes:
        array: index of the array.
        matrix: index of the matrix in the array, with leading axes flattened.
        rank: a rank that holds the part; of replicas, the one on the owner's side.
        rows, columns: (start, stop) in the matrix.
        local: index of the matrix in the rank's local array.
    """

    array: int
    matrix: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    local: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


Parts = tuple[Part, ...]


class Stage(NamedTuple):
    """One all-to-all: the parts that go to, and come from, each rank along a mesh axis; a rank keeps its own."""

    axis: str
    sent: tuple[Parts, ...]
    received: tuple[Parts, ...]


class Plan(NamedTuple):
    """A rank's share of the work.

    Attributes:
        held: parts of this rank's own local arrays.
        gather: stages that bring parts to owners.
        whole: for each matrix that this rank owns, its parts.
        scatter: stages that bring results back.
    """

    held: Parts
    gather: tuple[Stage, ...]
    whole: tuple[Parts, ...]
    scatter: tuple[Stage, ...]


def owners(costs: Sequence[float], holders: Sequence[Sequence[int]], ranks: int) -> tuple[int, ...]:
    """Chooses the rank that does each task, in descending order of cost the least loaded one so far.

    `holders` lists the ranks that may do a task, if only some may; these tasks are placed first. Ties go to the task and rank
    that come first, so that all ranks find the same.
    """
    loads, found = [0.0] * ranks, [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda i: (not holders[i], -costs[i])):
        rank = min(holders[task] or range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[task]
        found[task] = rank
    return tuple(found)


class _Matrix:
    """A matrix with its owner: which parts of it each rank holds."""

    def __init__(self, array: int, matrix: int, lies: Sharding):
        self.array, self.matrix, self.lies, self.mesh = array, matrix, lies, lies.mesh
        self.cut = [isinstance(placement, Shard | StridedShard) for placement in lies.placements]
        self.ranks, self.holders = _ranks(lies, matrix)
        self.owner: tuple[int, ...] = ()

    def part(self, coordinate: Sequence[int]) -> Part | None:
        """Returns the part at a coordinate, named after the owner's side along replicated axes; None if it is empty."""
        sides = [c if cut else own for c, cut, own in zip(coordinate, self.cut, self.owner, strict=True)]
        rank = self.mesh.rank(sides)
        region = self.lies.regions[rank]
        local = _local(self.lies, self.matrix, region)
        if local is None:
            return None
        (row, column), (rows, columns) = region.start[-2:], region.shape[-2:]
        return Part(self.array, self.matrix, rank, (row, row + rows), (column, column + columns), local)

    def parts(self, coordinate: Sequence[int], axes: int) -> list[Part]:
        """Returns the parts at all positions along the first `axes` axes, in order."""
        ranges = [range(n) if cut else [own] for n, cut, own in zip(self.mesh.shape, self.cut, self.owner, strict=True)]
        places = itertools.product(*ranges[:axes], *([c] for c in coordinate[axes:]))
        return [part for place in places if (part := self.part(place)) is not None]

    def gathered(self, coordinate: Sequence[int], axis: int) -> list[Part]:
        """Returns what a rank has before the stage that gathers along `axis`."""
        sides = zip(coordinate, self.cut, self.owner, strict=True)
        if any(c != own and (i < axis or not cut) for i, (c, cut, own) in enumerate(sides)):
            return []
        return self.parts(coordinate, axis)

    def result(self, coordinate: Sequence[int], axis: int, to: int) -> list[Part]:
        """Returns what a rank sends to position `to` in the stage that scatters along `axis`."""
        if tuple(coordinate[: axis + 1]) != self.owner[: axis + 1]:
            return []
        return self.parts(_moved(coordinate, axis, to), axis)


@lru_cache(maxsize=4096)
def _ranks(lies: Sharding, matrix: int) -> tuple[list[int], list[int]]:
    """Returns the ranks that hold some of a matrix, and those that hold all of it."""
    some = [rank for rank in range(lies.mesh.size) if _local(lies, matrix, lies.regions[rank]) is not None]
    return some, [rank for rank in some if lies.regions[rank].shape[-2:] == lies.shape[-2:]]


def _local(lies: Sharding, matrix: int, region: Region) -> int | None:
    """Returns a matrix's index in a rank's local array; None if the rank has nothing of it."""
    if region.empty:
        return None
    local, below = 0, math.prod(lies.shape[:-2])
    for length, start, size in zip(lies.shape[:-2], region.start, region.shape, strict=False):
        below //= length
        index, matrix = divmod(matrix, below)
        if not start <= index < start + size:
            return None
        local = local * size + index - start
    return local


def _moved(coordinate: Sequence[int], axis: int, to: int) -> list[int]:
    return [*coordinate[:axis], to, *coordinate[axis + 1 :]]


@lru_cache(maxsize=256)
def plan(shardings: tuple[Sharding, ...], rank: int, cost: Callable[[int, int], float]) -> Plan:
    """Returns what a rank sends, computes and receives for arrays on one mesh.

    A matrix that some ranks hold whole is done by one of them.

    Args:
        shardings: of the arrays, [..., rows, columns], all on one mesh.
        rank: this rank.
        cost: maps (rows, columns) to the work for a matrix.
    """
    matrices = [
        _Matrix(i, j, lies)
        for i, lies in enumerate(shardings)
        for j in range(math.prod(lies.shape[:-2]))
        if 0 not in lies.shape
    ]
    if not matrices:
        return Plan((), (), (), ())
    mesh: Mesh = matrices[0].mesh
    chosen = owners([cost(*one.lies.shape[-2:]) for one in matrices], [one.holders for one in matrices], mesh.size)
    for one, owner in zip(matrices, chosen, strict=True):
        one.owner = mesh.coordinate(owner)
    here = mesh.coordinate(rank)
    gather, scatter = [], []
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.shape, strict=True)):
        others = [_moved(here, axis, i) for i in range(size)]
        away = [one for one in matrices if any(mesh.coordinate(r)[axis] != one.owner[axis] for r in one.ranks)]
        cut = [one for one in away if one.cut[axis]]
        if cut:
            sent = [[p for m in cut if m.owner[axis] == i for p in m.gathered(here, axis)] for i in range(size)]
            came = [[p for m in cut if m.owner[axis] == here[axis] for p in m.gathered(o, axis)] for o in others]
            gather.append(_stage(name, sent, came, here[axis]))
        if away:
            sent = [[p for m in away for p in m.result(here, axis, i)] for i in range(size)]
            came = [[p for m in away for p in m.result(o, axis, here[axis])] for o in others]
            scatter.insert(0, _stage(name, sent, came, here[axis]))
    held = tuple(part for one in matrices if (part := one.part(here)) is not None)
    whole = tuple(tuple(one.parts(here, len(here))) for one in matrices if one.owner == here)
    return Plan(held, tuple(gather), whole, tuple(scatter))


def _stage(axis: str, sent: list[list[Part]], received: list[list[Part]], own: int) -> Stage:
    sent[own] = received[own] = []
    return Stage(axis, tuple(map(tuple, sent)), tuple(map(tuple, received)))


def travel(
    arrays: Sequence[np.ndarray],
    shardings: tuple[Sharding, ...],
    cost: Callable[[int, int], float],
    compute: Callable[[np.ndarray], np.ndarray],
) -> list[list[np.ndarray]]:
    """Applies `compute` to each matrix of the arrays as the ranks would; returns the local results of each rank."""
    mesh = shardings[0].mesh
    plans = [plan(shardings, rank, cost) for rank in range(mesh.size)]
    held = [{part: _of(arrays[part.array], part) for part in one.held} for one in plans]
    _exchange(mesh, [one.gather for one in plans], held)
    for one, has in zip(plans, held, strict=True):
        for parts in one.whole:
            matrix = np.zeros(shardings[parts[0].array].shape[-2:], arrays[parts[0].array].dtype)
            for part in parts:
                matrix[slice(*part.rows), slice(*part.columns)] = has[part]
            done = compute(matrix)
            has |= {part: done[slice(*part.rows), slice(*part.columns)] for part in parts}
    _exchange(mesh, [one.scatter for one in plans], held)
    found = []
    for rank, (one, has) in enumerate(zip(plans, held, strict=True)):
        local = [np.zeros(lies.regions[rank].shape, x.dtype) for x, lies in zip(arrays, shardings, strict=True)]
        for part in one.held:
            shape = local[part.array].shape[-2:]
            local[part.array].reshape(-1, *shape)[part.local] = has[part]
        found.append(local)
    return found


def _of(array: np.ndarray, part: Part) -> np.ndarray:
    return array.reshape(-1, *array.shape[-2:])[part.matrix, slice(*part.rows), slice(*part.columns)]


def _exchange(mesh: Mesh, stages: Sequence[tuple[Stage, ...]], held: list[dict[Part, np.ndarray]]) -> None:
    """Carries out all ranks' stages; `held` is changed."""
    for together in zip(*stages, strict=True):
        before = [dict(has) for has in held]
        for rank, stage in enumerate(together):
            group = mesh.group(rank, [stage.axis])
            for peer, parts in zip(group, stage.received, strict=True):
                assert parts == together[peer].sent[group.index(rank)]
                held[rank] |= {part: before[peer][part] for part in parts}
