"""Plans for meshes of any size: no rank is looked at after another, and the answers are those of looking at each."""

import numpy as np
import pytest
from counted import profiled
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from blockfp.definition.layout import block_grid
from blockfp.formats import Format
from blockfp.sharding import parts, plans
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding, StridedShard

LAYOUTS = {
    "fsdp": ((16384,), ("fsdp",), (Shard(0),)),
    "fsdp x tp, rows": ((2048, 8), ("fsdp", "tp"), (StridedShard(0, 8), Shard(0))),
    "fsdp x tp, columns": ((2048, 8), ("fsdp", "tp"), (Shard(0), Shard(1))),
    "hsdp x tp": ((16, 128, 8), ("replicate", "fsdp", "tp"), (Replicate(), StridedShard(0, 8), Shard(0))),
}


def calls(function) -> int:
    """The number of Python functions that a function calls."""
    count = 0

    def count_calls(frame, event, arg):
        nonlocal count
        count += event == "call"

    with profiled(count_calls):
        function()
    return count


def smaller(name: str, ranks: int) -> Sharding:
    mesh, names, placements = LAYOUTS[name]
    mesh = tuple(ranks if axis == "fsdp" else size for axis, size in zip(names, mesh, strict=True))
    return Sharding((53248, 16384), Mesh(mesh, names), placements)


def plan_all(sharding: Sharding, format: Format) -> None:
    plans.quantize_shards.__wrapped__(format, sharding)
    for gather in plans.gather_weight.__wrapped__(format, sharding, ("fsdp",)).steps:
        gather.elements(0), gather.stored(0), gather.scales(0), gather.unpacks
    parts.parts.__wrapped__(format, sharding)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("format", ["mxfp8_e4m3_32x32", "nvfp4_16x16", "fp8_e4m3", "mxfp4_e2m1"])
def test_planning_costs_the_same_on_any_mesh(name, format):
    counts = []
    for ranks in (24, 12000):
        sharding = smaller(name, ranks)
        counts.append(calls(lambda sharding=sharding: plan_all(sharding, Format.parse(format))))
    assert counts[1] <= counts[0] + 8


@st.composite
def shardings(draw) -> Sharding:
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(0, 70)))
    mesh = Mesh(tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))))
    placements, behind = [], {}
    for size in reversed(mesh.shape):
        dim = draw(st.integers(-1, 2))
        if dim == -1:
            placements.append(Replicate())
            continue
        factor = draw(st.sampled_from([1, behind.get(dim, 1)]))
        placements.append(Shard(dim) if factor == 1 else StridedShard(dim, factor))
        behind[dim] = behind.get(dim, 1) * size
    return Sharding(shape, mesh, tuple(reversed(placements)))


@examples()
@given(shardings(), st.sampled_from([1, 2, 16, 32]))
def test_cuts_are_those_of_each_rank(sharding, block):
    for dim in range(3):
        starts, sizes = sharding.chunks(dim)
        order = sharding.order(dim)
        for rank in range(sharding.mesh.size):
            place = tuple(sharding.mesh.coordinate(rank)[sharding.mesh.axis(name)] for name in order)
            assert (starts[place], sizes[place]) == sharding.span(dim, rank)
        owners = {}
        for rank in range(sharding.mesh.size):
            start, size = sharding.span(dim, rank)
            for index in range(start // block, start // block + block_grid(size, block, start)):
                owners.setdefault(index, set()).add(place_along(sharding, dim, rank))
        shared = {index: found for index, found in owners.items() if len(found) > 1}
        assert sharding.straddling(dim, block) == tuple(sorted(shared))
        assert sharding.aligned(dim, block) == (not shared)
        axes = {
            name
            for found in shared.values()
            for name, places in zip(order, zip(*found, strict=True), strict=True)
            if len(set(places)) > 1
        }
        assert set(sharding.straddling_axes(dim, block)) == axes


def place_along(sharding: Sharding, dim: int, rank: int) -> tuple[int, ...]:
    coordinate = sharding.mesh.coordinate(rank)
    return tuple(coordinate[sharding.mesh.axis(name)] for name in sharding.order(dim))


@examples()
@given(shardings(), st.sampled_from(["mxfp8_e4m3_32x32", "nvfp4", "mxfp6_e2m3_32x32", "fp8_e4m3", "fp8_e5m2_128x128"]))
def test_what_a_checkpoint_cuts_is_what_each_rank_has(sharding, format):
    for part in parts.parts(Format.parse(format), sharding):
        if part.unit is None or not parts.offsets_agree(sharding):
            assert not part.sharded
            continue
        own = Sharding(part.shape, sharding.mesh, sharding.placements)
        fits = all(
            cut.empty if region.empty else part.span(region) == cut.slices
            for region, cut in zip(sharding.regions, own.regions, strict=True)
        )
        aligned = all(sharding.aligned(dim, unit) for dim, unit in zip((1, 2), part.unit, strict=True))
        replicated = all(isinstance(placement, Replicate) for placement in sharding.placements)
        assert part.sharded == (replicated or (fits and aligned))


@examples()
@given(shardings(), st.sampled_from(["mxfp8_e4m3_32x32", "nvfp4", "mxfp6_e2m3", "fp8_e4m3"]), st.data())
def test_joins_put_every_entry_in_its_place(sharding, format, data):
    format = Format.parse(format)
    axes = tuple(n for n, p in zip(sharding.mesh.names, sharding.placements, strict=True) if not isinstance(p, Replicate))
    if not axes:
        return
    for gather in plans.gather_weight(format, sharding, axes).steps:
        rank = data.draw(st.integers(0, sharding.mesh.size - 1))
        join, length = gather.elements(rank), gather.sharding.shape[gather.dim]
        group = gather.group(rank)
        sent = np.full((len(group), join.chunk), -1)
        for source, member in enumerate(group):
            start, size = gather.sharding.span(gather.dim, member)
            sent[source, :size] = np.arange(start, start + size)
        np.testing.assert_array_equal(sent.ravel()[join.index], np.arange(length))
        assert join.size == length
        assert join.head == (join.index == np.arange(join.size)).all()
        first = next((i for i, member in enumerate(group) if not gather.sharding.region(member).empty), 0)
        assert gather.first(rank) == first
