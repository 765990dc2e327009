"""The steps that plans are made of: small frozen values that an executor carries out one after another on every rank.

Everything a step needs (chunk sizes, indices, groups, what straddles) follows from the format and the `Sharding` it holds,
so all ranks agree without asking each other, and arrays that meet in a collective have the same shape on every rank of it.
Each rank holds either values (one float array) or codes (codes, scales and, for two-level formats, a tensor scale).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from ..definition.layout import block_grid, packed_columns
from ..formats import Format
from .placement import Region, Sharding


def block_length(format: Format | None, sharding: Sharding, dim: int) -> int:
    """How many elements along array axis `dim` share a scale in a format with blocks; 1 along leading axes."""
    from_last = dim - len(sharding.shape)
    return format.block[from_last] if format and format.block and from_last >= -2 else 1


def grid_span(format: Format, region: Region, dim: int) -> tuple[int, int]:
    """(first, count) of the scales along an array axis that cover a region, counted in the unsharded array's grid."""
    if format.block is None:
        return 0, 1
    from_last = dim - len(region.shape)
    block = format.block[from_last] if from_last >= -2 else 1
    return region.start[dim] // block, block_grid(region.shape[dim], block, region.start[dim])


# The hooks of a training step ask the same question of the same value again and again.
_kept = lru_cache(maxsize=4096)


@dataclass(frozen=True)
class Transpose:
    """Swap the last two axes of values, or of codes with their scales (`numerics.transpose`).

    Attributes:
        sharding: how the array lies before.
        format: of the codes; None for values.
    """

    sharding: Sharding
    format: Format | None = None

    def __str__(self) -> str:
        return "swap the last two axes"


@dataclass(frozen=True)
class Rotate:
    """Rotate the values in groups along their last axis (`rotation.rotate`); no group is cut."""

    def __str__(self) -> str:
        return "rotate groups of 16 along the last axis"


@dataclass(frozen=True)
class Straddle:
    """Blocks that lie on several ranks, whose partial amaxes are max-reduced before anyone encodes them.

    Attributes:
        dim: array axis whose cuts fall inside these blocks.
        axes: mesh axes to reduce over.
        blocks: their indices along `dim` in the unsharded array's grid. Every rank puts the entries it has of `numerics.Amax`
            (`blocks`, and `nan` where there is one) into zeros of this length along `dim`, and takes them back reduced.
    """

    dim: int
    axes: tuple[str, ...]
    blocks: tuple[int, ...]

    @_kept
    def held(self, format: Format, region: Region) -> tuple[tuple[int, int], ...]:
        """(index in `blocks`, index in the rank's own scale grid) of each of these blocks that a rank has a part of.

        Args:
            format: of the array.
            region: what the rank holds of it.
        """
        first, count = grid_span(format, region, self.dim)
        return tuple((entry, block - first) for entry, block in enumerate(self.blocks) if first <= block < first + count)


