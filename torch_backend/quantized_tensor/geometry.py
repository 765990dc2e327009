"""Tracks a local tensor's position in the unsharded weight, and the original values of its rows.

`fully_shard` divides a weight by splitting it, requesting a zero buffer of the longest part's length from the *whole*, copying
its part into the buffer's head, and keeping that head:

    parts  = weight.split(chunk)              each part knows its origin and its base
    buffer = weight.new_zeros((chunk, ..))    the same call on every rank, so the origin is unknown
    buffer[: len(part)].copy_(part)           binds the origin
    shard  = buffer[: len(part)]

So the `Geometry` of a new buffer, shared by its heads, has no origin until the first copy binds it. It never changes
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Origin = tuple[int, int]

COPIED = (
    "values were copied into a shard of a quantized weight, but its codes are still the old ones, because a "
    "shard alone can't be quantized: use set_model_state_dict, load_state_dict or "
    "blockfp.torch.load_high_precision_(parameter, values) on all ranks"
)
"""Error for a shard whose pending `Geometry.copied` was never quantized."""


@dataclass(frozen=True)
class Base:
    """The tensor that `fully_shard` divided along its first axis: a whole weight or a tensor-parallel shard.

    Attributes:
        shape: its shape.
        origin: (row, column) of its first element in the unsharded matrix.
    """

    shape: tuple[int, ...]
    origin: Origin

    @property
    def end(self) -> Origin:
        """Returns the origin of an empty part: after the last row."""
        rows = self.shape[0] if len(self.shape) == 2 else 0
        return (self.origin[0] + rows, self.origin[1])


@dataclass
class Geometry:
    """Position of a local tensor, and data that belongs to its rows.

    Attributes:
        origin: (row, column) of its first element in the unsharded matrix; None for a new buffer before the first copy.
        base: the tensor that was divided along the first axis to give this one, if any.
        initial: original values of its rows, a plain CPU tensor that is never written to, or None.
        gathered: it is FSDP's gathered copy of a sharded weight, freed by the next reshard.
        loaded: kind of data loaded since the optimizer last made a master: high-precision values, or codes.
        cut: tensor parallelism cut it out of the unsharded matrix.
        copied: pending high-precision values that `copy_` received. Other ranks may share the scales, so `load_state_dict`
            quantizes the weight on all ranks together.
        shares: it is a view that shares a scale or original values with the rest of a tensor.
    """

    origin: Origin | None = (0, 0)
    base: Base | None = None
    initial: Tensor | None = None
    gathered: bool = False
    loaded: Literal["values", "codes"] | None = None
    cut: bool = False
    copied: Tensor | None = None
    shares: bool = False

    @property
    def start(self) -> Origin:
        """Returns the origin; an empty part, which no copy ever binds, is at the base's end."""
        if self.origin is not None:
            return self.origin
        return self.base.end if self.base else (0, 0)

    def part(self, axis: int, first: int, last: int, ndim: int) -> Geometry:
        """Returns the geometry of elements first .. last along an axis; a head of the first axis keeps the base."""
        if self.origin is None:
            raise ValueError("only the head of a new buffer can be taken before something is copied into it")
        row, column = self.origin
        if axis >= ndim - 2:
            row, column = (row + first, column) if axis == ndim - 2 else (row, column + first)
        base = self.base if axis == first == 0 else None
        initial = None if self.initial is None else self.initial.narrow(axis, first, last - first)
        part = Geometry((row, column), base, initial, self.gathered, self.loaded)
        # FSDP2 copies a short shard into a longer buffer and takes its head.
        part.copied = self.copied if base is not None else None
        part.shares = self.shares
        return part

    def bind(self, source: Geometry, origin: Origin) -> None:
        """Sets a new buffer's position to that of the tensor copied into it."""
        self.origin, self.base, self.loaded, self.copied = origin, source.base, source.loaded, source.copied
        # Cloned, so that the whole weight's original values can be freed.
        self.initial = None if source.initial is None else source.initial.clone()

    def buffer(self, shape: Sequence[int], length: int, origin: Origin) -> Geometry:
        """Returns the geometry of a new buffer of `length` rows, for a tensor of this shape and origin or a part of it."""
        # A longer buffer will hold the whole tensor, a part of the same base; otherwise a part of the tensor.
        base = self.base if length > shape[0] else Base(tuple(shape), origin)
        return Geometry(None, base, None if self.initial is None else self.initial[:0].clone())

    def copy(self, *, initial: Tensor | None) -> Geometry:
        """Returns the geometry of a separate tensor at the same position."""
        return replace(self, initial=initial, shares=False)
