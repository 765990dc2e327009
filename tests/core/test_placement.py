"""Places and parts of shards, against NumPy's own splitting, torch's DTensor and JAX's NamedSharding."""

import pickle
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from sharded import LAYOUTS, parts, shapes, sharding_of, whole_and_shards

from blockfp import formats
from blockfp.definition import layout
from blockfp.sharding import parts as saved
from blockfp.sharding.placement import (
    Mesh,
    Partial,
    Region,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    from_dtensor,
    from_partition_spec,
)


def chunked(array, ranks, dim):
    """torch.chunk, with empty chunks where ranks outnumber it."""
    step = -(-array.shape[dim] // ranks)
    return [np.take(array, range(i * step, min((i + 1) * step, array.shape[dim])), axis=dim) for i in range(ranks)]


def test_mesh_is_row_major():
    mesh = Mesh((2, 3, 2), ("replicate", "fsdp", "tp"))
    grid = np.arange(12).reshape(2, 3, 2)
    assert mesh.size == 12
    for rank in range(12):
        assert grid[mesh.coordinate(rank)] == rank
        assert mesh.rank(mesh.coordinate(rank)) == rank
    assert mesh.group(7, ("fsdp",)) == (7, 9, 11)
    assert mesh.group(7, ("tp", "fsdp")) == tuple(grid[1].T.ravel())
    assert mesh.group(7, ()) == (7,)
    assert str(mesh) == "replicate=2 x fsdp=3 x tp=2"
    assert Mesh((4, 2)).names == ("dim_0", "dim_1")


def test_values_are_frozen_equal_and_hashable():
    sharding, _ = sharding_of("strided4x2", (10, 4))
    again = Sharding([10, 4], Mesh([4, 2], ["fsdp", "tp"]), [StridedShard(-2, 2), Shard(-2)])
    assert sharding == again == pickle.loads(pickle.dumps(sharding))
    assert hash(sharding) == hash(again)
    with pytest.raises(FrozenInstanceError):
        sharding.shape = (3, 3)
    assert str(sharding) == "[10, 4] on fsdp=4 x tp=2 as (StridedShard(0, 2), Shard(0))"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunk_rule(ranks, dim):
    for size in (0, 1, 2, 5, 7, 8, 9, 16, 17):
        shape = (size, 6) if dim == 0 else (6, size)
        array = np.arange(size * 6).reshape(shape)
        sharding = Sharding(shape, Mesh((ranks,)), (Shard(dim),))
        for region, expected in zip(sharding.regions, chunked(array, ranks, dim), strict=True):
            np.testing.assert_array_equal(array[region.slices], expected)
            assert region.empty == (expected.size == 0)


def test_left_to_right_and_right_to_left():
    rows = np.arange(22).reshape(11, 2)
    left = Sharding((11, 2), Mesh((2, 3)), (Shard(0), Shard(0)))
    expected = [part for half in chunked(rows, 2, 0) for part in chunked(half, 3, 0)]
    for region, part in zip(left.regions, expected, strict=True):
        np.testing.assert_array_equal(rows[region.slices], part)
    # FSDP over tensor parallelism: tp cuts first, though it is the mesh's second axis.
    strided = Sharding((11, 2), Mesh((2, 3), ("fsdp", "tp")), (StridedShard(0, 3), Shard(0)))
    assert strided.order(0) == ("tp", "fsdp")
    thirds = [chunked(third, 2, 0) for third in chunked(rows, 3, 0)]
    for rank, region in enumerate(strided.regions):
        fsdp, tp = strided.mesh.coordinate(rank)
        np.testing.assert_array_equal(rows[region.slices], thirds[tp][fsdp])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32), (13, 7), (3, 2), (0, 5)])
