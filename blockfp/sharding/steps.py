"""Steps of plans: frozen values that an executor runs in order on every rank.

Chunk sizes, indices, groups and straddling blocks follow from a step's format and `Sharding`. So all ranks agree without
communication, and the arrays of a collective have the same shape on all of its ranks. A rank holds either values (one float
array) or codes (codes, scales and, with two levels, a tensor scale).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from ..definition.layout import block_grid, packed_columns
from ..definition.rotation import GROUP
from ..formats import Format
from .placement import Region, Sharding


def block_length(format: Format | None, sharding: Sharding, dim: int) -> int:
    """Returns how many elements along array axis `dim` share a block scale; 1 along leading axes."""
    from_last = dim - len(sharding.shape)
    return format.block[from_last] if format and format.block and from_last >= -2 else 1


def grid_span(format: Format, region: Region, dim: int) -> tuple[int, int]:
    """Returns (first, count) of the scales along an array axis that cover a region, counted in the unsharded array's grid."""
    if format.block is None:
        return 0, 1
    from_last = dim - len(region.shape)
    block = format.block[from_last] if from_last >= -2 else 1
    return region.start[dim] // block, block_grid(region.shape[dim], block, region.start[dim])


# Hooks of a training step repeat the same calls.
_kept = lru_cache(maxsize=4096)


@dataclass(frozen=True)
class Transpose:
    """Swap the last two axes of values, or of codes with their scales (`numerics.transpose`).

    Attributes:
        sharding: placement before this step.
        format: format of the codes; None for values.
    """

    sharding: Sharding
    format: Format | None = None

    def __str__(self) -> str:
        return "swap the last two axes"


@dataclass(frozen=True)
class Rotate:
    """Rotate the values in groups along their last axis (`rotation.rotate`); no group is cut."""

    def __str__(self) -> str:
        return f"rotate groups of {GROUP} along the last axis"


@dataclass(frozen=True)
class Straddle:
    """Blocks that span several ranks; their partial amaxes are max-reduced before encoding.

    Attributes:
        dim: array axis whose cuts are inside these blocks.
        axes: mesh axes to reduce over.
        blocks: indices of the blocks along `dim` in the unsharded array's grid, ascending. Every rank copies its entries of
            `numerics.Amax` (`blocks`, and `nan` and `members` if present) into zeros of this length along `dim`, and reads the
            reduced entries back.
    """

    dim: int
    axes: tuple[str, ...]
    blocks: tuple[int, ...]

    @_kept
    def held(self, format: Format, region: Region) -> tuple[tuple[int, int], ...]:
        """Returns (index in `blocks`, index in the rank's own scale grid) of each straddling block in a rank's region."""
        first, count = grid_span(format, region, self.dim)
        low, high = bisect_left(self.blocks, first), bisect_left(self.blocks, first + count)
        return tuple((entry, self.blocks[entry] - first) for entry in range(low, high))