@dataclass(frozen=True)
class Quantize:
    """Values to codes: partial amaxes, the reductions named here, then scales and codes on each rank.

    Attributes:
        format: what to quantize into.
        sharding: how the values lie.
        amax_axes: mesh axes over which the whole tensor's amax is max-reduced: `Amax.blocks` of a format with one scale per
            tensor, `Amax.tensor` of a two-level one.
        straddles: block amaxes to be reduced, in this order.
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
    """Codes to values.

    Attributes:
        format: what the codes are in.
        sharding: how they lie.
        dtype: dtype of the values, or None for the array's nominal one.
    """

    format: Format
    sharding: Sharding
    dtype: str | None = None

    def __str__(self) -> str:
        return f"dequantize {self.format} to {self.dtype or 'the nominal dtype'}"


@dataclass(frozen=True)
class Join:
    """How one axis is put together from what the ranks of a gather sent.

    Attributes:
        chunk: entries along the axis that every rank sends, its own and padding behind.
        runs: (source, start, stop): the result is, in this order, entries start .. stop of what each source sent.
    """

    chunk: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """Entries of the result."""
        return sum(stop - start for _, start, stop in self.runs)

    @cached_property
    def index(self) -> np.ndarray:
        """int32 [size]: where each entry of the result lies in the chunks laid one after another."""
        parts = [np.arange(source * self.chunk + start, source * self.chunk + stop) for source, start, stop in self.runs]
        return np.concatenate([np.zeros(0), *parts]).astype(np.int32)

    @property
    def head(self) -> bool:
        """Whether the result is simply the first `size` entries of the chunks laid one after another."""
        return bool((self.index == np.arange(self.size)).all())


@dataclass(frozen=True)
class Gather:
    """All-gather along one array axis: every rank of a group sends a padded chunk, and joins what it gets.

    Attributes:
        sharding: how the array lies before.
        dim: the array axis to put together.
        axes: mesh axes to gather over, outermost cut first. The sources of `Join.runs` are numbered in this order.
        format: of the codes, or of the scales carried beside values; None where values travel alone.
        payload: "codes" or "values". Scales and tensor scale travel too where there is a format.
        origin: (row, column) of the sharding's first element in the matrix whose blocks are counted.
    """

    sharding: Sharding
    dim: int
    axes: tuple[str, ...]
    format: Format | None
    payload: Literal["codes", "values"]
    origin: tuple[int, int] = (0, 0)

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that gather together with `rank`, in the order of the sources."""
        return self.sharding.mesh.group(rank, self.axes)

    @_kept
    def elements(self, rank: int) -> Join:
        """How the elements along `dim` are joined on this rank."""
        sizes = [self.sharding.span(self.dim, member)[1] for member in self.group(rank)]
        return Join(max(sizes), tuple((source, 0, size) for source, size in enumerate(sizes) if size))

    @_kept
    def stored(self, rank: int) -> Join:
        """How values or stored codes along `dim` are joined on this rank: bytes, where codes are packed along it.

        Where `unpacks`, only the chunk counts: it is unpacked to `elements(rank).chunk` codes, and those are joined.
        """
        elements = self.elements(rank)
        if self.payload == "values" or self.format is None or self.dim != len(self.sharding.shape) - 1:
            return elements
        bits = self.format.element.bits
        runs = tuple((source, 0, packed_columns(stop, bits)) for source, _, stop in elements.runs)
        return Join(packed_columns(elements.chunk, bits), runs)

    @_kept
    def scales(self, rank: int) -> Join:
        """How the scales along `dim` are joined on this rank.

        Every rank sends ceil(chunk / block) entries, and one more where some cut of the array falls inside a block. A block
        that lies on several ranks has equal scales there, and the first is kept. A tensor's one scale is sent by every rank,
        and that of the first with data is kept.
        """
        if self.format is not None and self.format.block is None:
            return Join(1, ((self.first(rank), 0, 1),))
        from_last = self.dim - len(self.sharding.shape)
        offset = self.origin[from_last] if from_last >= -2 else 0
        spans = [(offset + start, size) for start, size in (self.sharding.span(self.dim, r) for r in self.group(rank))]
        block = block_length(self.format, self.sharding, self.dim)
        chunk = -(-max(size for _, size in spans) // block)
        if any((offset + start) % block for start, _ in self.sharding.spans(self.dim).values()):
            chunk += 1
        runs, seen = [], 0
        for source, (start, size) in enumerate(spans):
            first, count = start // block, block_grid(size, block, start)
            fresh = max(first, seen)
            if fresh < first + count:
                runs.append((source, fresh - first, count))
                seen = first + count
        return Join(chunk, tuple(runs))

    def first(self, rank: int) -> int:
        """Position in the group of the first rank that has data, whose tensor scale counts; 0 where none has."""
        regions = [self.sharding.region(member) for member in self.group(rank)]
        return next((i for i, region in enumerate(regions) if not region.empty), 0)

    @property
    def unpacks(self) -> bool:
        """Whether codes must be unpacked, joined and packed again: where a run before another ends inside a byte (or three)."""
        if self.payload != "codes" or self.format is None or self.dim != len(self.sharding.shape) - 1:
            return False
        together = {8: 1, 6: 4, 4: 2}[self.format.element.bits]
        groups = {self.group(rank) for rank in self.sharding.spans(self.dim)}
        joins = [self.elements(members[0]) for members in groups]
        return any(stop % together for join in joins for _, _, stop in join.runs[:-1])

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
    """What every rank does, in order. `print(plan)` says it in words.

    Attributes:
        use: what the plan is for.
        source: how the array lies before.
        target: how it lies after (transposed, for a columnwise result).
        steps: the steps.
        reason: why the data passes through high precision; None where it doesn't. Executors warn with it once.
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