def test_regions_cover_the_array_once(name, shape):
    sharding, axes = sharding_of(name, shape)
    replicas = np.prod(
        [n for n, p in zip(sharding.mesh.shape, sharding.placements, strict=True) if p == Replicate()], dtype=int
    )
    held = np.zeros(shape, int)
    for region in sharding.regions:
        held[region.slices] += 1
    assert (held == replicas).all()
    gathered = sharding.gathered(axes)
    for rank, region in enumerate(gathered.regions):
        members = [sharding.region(r) for r in sharding.mesh.group(rank, axes)]
        assert sum(np.prod(member.shape, dtype=int) for member in members) == np.prod(region.shape, dtype=int)


def test_origin_is_the_matrix_position():
    region = Sharding((4, 6, 8), Mesh((2, 2)), (Shard(0), Shard(2))).region(3)
    assert region == Region((2, 0, 4), (2, 6, 4))
    assert region.origin == (0, 4)


def test_straddling_blocks():
    sharding = Sharding((100, 64), Mesh((4,), ("fsdp",)), (Shard(0),))  # cut at 25, 50, 75
    assert sharding.straddling(0, 32) == (0, 1, 2)
    assert sharding.straddling_axes(0, 32) == ("fsdp",)
    assert sharding.straddling(0, 25) == ()
    assert sharding.aligned(0, 25)
    assert not sharding.aligned(0, 16)
    assert sharding.aligned(1, 32)
    # A block longer than shards lies on more than two ranks, and only cuts inside a block count.
    assert Sharding((40, 4), Mesh((8,)), (Shard(0),)).straddling(0, 32) == (0, 1)
    assert Sharding((64, 4), Mesh((4,)), (Shard(0),)).straddling(0, 32) == (0, 1)
    assert Sharding((40, 4), Mesh((2,)), (Shard(0),)).straddling(0, 20) == ()


@pytest.mark.parametrize(
    ("rows", "axes"), [(128, ()), (64, ("fsdp",)), (96, ("fsdp", "tp")), (33, ("fsdp", "tp")), (0, ())], ids=str
)
def test_straddling_axes_are_the_fewest(rows, axes):
    sharding = Sharding((rows, 8), Mesh((2, 2, 2), ("replicate", "fsdp", "tp")), (Replicate(), StridedShard(0, 2), Shard(0)))
    assert sharding.straddling_axes(0, 32) == axes


def test_gathered_keeps_what_is_not_gathered():
    sharding, _ = sharding_of("hsdp_tp", (24, 8))
    assert sharding.gathered(("fsdp",)).placements == (Replicate(), Replicate(), Shard(0))
    assert sharding.gathered(("fsdp", "tp")).placements == (Replicate(),) * 3
    three = Sharding((24, 8), Mesh((2, 3, 2), ("a", "b", "c")), (StridedShard(0, 6), StridedShard(0, 2), Shard(0)))
    assert three.order(0) == ("c", "b", "a")
    assert three.gathered(("a",)).placements == (Replicate(), StridedShard(0, 2), Shard(0))
    with pytest.raises(ValueError, match="gathering array axis 0 over 'tp' but not over 'fsdp'"):
        sharding.gathered(("tp",))
    with pytest.raises(ValueError, match=r"'replicate' holds Replicate\(\), so there is nothing to gather"):
        sharding.gathered(("replicate",))
    with pytest.raises(ValueError, match="mesh has no axis 'dp'; its axes are 'replicate', 'fsdp', 'tp'"):
        sharding.gathered(("dp",))


