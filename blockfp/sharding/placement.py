"""Meshes, placements and shardings: the part of a global array that each rank of a mesh holds.

Plain values, no framework: a `Mesh` of ranks, a placement for each of its axes, and a `Sharding` that joins both to a
global shape and answers where a shard lies and which blocks its edges cut. Shards follow torch's chunk rule: each
is ceil(size / ranks) long, so the last ones may be short or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import cuts


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 .. size - 1 laid out row-major on named axes.

    Attributes:
        shape: ranks along each axis.
        names: the axes' names; "dim_0", "dim_1", .. by default.

    Raises:
        ValueError: an axis without ranks, or names that don't fit the shape.
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
        """The number of ranks."""
        return math.prod(self.shape)

    def axis(self, name: str) -> int:
        """Position of the axis of this name."""
        if name not in self.names:
            raise ValueError(f"mesh has no axis {name!r}; its axes are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def axis_size(self, name: str) -> int:
        """Ranks along the axis of this name."""
        return self.shape[self.axis(name)]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """A rank's position along each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {rank}")
        coordinate = []
        for size in reversed(self.shape):
            rank, position = divmod(rank, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        rank = 0
        for size, position in zip(self.shape, coordinate, strict=True):
            rank = rank * size + position
        return rank

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` at most, row-major over the axes in the order given."""
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
    """Every rank along the mesh axis holds the same."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Shard:
    """Array axis `dim` is cut into chunks along the mesh axis, after the mesh axes to the left have cut it."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class StridedShard:
    """Like `Shard(dim)`, but after mesh axes to the right, `split_factor` ranks in all, have cut the array axis.

    FSDP over tensor parallelism: on a mesh (fsdp, tp) that both cut axis 0, tp cuts first and fsdp cuts tp's shards, which is
    (StridedShard(0, split_factor=tp's size), Shard(0)).
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"StridedShard({self.dim}, {self.split_factor})"


@dataclass(frozen=True)
class Partial:
    """Each rank holds a term; the array is their reduction by `op`."""

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
        """(row, column) of the first element in the unsharded matrix, which is the last two axes."""
        return (self.start[-2], self.start[-1])

    @property
    def empty(self) -> bool:
        """True if there is nothing in it."""
        return 0 in self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this region out of the global array."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Sharding:
    """A global array on a mesh: one placement for each mesh axis.

    Attributes:
        shape: the global shape, two or more axes; the last two are the matrix.
        mesh: the ranks.
        placements: one for each mesh axis; array axes may be negative and are stored non-negative.

    Raises:
        ValueError: a placement too many or too few, an array axis that isn't there, or a `StridedShard` whose ranks would hold
            several separate runs of an axis.
        TypeError: something that isn't a placement.
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
                f"placements must hold one for each of the mesh's {len(self.mesh.shape)} axes ({self.mesh}), "
                f"got {len(placements)}: {_listed(placements)}"
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
        """Names of the mesh axes that cut array axis `dim`, the one that cuts first (the outermost) first.

        The rule is torch's for DTensor: from the right, an axis stands behind those whose sizes multiply to its split factor.
        Each then cuts what the one before it left, as FSDP2 cuts tensor parallelism's shards. (Where nothing divides evenly,
        torch's own offsets of a strided DTensor sometimes differ from where FSDP2 put the rows; the rows count here.)
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
        """(start, size) of a rank's region along array axis `dim`."""
        coordinate = self.mesh.coordinate(rank)
        start, size = 0, self.shape[dim]
        for name in self.order(dim):
            axis = self.mesh.axis(name)
            chunk = -(-size // self.mesh.shape[axis])
            before = min(coordinate[axis] * chunk, size)
            start, size = start + before, min(chunk, size - before)
        return start, size

    def chunks(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts, sizes) of the parts of array axis `dim`, empty ones too, with an axis for each mesh axis in `order(dim)`.

        Meshes have thousands of ranks: nothing about all of them is worked out one rank after another.
        """
        return cuts.chunks(self.shape[dim], self._counts(dim))

    def starts(self, dim: int) -> np.ndarray:
        """Starts of the parts of array axis `dim` that aren't empty, in ascending order."""
        starts, sizes = self.chunks(dim)
        return starts[sizes > 0]

    def region(self, rank: int) -> Region:
        """The region that a rank holds."""
        spans = [self.span(dim, rank) for dim in range(len(self.shape))]
        return Region(tuple(start for start, _ in spans), tuple(size for _, size in spans))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The region that each rank holds."""
        return tuple(self.region(rank) for rank in range(self.mesh.size))

    def straddling(self, dim: int, block: int) -> tuple[int, ...]:
        """Indices of the blocks of length `block` along array axis `dim` that lie on more than one rank, ascending."""
        return cuts.straddling(self.shape[dim], self._counts(dim), block)[0]

    def straddling_axes(self, dim: int, block: int) -> tuple[str, ...]:
        """The mesh axes along which the ranks that share a block of array axis `dim` differ, in the mesh's order."""
        _, differ = cuts.straddling(self.shape[dim], self._counts(dim), block)
        axes = {name for name, differs in zip(self.order(dim), differ, strict=True) if differs}
        return tuple(name for name in self.mesh.names if name in axes)

    def aligned(self, dim: int, block: int) -> bool:
        """Returns whether every cut along array axis `dim` falls on a block boundary."""
        return not self.straddling(dim, block)

    def _counts(self, dim: int) -> tuple[int, ...]:
        return tuple(self.mesh.axis_size(name) for name in self.order(dim))

    def gathered(self, axes: Iterable[str]) -> Sharding:
        """The sharding after an all-gather over these mesh axes: replicated along them.

        Raises:
            ValueError: an axis shards nothing, or another axis cuts what it has cut: a rank would be left with several runs.
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
        """The sharding of the array with its last two axes swapped."""
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
    """The placements of a torch DTensor, known by their class names, so that torch isn't imported.

    Raises:
        ValueError: a kind of placement that has no counterpart here.
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
                f"placement {placement!r} ({kind}) is none of Replicate, Shard, _StridedShard and Partial: redistribute first"
            )
    return tuple(converted)


def from_partition_spec(spec: Iterable[Any], mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    """The placements that a JAX PartitionSpec means for an array of `ndim` axes.

    Args:
        spec: for each array axis None, a mesh axis name, or a tuple of names, the outermost first. Missing entries are None.
        mesh: the ranks, its axes in the order of the JAX mesh.
        ndim: the array's number of axes.

    Raises:
        ValueError: more entries than axes, an unknown or repeated mesh axis, or an entry that is none of these.
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
                raise ValueError(f"spec {spec} names mesh axis {name!r} twice: an axis cuts one array axis")
            seen.add(name)
        for name, placement in _placed(mesh, dim, names).items():
            placements[mesh.axis(name)] = placement
    for name in getattr(spec, "unreduced", ()):
        placements[mesh.axis(name)] = Partial("sum")
    return tuple(placements)


def _placed(mesh: Mesh, dim: int, order: Sequence[str]) -> dict[str, Placement]:
    """The placements of the mesh axes that cut array axis `dim` in this order, outermost first."""
    placed: dict[str, Placement] = {}
    for position, name in enumerate(order):
        right = (n for n in order[:position] if mesh.axis(n) > mesh.axis(name))
        factor = math.prod(mesh.axis_size(n) for n in right)
        placed[name] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return placed


def _listed(placements: Iterable[Any]) -> str:
    return ", ".join(map(str, placements))
