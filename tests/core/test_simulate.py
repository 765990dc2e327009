"""The invariant: gather(quantize(shard)) == quantize(gather(shard)), bit for bit, on every mesh, carried out rank by rank."""

import numpy as np
import pytest
from drawn import examples
from held_formats import FORMATS
from hypothesis import given
from hypothesis import strategies as st
from samples import DTYPES, KINDS, bits_of, sample
from sharded import LAYOUTS, assert_holds, kind_for, parts, shapes, sharding_of, whole_and_shards
from shardings import shardings

from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.formats import NAMES, Format
from blockfp.sharding import plans, simulate
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding, StridedShard

FAMILIES = tuple(
    Format.parse(name)
    for name in (
        "fp8_e4m3",
        "fp8_e5m2_1x128",
        "fp8_e4m3_128x128",
        "mxfp8_e4m3_32x32",
        "mxfp6_e2m3",
        "mxfp6_e3m2_32x32",
        "mxint8",
        "nvfp4",
        "nvfp4_16x16",
    )
)
BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
BY_FAMILY = pytest.mark.parametrize("format", FAMILIES, ids=str)
SEQUENCE = (Mesh((4,), ("tp",)), Mesh((3,), ("tp",)), Mesh((8,), ("tp",)))


def quantized(world):
    return [numerics.Quantized(local.codes, local.scales, local.tensor_scale) for local in world]


def quantize_and_gather(format, sharding, axes, shards, *, columnwise=False, **options):
    stochastic = options.get("key") is not None
    held = quantized(simulate.run(plans.quantize_shards(format, sharding, stochastic=stochastic), shards, **options))
    return held, simulate.run(plans.gather_weight(format, sharding, axes, columnwise=columnwise), held)


@BY_NAME
def test_weights_on_every_mesh(format):
    for i, name in enumerate(LAYOUTS):
        for j, shape in enumerate(shapes(format)):
            if (i + j) % 3 and format not in FAMILIES:
                continue
            sharding, axes = sharding_of(name, shape)
            key = (i << 32) + j if i % 2 else None
            shards, whole = whole_and_shards(format, shape, sharding, kind_for(i, 3 * j), key=key)
            held, gathered = quantize_and_gather(format, sharding, axes, shards, key=key)
            assert_holds(held, parts(whole, format, sharding))
            assert_holds(gathered, parts(whole, format, sharding.gathered(axes)))


@BY_FAMILY
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_options(format, dtype):
    options = {"nominal": dtype, "eps": 1e-3 if format.scale.dtype == "float32" else 0.0}
    for kind in KINDS:
        sharding, axes = sharding_of("hsdp", shapes(format)[1])
        shards, whole = whole_and_shards(format, sharding.shape, sharding, kind, 1, dtype, **options)
        _, gathered = quantize_and_gather(format, sharding, axes, shards, **options)
        assert_holds(gathered, parts(whole, format, sharding.gathered(axes)))


@pytest.mark.parametrize("format", [f for f in FORMATS if f.square], ids=str)
@pytest.mark.parametrize("name", ["fsdp3", "strided2x2", "row_parallel"])
def test_columnwise_weight_is_derived(format, name):
    for j, shape in enumerate(shapes(format)):
        sharding, axes = sharding_of(name, shape)
        shards, whole = whole_and_shards(format, shape, sharding, kind_for(j), columnwise=True)
        _, gathered = quantize_and_gather(format, sharding, axes, shards, columnwise=True)
        assert_holds(gathered, parts(whole, format, sharding.gathered(axes).transposed()))


@BY_FAMILY
def test_columnwise_shards(format):
    for i, name in enumerate(LAYOUTS):
        shape = shapes(format)[i % 5]
        sharding, _ = sharding_of(name, shape)
        shards, whole = whole_and_shards(format, shape, sharding, kind_for(i), columnwise=True, key=i)
        world = simulate.run(plans.quantize_shards(format, sharding, columnwise=True, stochastic=True), shards, key=i)
        assert_holds(world, parts(whole, format, sharding.transposed()))


@BY_FAMILY
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (StridedShard(1, 2), Shard(1)), (Shard(2), Shard(0))], ids=str)
def test_leading_axes(format, placements):
    sharding = Sharding((3, 37, 44), Mesh((3, 2), ("fsdp", "tp")), placements)
    shards, whole = whole_and_shards(format, sharding.shape, sharding, "exponents")
    held, gathered = quantize_and_gather(format, sharding, ("fsdp",), shards)
    assert_holds(held, parts(whole, format, sharding))
    assert_holds(gathered, parts(whole, format, sharding.gathered(("fsdp",))))


@pytest.mark.parametrize(("format", "columns"), [("mxfp4_e2m1", 5), ("mxfp6_e2m3", 13)])
def test_parts_of_whole_bytes_may_come_before_shorter_ones(format, columns):
    sharding = Sharding((3, columns), Mesh((2, 2), ("outer", "inner")), (Shard(1), Shard(1)))
    shards, whole = whole_and_shards(Format.parse(format), sharding.shape, sharding, "gaussian")
    _, gathered = quantize_and_gather(format, sharding, ("outer", "inner"), shards)
    assert_holds(gathered, parts(whole, Format.parse(format), sharding.gathered(("outer", "inner"))))


def gathered_activation(format, sharding, x, have, columnwise, rotated, key, nominal):
    """The definition on the whole array: an activation's gather must give it."""
    if have is not None:
        q = numerics.quantize(x, have, nominal=nominal)
        if have is not format or rotated or (columnwise and (not format.square or key is not None)):
            x = numerics.dequantize(*q, have, nominal, columns=x.shape[-1])
    x = np.swapaxes(x, -1, -2) if columnwise else x
    with np.errstate(invalid="ignore", over="ignore"):
        return numerics.quantize(rotate(x) if rotated else x, format, key=key, nominal=nominal)