def test_transposed():
    sharding = Sharding((5, 12, 8), Mesh((2, 2, 2)), (Shard(0), StridedShard(1, 2), Shard(1)))
    assert sharding.transposed() == Sharding((5, 8, 12), Mesh((2, 2, 2)), (Shard(0), StridedShard(2, 2), Shard(2)))
    assert sharding.transposed().transposed() == sharding


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mesh(()), ValueError, "mesh shape must hold one or more sizes"),
        (lambda: Mesh((2, 0)), ValueError, r"sizes of at least 1, got \(2, 0\)"),
        (lambda: Mesh((2, 2), ("a", "a")), ValueError, "needs 2 different names"),
        (lambda: Mesh((2, 2), ("a",)), ValueError, "needs 2 different names"),
        (lambda: Mesh((2,)).coordinate(2), ValueError, r"rank must be in 0..1, got 2"),
        (lambda: Sharding((4,), Mesh((2,)), (Shard(0),)), ValueError, r"two or more axes of size 0 or more, got \(4,\)"),
        (lambda: Sharding((4, 4), Mesh((2, 2)), (Shard(0),)), ValueError, "one entry per mesh axis"),
        (
            lambda: Sharding((4, 4), Mesh((2,)), (Shard(2),)),
            ValueError,
            r"Shard\(2\) names an array axis outside shape \(4, 4\)",
        ),
        (lambda: Sharding((4, 4), Mesh((2,)), ("Shard(0)",)), TypeError, "from_dtensor and from_partition_spec convert"),
        (
            lambda: Sharding((4, 4), Mesh((2,), ("tp",)), (StridedShard(0, 3),)),
            ValueError,
            r"StridedShard\(0, 3\) on mesh axis 'tp' would give a rank several separate runs of array axis 0.*must be 1",
        ),
        (lambda: Sharding((4, 4), Mesh((2, 4)), (StridedShard(0, 3), Shard(0))), ValueError, "split_factor must be 1 or 4"),
    ],
)
def test_what_does_not_fit_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_partition_spec_by_shape_alone():
    mesh = Mesh((2, 4), ("fsdp", "tp"))
    assert from_partition_spec((None, "tp"), mesh, 2) == (Replicate(), Shard(1))
    assert from_partition_spec(("fsdp",), mesh, 3) == (Shard(0), Replicate())
    assert from_partition_spec((("fsdp", "tp"), None), mesh, 2) == (Shard(0), Shard(0))
    assert from_partition_spec((("tp", "fsdp"), None), mesh, 2) == (StridedShard(0, 4), Shard(0))
    with pytest.raises(ValueError, match="3 entries for an array of 2 axes"):
        from_partition_spec((None, None, "tp"), mesh, 2)
    with pytest.raises(ValueError, match="names mesh axis 'tp' twice"):
        from_partition_spec(("tp", "tp"), mesh, 2)
    with pytest.raises(ValueError, match="mesh has no axis 'dp'"):
        from_partition_spec(("dp",), mesh, 2)
    with pytest.raises(ValueError, match="spec entry 3 must be None"):
        from_partition_spec((3,), mesh, 2)


def test_partition_spec_of_jax():
    sharding = pytest.importorskip("jax.sharding")
    mesh, names = Mesh((2, 2, 2), ("a", "b", "c")), ("a", "b", "c")
    devices = np.arange(8).reshape(2, 2, 2)
    for entries in ((("c", "a"), "b"), (("a", "b", "c"), None), (None, ("c", "b")), ("b", ("a", "c"))):
        ours = Sharding((16, 8), mesh, from_partition_spec(sharding.PartitionSpec(*entries), mesh, 2))
        for rank, region in enumerate(ours.regions):
            # JAX counts the pieces of an axis over its names in the order given.
            for dim, entry in enumerate(entries):
                axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                position = 0
                for name in axes:
                    position = position * 2 + int(np.argwhere(devices == rank)[0][names.index(name)])
                size = (16, 8)[dim] >> len(axes)
                assert (region.start[dim], region.shape[dim]) == (position * size, size)


