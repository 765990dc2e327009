"""The place of a local tensor in the weight that it is a part of, and the original values of its rows.

`fully_shard` divides a weight like this: it splits it, asks the *whole* for a zero buffer as long as the longest part, copies
its part into the head of that buffer, and keeps the head:

    parts  = weight.split(chunk)              each part knows its origin, and what it is a part of (the base)
    buffer = weight.new_zeros((chunk, ..))    the same call on every rank: the buffer can't know where it will lie
    buffer[: len(part)].copy_(part)           now it can
    shard  = buffer[: len(part)]

So a `Geometry` is mutable in one way: the one of a new buffer, which its heads share, is without an origin until the first
copy into it binds it. Once bound it never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Origin = tuple[int, int]

COPIED = (
    "values were copied into a shard of a quantized weight, and its codes are still the old ones: a shard alone can't be "
    "quantized; set_model_state_dict and load_state_dict do it on all ranks together, and so does "
    "blockfp.torch.load_high_precision_(parameter, values)"
)
"""The error of a shard whose `Geometry.copied` nobody has taken."""


@dataclass(frozen=True)
class Base:
    """The tensor that `fully_shard` divided along its first axis: a whole weight, or the part that tensor parallelism left.

    Attributes:
        shape: its shape.
        origin: (row, column) of its first element in the unsharded matrix.
    """

    shape: tuple[int, ...]
    origin: Origin

    @property
    def end(self) -> Origin:
        """The origin of an empty part: behind the last row."""
        rows = self.shape[0] if len(self.shape) == 2 else 0
        return (self.origin[0] + rows, self.origin[1])


@dataclass
class Geometry:
    """The place of a local tensor, and what belongs to exactly its rows.

    Attributes:
        origin: (row, column) of its first element in the unsharded matrix; None for a buffer into which nothing was copied.
        base: what it is a part of, if something divided it along the first axis.
        initial: the original values of its rows, a plain CPU tensor, if they are kept. Never written to.
        gathered: whether it is FSDP's gathered copy of a sharded weight, which the next reshard throws away.
        loaded: what was loaded that no optimizer has made its master of yet: high-precision values, or codes.
        cut: whether tensor parallelism cut it out of the unsharded matrix.
        copied: high-precision values that `copy_` was given for a part of a weight, whose scales other ranks may share: all of
            them quantize it together once `load_state_dict` says so.
        shares: whether it is a view of a part of a tensor, with the rest of which it shares a scale or original values.
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
        """The origin. An empty part, into which nothing is ever copied, lies at the end of the base."""
        if self.origin is not None:
            return self.origin
        return self.base.end if self.base else (0, 0)

    def part(self, axis: int, first: int, last: int, ndim: int) -> Geometry:
        """Returns the geometry of elements first .. last along an axis; a head of the first stays the same part of the base."""
        if self.origin is None:
            raise ValueError("only the head of a new buffer can be taken before something is copied into it")
        row, column = self.origin
        if axis >= ndim - 2:
            row, column = (row + first, column) if axis == ndim - 2 else (row, column + first)
        base = self.base if axis == first == 0 else None
        initial = None if self.initial is None else self.initial.narrow(axis, first, last - first)
        part = Geometry((row, column), base, initial, self.gathered, self.loaded)
        # FSDP2 puts a short shard into a longer buffer and takes its head.
        part.copied = self.copied if base is not None else None
        part.shares = self.shares
        return part

    def bind(self, source: Geometry, origin: Origin) -> None:
        """Gives a new buffer the place of what is copied into it."""
        self.origin, self.base, self.loaded, self.copied = origin, source.base, source.loaded, source.copied
        # A copy, so that the original of the whole weight can be freed.
        self.initial = None if source.initial is None else source.initial.clone()

    def buffer(self, shape: Sequence[int], length: int, origin: Origin) -> Geometry:
        """Returns the geometry of a new buffer of `length` rows, for a tensor of this shape and origin or a part of it."""
        # A buffer longer than the tensor holds it, a part of the same base; any other holds a part of the tensor.
        base = self.base if length > shape[0] else Base(tuple(shape), origin)
        return Geometry(None, base, None if self.initial is None else self.initial[:0].clone())

    def copy(self, *, initial: Tensor | None) -> Geometry:
        """Returns the geometry of another tensor at the same place, with other original values."""
        return replace(self, initial=initial, shares=False)