@dataclass(frozen=True)
class Quantize:
    """Quantize values: partial amaxes, their reductions, then scales and codes on each rank.

    Attributes:
        format: format of the codes.
        sharding: placement of the values.
        amax_axes: mesh axes over which the tensor's amax is max-reduced: `Amax.blocks` for one scale per tensor, `Amax.tensor`
            with two levels.
        straddles: reductions of block amaxes, in this order.
    """

    format: Format
    sharding: Sharding
    amax_axes: tuple[str, ...]
    straddles: tuple[Straddle, ...]

    def __str__(self) -> str:
        parts = [f"quantize to {self.format}"]
        if self.amax_axes:
            parts.append(f"tensor amax max-reduced over {', '.join(self.amax_axes)}")
        for s in self.straddles:
            noun = "blocks" if len(s.blocks) > 1 else "block"
            parts.append(
                f"amax of {len(s.blocks)} {noun} along axis {s.dim} that straddle ranks max-reduced over {', '.join(s.axes)}"
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class Dequantize:
    """Dequantize codes.

    Attributes:
        format: format of the codes.
        sharding: placement of the codes.
        dtype: dtype of the values, or None for the array's nominal dtype.
    """

    format: Format
    sharding: Sharding
    dtype: str | None = None

    def __str__(self) -> str:
        return f"dequantize {self.format} to {self.dtype or 'the nominal dtype'}"


@dataclass(frozen=True, eq=False)
class Join:
    """Concatenation of one axis from the chunks of a gather: entries start .. stop of each source, in order.

    Attributes:
        chunk: entries along the axis that every rank sends: its own, then padding.
        sources: int64 [runs], the sender of each run, ascending; senders without entries are left out.
        starts: int64 [runs].
        stops: int64 [runs].
    """

    chunk: int
    sources: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Join) and (self.chunk, self.runs) == (other.chunk, other.runs)

    def __hash__(self) -> int:
        return hash((self.chunk, self.runs))

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(source, start, stop) of each run, in order."""
        return tuple(zip(self.sources.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True))

    @cached_property
    def size(self) -> int:
        """Entries of the result."""
        return int((self.stops - self.starts).sum())

    @cached_property
    def index(self) -> np.ndarray:
        """Index of each entry of the result in the concatenated chunks, int32 [size]."""
        lengths = self.stops - self.starts
        ahead = self.sources * self.chunk + self.starts - (np.cumsum(lengths) - lengths)
        return (np.repeat(ahead, lengths) + np.arange(self.size)).astype(np.int32)

    @cached_property
    def head(self) -> bool:
        """Whether the result is the first `size` entries of the concatenated chunks."""
        lengths = self.stops - self.starts
        return bool((self.sources * self.chunk + self.starts == np.cumsum(lengths) - lengths).all())


def _join(chunk: int, starts: np.ndarray, stops: np.ndarray) -> Join:
    """Joins entries start .. stop of each source and drops empty sources."""
    sources = np.flatnonzero(stops > starts)
    return Join(chunk, sources, starts[sources], stops[sources])


@dataclass(frozen=True)
class Gather:
    """All-gather along one array axis: every rank of a group sends a padded chunk and joins the received chunks.

    Attributes:
        sharding: placement before this step.
        dim: the array axis to gather.
        axes: mesh axes to gather over, outermost cut first; `Join.runs` numbers the sources in this order.
        format: format of the codes, or of scales that travel with values; None for values alone.
        payload: "codes" or "values". With a format, scales and tensor scale travel too.
        origin: (row, column) of the sharding's first element in the matrix that counts the blocks.
    """

    sharding: Sharding
    dim: int
    axes: tuple[str, ...]
    format: Format | None
    payload: Literal["codes", "values"]
    origin: tuple[int, int] = (0, 0)

    def group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that gather with `rank`, in the order of the sources."""
        return self.sharding.mesh.group(rank, self.axes)

    @_kept
    def elements(self, rank: int) -> Join:
        """Returns the join of the elements along `dim` on this rank."""
        _, sizes = self._spans(rank)
        return _join(int(sizes.max()), np.zeros_like(sizes), sizes)

    def _spans(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (starts, sizes) along `dim` of the sources, in their order."""
        mesh, order = self.sharding.mesh, self.sharding.order(self.dim)
        coordinate = mesh.coordinate(rank)
        own = tuple(slice(None) if name in self.axes else coordinate[mesh.axis(name)] for name in order)
        turn = [[name for name in order if name in self.axes].index(name) for name in self.axes]
        starts, sizes = self.sharding.chunks(self.dim)
        return starts[own].transpose(turn).ravel(), sizes[own].transpose(turn).ravel()

    @_kept
    def stored(self, rank: int) -> Join:
        """Returns the join of values or stored codes along `dim` on this rank, in bytes if codes are packed along `dim`.

        If `unpacks`, only its chunk is used: it is unpacked to `elements(rank).chunk` codes before joining.
        """
        elements = self.elements(rank)
        if self.payload == "values" or self.format is None or self.dim != len(self.sharding.shape) - 1:
            return elements
        bits = self.format.element.bits
        return Join(
            packed_columns(elements.chunk, bits), elements.sources, elements.starts, packed_columns(elements.stops, bits)
        )

    @_kept
    def scales(self, rank: int) -> Join:
        """Returns the join of the scales along `dim` on this rank.

        Every rank sends ceil(chunk / block) entries, and one more if any cut of the array is inside a block. Ranks that share a
        block have equal scales, and the first is kept. With one scale per tensor, every rank sends it and the first rank with
        data counts.
        """
        if self.format is not None and self.format.block is None:
            return Join(1, np.array([self.first(rank)]), np.array([0]), np.array([1]))
        from_last = self.dim - len(self.sharding.shape)
        offset = self.origin[from_last] if from_last >= -2 else 0
        starts, sizes = self._spans(rank)
        starts = starts + offset
        block = block_length(self.format, self.sharding, self.dim)
        chunk = -(-int(sizes.max()) // block)
        if ((self.sharding.starts(self.dim) + offset) % block).any():
            chunk += 1
        first = starts // block
        stop = np.where(sizes > 0, -(-(starts + sizes) // block), first)
        seen = np.maximum.accumulate(np.concatenate([[0], stop[:-1]]))
        return _join(chunk, np.maximum(seen - first, 0), stop - first)

    def first(self, rank: int) -> int:
        """Returns the position in the group of the first rank that has data, which provides the tensor scale; 0 if none has."""
        _, sizes = self._spans(rank)
        others = (self.sharding.span(dim, rank)[1] for dim in range(len(self.sharding.shape)) if dim != self.dim)
        return int((sizes > 0).argmax()) if all(others) else 0

    @property
    def unpacks(self) -> bool:
        """Whether codes must be unpacked, joined and packed again, because a run other than the last ends inside a byte (or
        three)."""
        if self.payload != "codes" or self.format is None or self.dim != len(self.sharding.shape) - 1:
            return False
        together = self.format.element.codes_per_group
        # One row per group, members in order: each member with another non-empty one after it must end at a byte boundary.
        order = self.sharding.order(self.dim)
        inside = [order.index(name) for name in self.axes]
        outside = [axis for axis in range(len(order)) if axis not in inside]
        _, sizes = self.sharding.chunks(self.dim)
        members = sizes.transpose(*outside, *inside).reshape(-1, math.prod(sizes.shape[axis] for axis in inside))
        behind = np.flip(np.cumsum(np.flip(members, 1), 1), 1) - members
        return bool(((members % together != 0) & (behind > 0)).any())

    def __str__(self) -> str:
        what = self.payload if self.format is None else f"{self.payload} and scales"
        rows = self.elements(0).chunk
        text = f"gather {what} along axis {self.dim} over {', '.join(self.axes)}: {rows} elements a rank"
        if self.format is not None and self.format.block is not None:
            text += f", {self.scales(0).chunk} scales"
        return text + (", codes joined across bytes" if self.unpacks else "")


Step = Transpose | Rotate | Quantize | Dequantize | Gather


@dataclass(frozen=True)
class Plan:
    """The steps of every rank, in order; `print(plan)` describes them.

    Attributes:
        use: purpose of the plan.
        source: placement of the input.
        target: placement of the result (transposed, for a columnwise result).
        steps: the steps.
        reason: why data passes through high precision, or None. Executors warn with it once.
    """

    use: str
    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]
    reason: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.use}: {self.source}", *(f"  {i}. {step}" for i, step in enumerate(self.steps, 1))]
        if self.reason:
            lines.append(f"  through high precision: {self.reason}")
        return "\n".join(lines)