def test_placements_of_torch():
    tensor = pytest.importorskip("torch.distributed.tensor")
    types = pytest.importorskip("torch.distributed.tensor.placement_types")
    offsets = pytest.importorskip("torch.distributed.tensor._utils")._compute_local_shape_and_global_offset
    assert from_dtensor([tensor.Partial("max"), tensor.Replicate()]) == (Partial("max"), Replicate())
    rng = random.Random(0)
    seen = 0
    for _ in range(400):
        mesh = Mesh(rng.choice([(2,), (8,), (4, 2), (2, 3), (2, 2, 2)]))
        theirs = []
        for position in range(len(mesh.shape)):
            right = int(np.prod(mesh.shape[position + 1 :]))
            choices = [tensor.Replicate(), tensor.Shard(0), tensor.Shard(1), types._StridedShard(0, split_factor=right)]
            theirs.append(rng.choice(choices))
        try:
            # Sizes that divide: elsewhere torch's offsets of a strided DTensor may differ from FSDP2's own shards.
            even = any(type(p) is types._StridedShard for p in theirs)
            shape = (rng.randrange(1, 9) * mesh.size if even else rng.randrange(30), rng.randrange(1, 30))
            sharding = Sharding(shape, mesh, from_dtensor(theirs))
        except ValueError:
            continue
        for rank, region in enumerate(sharding.regions):
            size, start = offsets(shape, mesh.shape, list(mesh.coordinate(rank)), theirs)
            assert tuple(size) == region.shape
            assert region.empty or tuple(start) == region.start
            seen += 1
    assert seen > 500

    class MaskPartial:
        pass

    with pytest.raises(ValueError, match="must be Replicate, Shard, _StridedShard or Partial"):
        from_dtensor([MaskPartial()])


FORMATS = [formats.Format.parse(name) for name in ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp6_e3m2_32x32", "mxfp8_e4m3", "nvfp4")]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_parts_of_every_rank(format, name):
    for i, shape in enumerate(shapes(format)):
        sharding, _ = sharding_of(name, shape)
        _, whole = whole_and_shards(format, shape, sharding, "gaussian", seed=i)
        expected = parts(whole, format, sharding)
        for part in saved.parts(format, sharding):
            array = getattr(whole, part.name)
            assert (array.shape, array.dtype.name) == (part.shape, part.dtype)
            for region, own in zip(sharding.regions, expected, strict=True):
                inside = np.asarray(array[part.span(region)])
                want = getattr(own, part.name)
                if part.name == "codes" and not part.sharded:
                    # The first and last byte have neighbours' codes in them.
                    bits, together = format.element.bits, {8: 1, 6: 4, 4: 2}[format.element.bits]
                    first = region.start[-1] % together
                    codes = layout.unpack(inside, bits, first + region.shape[-1])[..., first:]
                    inside = layout.pack(codes, bits)
                np.testing.assert_array_equal(inside.ravel().view(np.uint8), want.ravel().view(np.uint8))
            if part.sharded:
                own_sharding = Sharding(part.shape, sharding.mesh, sharding.placements)
                for region, cut in zip(sharding.regions, own_sharding.regions, strict=True):
                    assert cut.empty if region.empty else part.span(region) == cut.slices


def test_what_is_cut_as_the_array_is():
    sharded = {
        (name, part.name): part.sharded
        for name in ("fsdp2", "hsdp", "strided2x2", "row_parallel")
        for part in saved.parts(formats.NVFP4_16x16, sharding_of(name, (192, 192))[0])
    }
    assert sharded == {
        (name, part): part != "tensor_scale"
        for name in ("fsdp2", "hsdp", "strided2x2", "row_parallel")
        for part in ("codes", "scales", "tensor_scale")
    }
    # 40 rows on two ranks: 20 are no multiple of 16.
    codes, scales, _ = saved.parts(formats.NVFP4_16x16, sharding_of("fsdp2", (40, 192))[0])
    assert (codes.sharded, scales.sharded) == (True, False)
    # 18 columns on two ranks: 9 end inside a byte.
    codes, *_ = saved.parts(formats.NVFP4, sharding_of("both_axes", (4, 18 * 3 // 2))[0])
    assert not codes.sharded


@pytest.mark.parametrize(("rows", "agree"), [(8, True), (10, False), (7, False), (12, True)])
def test_uneven_strided_shards_are_not_left_to_torch(rows, agree):
    sharding, _ = sharding_of("strided2x2", (rows, 64))
    assert isinstance(sharding.placements[0], StridedShard)
    assert saved.offsets_agree(sharding) is agree
    assert saved.offsets_agree(sharding_of("fsdp3", (rows, 64))[0])
