"""Meshes, placements and shardings: which part of a global array each rank of a mesh holds.

These are plain values without a framework. A `Sharding` combines a global shape, a `Mesh` and one placement per mesh axis; it
computes the regions of shards and the blocks that they cut. Shards follow torch's chunk rule: each has ceil(size / ranks)
elements, so the last ones can be short or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import pieces


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 .. size - 1, row-major on named axes.

    Attributes:
        shape: number of ranks along each axis.
        names: the axes' names; "dim_0", "dim_1", .. by default.

    Raises:
        ValueError: an axis has no ranks, or the names don't fit the shape.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "names", tuple(self.names) or tuple(f"dim_{i}" for i in range(len(self.shape))))
        if not self.shape or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise ValueError(f"mesh shape must hold one or more sizes of at least 1, got {self.shape}")
        if len(self.names) != len(self.shape) or len(set(self.names)) != len(self.names):
            raise ValueError(f"mesh of shape {self.shape} needs {len(self.shape)} different names, got {self.names}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def axis(self, name: str) -> int:
        """Returns the position of an axis; raises ValueError for an unknown name."""
        if name not in self.names:
            raise ValueError(f"mesh has no axis {name!r}; its axes are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def axis_size(self, name: str) -> int:
        """Returns the number of ranks along an axis."""
        return self.shape[self.axis(name)]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Returns a rank's position along each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {rank}")
        coordinate = []
        for size in reversed(self.shape):
            rank, position = divmod(rank, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Returns the rank at a coordinate."""
        rank = 0
        for size, position in zip(self.shape, coordinate, strict=True):
            rank = rank * size + position
        return rank

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` only along `axes`, row-major over the axes in the given order."""
        base = list(self.coordinate(rank))
        positions = [self.axis(name) for name in axes]
        ranks = []
        for steps in itertools.product(*(range(self.shape[p]) for p in positions)):
            for position, step in zip(positions, steps, strict=True):
                base[position] = step
            ranks.append(self.rank(base))
        return tuple(ranks)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))


@dataclass(frozen=True)
class Replicate:
    """Every rank along the mesh axis holds the same data."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Shard:
    """Array axis `dim` is cut into chunks along this mesh axis, after mesh axes to its left have cut it."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class StridedShard:
    """Like `Shard(dim)`, but mesh axes to the right, with `split_factor` ranks in total, cut the array axis first.

    FSDP over tensor parallelism: on a mesh (fsdp, tp), tp cuts axis 0 and fsdp cuts tp's shards, which is (StridedShard(0,
    split_factor=tp's size), Shard(0)).
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"StridedShard({self.dim}, {self.split_factor})"


@dataclass(frozen=True)
class Partial:
    """Each rank holds a term; the array is the reduction of all terms by `op`."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.op!r})"


Placement = Replicate | Shard | StridedShard | Partial


@dataclass(frozen=True)
class Region:
    """A box of the global array.

    Attributes:
        start: first index along each array axis.
        shape: length along each array axis.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def origin(self) -> tuple[int, int]:
        """(row, column) of the first element in the unsharded matrix (the last two axes)."""
        return (self.start[-2], self.start[-1])

    @property
    def empty(self) -> bool:
        """Whether the region has no elements."""
        return 0 in self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this region in the global array."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Sharding:
    """A global array on a mesh, with one placement per mesh axis.

    Attributes:
        shape: the global shape, with two or more axes; the last two are the matrix.
        mesh: the ranks.
        placements: one per mesh axis; negative array axes are stored non-negative.

    Raises:
        ValueError: the number of placements is wrong, an array axis doesn't exist, or a `StridedShard` would give a rank
            several separate runs of an axis.
        TypeError: an entry is not a placement.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) < 2 or any(n < 0 for n in self.shape):
            raise ValueError(f"shape must have two or more axes of size 0 or more, got {self.shape}")
        placements = tuple(self.placements)
        if len(placements) != len(self.mesh.shape):
            raise ValueError(
                f"placements must have one entry per mesh axis ({len(self.mesh.shape)}: {self.mesh}), got "
                f"{len(placements)}: {_listed(placements)}"
            )
        object.__setattr__(self, "placements", tuple(self._with_axis(p) for p in placements))
        for dim in range(len(self.shape)):
            self.order(dim)

    def _with_axis(self, placement: Placement) -> Placement:
        if not isinstance(placement, Replicate | Shard | StridedShard | Partial):
            raise TypeError(
                f"placements must be Replicate, Shard, StridedShard or Partial of blockfp.sharding.placement, got "
                f"{type(placement).__name__}: {placement!r}; from_dtensor and from_partition_spec convert"
            )
        if isinstance(placement, Replicate | Partial):
            return placement
        ndim = len(self.shape)
        if not -ndim <= placement.dim < ndim:
            raise ValueError(f"{placement} names an array axis outside shape {self.shape}: use 0..{ndim - 1}")
        dim = placement.dim % ndim
        return Shard(dim) if isinstance(placement, Shard) else StridedShard(dim, placement.split_factor)

    def order(self, dim: int) -> tuple[str, ...]:
        """Returns the names of the mesh axes that cut array axis `dim`, outermost (first to cut) first.

        Follows torch's rule for DTensor: from right to left, each axis is inserted after axes whose sizes multiply to its split
        factor. Each axis cuts the chunks of the previous one, as FSDP2 cuts the shards of tensor parallelism. (For uneven
        chunks, torch's offsets of a strided DTensor can differ from FSDP2's rows; these results match FSDP2.)
        """
        dim %= len(self.shape)
        order: list[str] = []
        for name, placement in reversed(list(zip(self.mesh.names, self.placements, strict=True))):
            if not isinstance(placement, Shard | StridedShard) or placement.dim != dim:
                continue
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            products = list(itertools.accumulate((self.mesh.axis_size(n) for n in order), lambda a, b: a * b, initial=1))
            if factor not in products:
                raise ValueError(
                    f"{placement} on mesh axis {name!r} would give a rank several separate runs of array axis {dim}, and a "
                    f"quantized shard is one run: on the mesh {self.mesh} split_factor must be "
                    f"{' or '.join(map(str, sorted(set(products))))}"
                )
            order.insert(products.index(factor), name)
        return tuple(order)

    def span(self, dim: int, rank: int) -> tuple[int, int]:
        """Returns (start, size) of a rank's region along array axis `dim`."""
        coordinate = self.mesh.coordinate(rank)
        start, size = 0, self.shape[dim]
        for name in self.order(dim):
            axis = self.mesh.axis(name)
            chunk = -(-size // self.mesh.shape[axis])
            before = min(coordinate[axis] * chunk, size)
            start, size = start + before, min(chunk, size - before)
        return start, size

    def chunks(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (starts, sizes) of all chunks of array axis `dim`, one array axis per mesh axis in `order(dim)`.

        Empty chunks are included. Vectorized over ranks, because meshes have thousands of them.
        """
        return pieces.chunks(self.shape[dim], self._counts(dim))

    def starts(self, dim: int) -> np.ndarray:
        """Returns the starts of the non-empty chunks of array axis `dim`, ascending."""
        starts, sizes = self.chunks(dim)
        return starts[sizes > 0]

    def region(self, rank: int) -> Region:
        """Returns the region that a rank holds."""
        spans = [self.span(dim, rank) for dim in range(len(self.shape))]
        return Region(tuple(start for start, _ in spans), tuple(size for _, size in spans))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of all ranks."""
        return tuple(self.region(rank) for rank in range(self.mesh.size))

    def straddling(self, dim: int, block: int) -> tuple[int, ...]:
        """Returns the indices of blocks of length `block` along array axis `dim` that span several ranks, ascending."""
        return pieces.straddling(self.shape[dim], self._counts(dim), block)[0]

    def straddling_axes(self, dim: int, block: int) -> tuple[str, ...]:
        """Returns the mesh axes along which ranks that share a block of array axis `dim` differ, in the mesh's order."""
        _, differ = pieces.straddling(self.shape[dim], self._counts(dim), block)
        axes = {name for name, differs in zip(self.order(dim), differ, strict=True) if differs}
        return tuple(name for name in self.mesh.names if name in axes)

    def aligned(self, dim: int, block: int) -> bool:
        """Returns whether every cut along array axis `dim` is on a block boundary."""
        return not self.straddling(dim, block)

    def _counts(self, dim: int) -> tuple[int, ...]:
        return tuple(self.mesh.axis_size(name) for name in self.order(dim))

    def gathered(self, axes: Iterable[str]) -> Sharding:
        """Returns the sharding after an all-gather over these mesh axes, which become replicated.

        Raises:
            ValueError: an axis shards nothing, or another axis cuts its chunks further, so a rank would get separate runs.
        """
        axes = tuple(axes)
        for name in axes:
            placement = self.placements[self.mesh.axis(name)]
            if not isinstance(placement, Shard | StridedShard):
                raise ValueError(f"axes: mesh axis {name!r} holds {placement}, so there is nothing to gather over it")
        placements = [Replicate() if n in axes else p for n, p in zip(self.mesh.names, self.placements, strict=True)]
        for dim in range(len(self.shape)):
            order = self.order(dim)
            kept = [name for name in order if name not in axes]
            for inner in kept:
                outer = [n for n in order[: order.index(inner)] if n in axes and self.mesh.axis_size(n) > 1]
                if outer and self.mesh.axis_size(inner) > 1:
                    raise ValueError(
                        f"axes: gathering array axis {dim} over {outer[0]!r} but not over {inner!r}, which cuts its shards "
                        f"further, leaves separate runs on a rank: gather over {inner!r} first, or over both"
                    )
            for name, placement in _placed(self.mesh, dim, kept).items():
                placements[self.mesh.axis(name)] = placement
        return Sharding(self.shape, self.mesh, tuple(placements))

    def transposed(self) -> Sharding:
        """Returns the sharding of the array with its last two axes swapped."""
        last = len(self.shape) - 1
        swap = {last: last - 1, last - 1: last}
        placements = []
        for placement in self.placements:
            if isinstance(placement, Shard):
                placement = Shard(swap.get(placement.dim, placement.dim))
            elif isinstance(placement, StridedShard):
                placement = StridedShard(swap.get(placement.dim, placement.dim), placement.split_factor)
            placements.append(placement)
        return Sharding((*self.shape[:-2], self.shape[-1], self.shape[-2]), self.mesh, tuple(placements))

    def __str__(self) -> str:
        return f"{list(self.shape)} on {self.mesh} as ({_listed(self.placements)})"


def from_dtensor(placements: Iterable[Any]) -> tuple[Placement, ...]:
    """Converts the placements of a torch DTensor, recognized by class name so that torch isn't imported.

    Raises:
        ValueError: a placement has no counterpart here.
    """
    converted: list[Placement] = []
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Replicate":
            converted.append(Replicate())
        elif kind == "Shard":
            converted.append(Shard(placement.dim))
        elif kind == "_StridedShard":
            converted.append(StridedShard(placement.dim, placement.split_factor))
        elif kind == "Partial":
            converted.append(Partial(placement.reduce_op))
        else:
            raise ValueError(
                f"placement {placement!r} ({kind}) must be Replicate, Shard, _StridedShard or Partial: redistribute first"
            )
    return tuple(converted)


def from_partition_spec(spec: Iterable[Any], mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    """Converts a JAX PartitionSpec to placements.

    Args:
        spec: for each array axis None, the name of a mesh axis, or a tuple of names, outermost first. Missing entries are None.
        mesh: the ranks, with axes in the order of the JAX mesh.
        ndim: number of array axes.

    Raises:
        ValueError: there are more entries than axes, a mesh axis is unknown or repeated, or an entry has another type.
    """
    entries = tuple(spec)
    if len(entries) > ndim:
        raise ValueError(f"spec {spec} has {len(entries)} entries for an array of {ndim} axes")
    placements: list[Placement] = [Replicate()] * len(mesh.shape)
    seen: set[str] = set()
    for dim, entry in enumerate(entries):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"spec entry {entry!r} must be None, the name of a mesh axis or a tuple of names")
        for name in names:
            mesh.axis(name)
            if name in seen:
                raise ValueError(f"spec {spec} names mesh axis {name!r} twice: a mesh axis shards one array axis")
            seen.add(name)
        for name, placement in _placed(mesh, dim, names).items():
            placements[mesh.axis(name)] = placement
    for name in getattr(spec, "unreduced", ()):
        placements[mesh.axis(name)] = Partial("sum")
    return tuple(placements)


def _placed(mesh: Mesh, dim: int, order: Sequence[str]) -> dict[str, Placement]:
    """Returns the placements of the mesh axes that cut array axis `dim` in this order, outermost first."""
    placed: dict[str, Placement] = {}
    for position, name in enumerate(order):
        right = (n for n in order[:position] if mesh.axis(n) > mesh.axis(name))
        factor = math.prod(mesh.axis_size(n) for n in right)
        placed[name] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return placed


def _listed(placements: Iterable[Any]) -> str:
    return ", ".join(map(str, placements))
