"""Layout of a sharded array in a checkpoint, which a load on any other mesh can read.

A checkpoint stores codes and scales (for NVFP4 also the tensor scale) as ordinary arrays, sharded like any other. This requires
that each cut of the array is also a cut of the stored array:

    rows cut at a multiple of the block      codes and scales are sharded like the array
    rows cut inside a block                  codes are; two ranks have the block's scale, so all scales are stored whole
    columns cut inside a packed byte         two ranks have the byte, so codes are stored whole
    one scale for the tensor                 every rank has it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..definition import layout
from ..formats import Format
from .placement import Region, Replicate, Sharding, StridedShard


@dataclass(frozen=True)
class Part:
    """Codes, scales or the tensor scale of a sharded array.

    Attributes:
        name: "codes", "scales" or "tensor_scale".
        shape: global shape.
        dtype: "uint8" or "float32".
        sharded: whether the array's placements, applied to this shape, give each rank its own entries; if not, every rank
            stores the whole.
        unit: (rows, columns) of array elements per `entries` (rows, columns) of this part; None if the part is not a grid.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharded: bool
    unit: tuple[int, int] | None
    entries: tuple[int, int] = (1, 1)

    def span(self, region: Region) -> tuple[slice, ...]:
        """Returns the index of the entries for a region of the array, including units that the region cuts."""
        if self.unit is None:
            return tuple(slice(None) for _ in self.shape)
        index = list(region.slices)
        for dim in (-2, -1):
            unit, entries = self.unit[dim], self.entries[dim]
            start, size = region.start[dim], region.shape[dim]
            first = start // unit
            count = layout.block_grid(size, unit, start)
            # The last unit of a row can be incomplete: a byte with one code, or three bytes with fewer than four.
            index[dim] = slice(first * entries, min((first + count) * entries, self.shape[dim]))
        return tuple(index)


@lru_cache(maxsize=4096)
def parts(format: Format, sharding: Sharding) -> tuple[Part, ...]:
    """Returns codes, scales and (with two levels) the tensor scale of an array with this sharding."""
    shape = sharding.shape
    together = format.element.codes_per_group
    size = together * format.element.bits // 8
    codes = Part("codes", layout.codes_shape(shape, format), "uint8", False, (1, together), (1, size))
    scales = Part("scales", layout.scales_shape(shape, format), format.scale.dtype, False, format.block)
    found = [_with_sharding(codes, sharding), _with_sharding(scales, sharding)]
    if format.scale.two_level:
        found.append(Part("tensor_scale", (), "float32", False, None))
    return tuple(found)


def offsets_agree(sharding: Sharding) -> bool:
    """Returns whether a DTensor's placements alone tell torch each rank's offset correctly.

    If FSDP shards a tensor-parallel weight unevenly, torch's releases differ from FSDP2, and from each other, in the rows that
    a strided placement means.
    """
    strided = {p.dim for p in sharding.placements if isinstance(p, StridedShard)}
    return all(np.ptp(sharding.chunks(dim)[1]) == 0 for dim in strided)


def _with_sharding(part: Part, sharding: Sharding) -> Part:
    sharded = part.unit is not None and offsets_agree(sharding) and _cut_alike(part, part.unit, sharding)
    return Part(part.name, part.shape, part.dtype, sharded, part.unit, part.entries)


def _cut_alike(part: Part, unit: Sequence[int], sharding: Sharding) -> bool:
    """Returns whether sharding the part like the array gives each rank the entries of its region."""
    if all(isinstance(placement, Replicate) for placement in sharding.placements):
        return True
    last = len(sharding.shape) - 1
    if any(not sharding.aligned(dim, length) for dim, length in zip((last - 1, last), unit, strict=True)):
        return False
    own = Sharding(part.shape, sharding.mesh, sharding.placements)
    if 0 in sharding.shape:
        return 0 in own.shape
    # Different mesh axes cut each array axis, so checking every axis covers every rank.
    for dim in range(len(sharding.shape)):
        starts, sizes = sharding.chunks(dim)
        cut_starts, cut_sizes = own.chunks(dim)
        if dim >= last - 1:
            length, entries = unit[dim - last - 1], part.entries[dim - last - 1]
            stops = np.minimum(-(-(starts + sizes) // length) * entries, part.shape[dim])
            starts, sizes = starts // length * entries, np.where(sizes > 0, stops - starts // length * entries, 0)
        if (sizes != cut_sizes).any() or (starts != cut_starts)[sizes > 0].any():
            return False
    return True
