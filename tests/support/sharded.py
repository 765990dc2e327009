"""Meshes and placements to try plans on, and what every rank must hold if nothing depends on them."""

from collections import defaultdict

import numpy as np
from held_formats import FORMATS
from samples import KINDS, sample

from blockfp.definition import layout, numerics
from blockfp.sharding import simulate
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding, StridedShard

# name: (mesh, placements, the axes that a weight is gathered over, which are those that aren't tensor parallelism's)
LAYOUTS = {
    "one": (Mesh((1,), ("fsdp",)), (Shard(0),), ("fsdp",)),
    "fsdp2": (Mesh((2,), ("fsdp",)), (Shard(0),), ("fsdp",)),
    "fsdp3": (Mesh((3,), ("fsdp",)), (Shard(0),), ("fsdp",)),
    "fsdp8": (Mesh((8,), ("fsdp",)), (Shard(0),), ("fsdp",)),
    "columns3": (Mesh((3,), ("tp",)), (Shard(1),), ("tp",)),
    "columns8": (Mesh((8,), ("tp",)), (Shard(-1),), ("tp",)),
    "hsdp": (Mesh((2, 4), ("replicate", "shard")), (Replicate(), Shard(0)), ("shard",)),
    "hsdp1": (Mesh((2, 1), ("replicate", "shard")), (Replicate(), Shard(0)), ("shard",)),
    "strided2x2": (Mesh((2, 2), ("fsdp", "tp")), (StridedShard(0, 2), Shard(0)), ("fsdp",)),
    "strided4x2": (Mesh((4, 2), ("fsdp", "tp")), (StridedShard(0, 2), Shard(0)), ("fsdp",)),
    "strided2x3": (Mesh((2, 3), ("fsdp", "tp")), (StridedShard(0, 3), Shard(0)), ("fsdp",)),
    "row_parallel": (Mesh((3, 2), ("fsdp", "tp")), (Shard(0), Shard(1)), ("fsdp",)),
    "column_first": (Mesh((2, 4), ("tp", "fsdp")), (Shard(1), Shard(0)), ("fsdp",)),
    "left_to_right": (Mesh((2, 3), ("outer", "inner")), (Shard(0), Shard(0)), ("outer", "inner")),
    "both_axes": (Mesh((2, 3), ("rows", "columns")), (Shard(0), Shard(1)), ("rows", "columns")),
    "hsdp_tp": (Mesh((2, 2, 2), ("replicate", "fsdp", "tp")), (Replicate(), StridedShard(0, 2), Shard(0)), ("fsdp",)),
}

_alike = defaultdict(list)
for _format in FORMATS:
    _element, _scale = _format.element, _format.scale
    _alike[_format.block, _element.bits, _element.has_nan, _scale.dtype, _scale.two_level].append(_format)
ALIKE = tuple(map(tuple, _alike.values()))
"""Formats that lie, are cut and sent, and share amaxes alike; they differ in what rounding makes of a block alone."""
GEOMETRIES = tuple(alike[0] for alike in ALIKE)
"""One of each."""


def shapes(format):
    """Shapes whose shards are aligned, straddle blocks, are uneven, and are empty, on the meshes above."""
    rows, columns = (1, 128) if format.per_row else format.block or (16, 32)
    unit = max(rows, 4)
    wide = 2 * columns if columns < 128 else columns
    return [(8 * unit, 8 * columns), (3 * unit + 5, wide + 7), (5, 24), (7 * unit - 1, columns // 2 + 1), (2 * unit + 8, wide)]


def whole_and_shards(format, shape, sharding, kind, seed=0, dtype="float32", columnwise=False, **options):
    """A global array's shards, and the quantization of the whole."""
    x = sample(kind, shape, dtype, seed)
    whole = numerics.quantize(np.swapaxes(x, -1, -2) if columnwise else x, format, **options)
    return simulate.shards(x, sharding), whole


def parts(whole, format, sharding):
    """Each rank's part of a quantized array."""
    held = []
    codes = layout.unpack(whole.codes, format.element.bits, sharding.shape[-1])
    for region in sharding.regions:
        grid = layout.scales_shape(region.shape, format, region.origin)
        first = (*region.start[:-2], *(o // b for o, b in zip(region.origin, format.block or (1, 1), strict=True)))
        if format.block is None:
            first = (0,) * len(first)
        scales = whole.scales[tuple(slice(f, f + n) for f, n in zip(first, grid, strict=True))]
        held.append(numerics.Quantized(layout.pack(codes[region.slices], format.element.bits), scales, whole.tensor_scale))
    return held


def assert_holds(world, expected):
    """Every rank holds the expected codes, scales and tensor scale, bit for bit."""
    assert len(world) == len(expected)
    for rank, (local, part) in enumerate(zip(world, expected, strict=True)):
        for name in ("codes", "scales", "tensor_scale"):
            got, want = getattr(local, name), getattr(part, name)
            if want is None:
                assert got is None
                continue
            assert got.dtype == want.dtype, (rank, name)
            np.testing.assert_array_equal(
                got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), err_msg=f"rank {rank}, {name}", strict=True
            )


def sharding_of(name, shape):
    """The sharding of this name for a shape, and the axes to gather over."""
    mesh, placements, axes = LAYOUTS[name]
    return Sharding(shape, mesh, placements), axes


def kind_for(*numbers):
    """A kind of data, another for each case."""
    return KINDS[sum(numbers) % len(KINDS)]