@BY_FAMILY
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("have", [None, "same", "mxfp8_e4m3_32x32"])
def test_sequence_parallel_activations(format, columnwise, have):
    have = None if have is None else format if have == "same" else Format.parse(have)
    for i, rows in enumerate((512, 96, 150, 7)):
        mesh = SEQUENCE[i % 3]
        sharding = Sharding((rows, 80), mesh, (Shard(0),))
        for j, rotated in enumerate((False, True)):
            stochastic = (i + j) % 2 == 0 and have is not format
            if rotated and not columnwise and have is not None:
                continue
            x = sample(kind_for(i, j), sharding.shape, "bfloat16")
            key = 5 if stochastic else None
            plan = plans.gather_activation(
                format, sharding, ("tp",), columnwise=columnwise, rotate=rotated, stochastic=stochastic, quantized=have
            )
            locals = simulate.shards(x, sharding)
            if have is not None:
                locals = quantized(simulate.run(plans.quantize_shards(have, sharding), locals, nominal="bfloat16"))
            with np.errstate(invalid="ignore", over="ignore"):
                world = simulate.run(plan, locals, key=key, nominal="bfloat16")
            whole = gathered_activation(format, sharding, x, have, columnwise, rotated, key, "bfloat16")
            assert_holds(world, parts(whole, format, plan.target))


@BY_FAMILY
def test_activation_that_stays_sharded_over_another_axis(format):
    mesh = Mesh((3, 2), ("sp", "tp"))
    for rows, columns in ((150, 70), (384, 256)):
        sharding = Sharding((rows, columns), mesh, (Shard(0), Shard(1)))
        for columnwise in (False, True):
            plan = plans.gather_activation(format, sharding, ("sp",), operand="gradient", columnwise=columnwise)
            shards, whole = whole_and_shards(format, sharding.shape, sharding, "exponents", columnwise=columnwise)
            assert_holds(simulate.run(plan, shards), parts(whole, format, plan.target))


def test_data_parallel_ranks_have_tensors_of_their_own():
    mesh = Mesh((2, 2), ("dp", "tp"))
    sharding = Sharding((64, 32), mesh, (Replicate(), Shard(0)))
    tensors = [sample("gaussian", (64, 32), seed=seed) * 10**seed for seed in (0, 1)]
    locals = [part for x in tensors for part in simulate.shards(x, Sharding((64, 32), Mesh((2,)), (Shard(0),)))]
    for format in ("fp8_e4m3", "nvfp4"):
        plan = plans.gather_activation(format, sharding, ("tp",), data_axes=("dp",))
        world = simulate.run(plan, locals)
        assert_holds(world, [numerics.quantize(tensors[rank // 2], format) for rank in range(4)])


def gatherable(sharding, axes):
    try:
        sharding.gathered(axes)
    except ValueError:
        return False
    return True


@examples(150)
@given(st.data())
def test_any_format_on_any_mesh(data):
    format = Format.parse(data.draw(st.sampled_from(NAMES)))
    sharding = data.draw(shardings())
    key = data.draw(st.sampled_from([None, 7]))
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99))
    shards, whole = whole_and_shards(format, sharding.shape, sharding, kind, seed, key=key)
    plan = plans.quantize_shards(format, sharding, stochastic=key is not None)
    held = quantized(simulate.run(plan, shards, key=key))
    assert_holds(held, parts(whole, format, sharding))
    sharded = [n for n, p in zip(sharding.mesh.names, sharding.placements, strict=True) if not isinstance(p, Replicate)]
    subsets = [tuple(n for i, n in enumerate(sharded) if mask >> i & 1) for mask in range(1, 1 << len(sharded))]
    for axes in filter(lambda axes: gatherable(sharding, axes), subsets):
        gathered = simulate.run(plans.gather_weight(format, sharding, axes), held)
        assert_holds(gathered, parts(whole, format, sharding.gathered(axes)))


def test_values_travel_unchanged_where_the_plan_gathers_them():
    sharding = Sharding((50, 20), Mesh((4,), ("tp",)), (Shard(0),))
    x = sample("special", (50, 20), "bfloat16")
    gather = plans.gather_activation("mxfp8_e4m3", sharding, ("tp",), columnwise=True).steps[0]
    plan = plans.Plan("test", sharding, sharding.gathered(("tp",)), (gather,))
    for local in simulate.run(plan, simulate.shards(x, sharding)):
        np.testing.assert_array_equal(bits_of(local.values), bits_of(x))


def test_bad_input():
    sharding = Sharding((8, 4), Mesh((2,)), (Shard(0),))
    plan = plans.quantize_shards("mxfp8_e4m3", sharding)
    with pytest.raises(ValueError, match=r"array must have the sharding's shape \(8, 4\), got \(8, 5\)"):
        simulate.shards(np.zeros((8, 5), np.float32), sharding)
    with pytest.raises(ValueError, match="locals must hold one entry for each of 2 ranks, got 1"):
        simulate.run(plan, [np.zeros((4, 4), np.float32)])
    with pytest.raises(ValueError, match=r"locals\[1\] must have shape \(4, 4\), got \(3, 4\)"):
        simulate.run(plan, [np.zeros((4, 4), np.float32), np.zeros((3, 4), np.float32)])
    with pytest.raises(ValueError, match="one shape and dtype"):
        simulate.all_gather(sharding.mesh, ("dim_0",), [np.zeros(2), np.zeros(3)])
