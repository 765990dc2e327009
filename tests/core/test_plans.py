"""Axes, steps and sizes of plans, and refusals. test_simulate holds that the results are right."""

import pickle

import pytest
from held_formats import FORMATS
from sharded import LAYOUTS, sharding_of

from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Partial, Replicate, Shard, Sharding, StridedShard
from blockfp.sharding.steps import Dequantize, Gather, Quantize, Rotate, Straddle, Transpose

MESH = Mesh((2, 2, 2), ("dp", "fsdp", "tp"))
TENSOR, TWO_LEVEL, BLOCK = "fp8_e4m3", "nvfp4", "mxfp8_e4m3"


@pytest.mark.parametrize(
    ("operand", "placements", "current", "delayed"),
    [
        # A weight: every axis that shards it, HSDP's replicas not.
        ("weight", (Replicate(), Shard(0), Replicate()), ("fsdp",), ("fsdp",)),
        ("weight", (Shard(0), Shard(0), Shard(1)), ("dp", "fsdp", "tp"), ("dp", "fsdp", "tp")),
        ("weight", (Replicate(), StridedShard(0, 2), Shard(0)), ("fsdp", "tp"), ("fsdp", "tp")),
        ("weight", (Replicate(), Replicate(), Replicate()), (), ()),
        # An input of a column-parallel linear: whole on each rank; with sequence parallelism its rows are cut.
        ("input", (Replicate(), Replicate(), Replicate()), (), ("dp", "fsdp")),
        ("input", (Replicate(), Replicate(), Shard(0)), ("tp",), ("dp", "fsdp", "tp")),
        # An input of a row-parallel linear: its columns are cut.
        ("input", (Replicate(), Replicate(), Shard(1)), ("tp",), ("dp", "fsdp", "tp")),
        # The batch as one global array: a data-parallel axis still divides tensors, not a tensor.
        ("input", (Shard(0), Shard(0), Shard(1)), ("tp",), ("dp", "fsdp", "tp")),
        ("gradient", (Replicate(), Replicate(), Shard(-1)), ("tp",), ("dp", "fsdp", "tp")),
        ("gradient", (Shard(0), Replicate(), Replicate()), (), ("dp", "fsdp")),
    ],
)
def test_amax_axes(operand, placements, current, delayed):
    options = {"data_axes": ("fsdp", "dp")}
    assert plans.amax_axes(TENSOR, MESH, placements, operand, **options) == current
    assert plans.amax_axes(TWO_LEVEL, MESH, placements, operand, **options) == current
    assert plans.amax_axes(BLOCK, MESH, placements, operand, **options) == ()
    assert plans.amax_axes(TENSOR, MESH, placements, operand, delayed=True, **options) == delayed


def test_amax_axes_of_one_rank_are_left_out():
    mesh = Mesh((2, 1), ("replicate", "shard"))
    assert plans.amax_axes(TENSOR, mesh, (Replicate(), Shard(0)), "weight") == ()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_only_formats_with_a_tensor_scale_have_amax_axes(format):
    axes = plans.amax_axes(format, MESH, (Shard(0),) * 3, "weight")
    assert axes == (("dp", "fsdp", "tp") if format.has_tensor_scale else ())


def test_amax_axes_refuses():
    with pytest.raises(ValueError, match="operand must be one of input, weight, gradient, got 'output'"):
        plans.amax_axes(TENSOR, MESH, (Shard(0),) * 3, "output")
    with pytest.raises(ValueError, match="placements must have one entry per axis"):
        plans.amax_axes(TENSOR, MESH, (Shard(0),), "input")
    with pytest.raises(ValueError, match="mesh has no axis 'cp'"):
        plans.amax_axes(TENSOR, MESH, (Shard(0),) * 3, "input", data_axes=("cp",))
    with pytest.raises(ValueError, match=r"Partial\('sum'\) on mesh axis 'tp' holds terms, not values; reduce them over 'tp'"):
        plans.amax_axes(TENSOR, MESH, (Replicate(), Replicate(), Partial()), "gradient")
    with pytest.raises(ValueError, match="delayed = True needs a format with one scale per tensor, got mxfp8_e4m3"):
        plans.amax_axes(BLOCK, MESH, (Shard(0),) * 3, "input", delayed=True)


def steps_of(plan):
    return [type(step) for step in plan.steps]


def test_aligned_blocks_need_no_reduction():
    for name in ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "mxfp4_e2m1"):
        sharding = Sharding((512, 512), Mesh((4,), ("fsdp",)), (Shard(0),))
        assert plans.quantize_shards(name, sharding).steps == (Quantize(Format.parse(name), sharding, (), ()),)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_the_straddling_blocks_that_it_has_elements_of(name):
    format = Format.parse("mxfp8_e4m3_32x32")
    sharding, _ = sharding_of(name, (150, 170))
    (step,) = plans.quantize_shards(format, sharding).steps
    for straddle in step.straddles:
        for region in sharding.regions:
            start, size = region.start[straddle.dim], region.shape[straddle.dim]
            own = sorted({element // 32 for element in range(start, start + size)})
            expected = [(i, own.index(block)) for i, block in enumerate(straddle.blocks) if block in own]
            assert straddle.held(format, region) == tuple(expected)


def test_straddling_blocks_are_reduced_over_the_fewest_axes():
    sharding, _ = sharding_of("hsdp_tp", (64, 40))  # tp cuts at 32, fsdp at 16 and 48
    (step,) = plans.quantize_shards("mxfp8_e4m3_32x32", sharding).steps
    assert step.straddles == (Straddle(0, ("fsdp",), (0, 1)),)
    sharding, _ = sharding_of("both_axes", (40, 100))  # rows cut at 20, columns at 34 and 68
    (step,) = plans.quantize_shards("nvfp4_16x16", sharding).steps
    assert step.straddles == (Straddle(0, ("rows",), (1,)), Straddle(1, ("columns",), (2, 4)))
    assert step.amax_axes == ("rows", "columns")
    (step,) = plans.quantize_shards("nvfp4", sharding).steps
    assert step.straddles == (Straddle(1, ("columns",), (2, 4)),)


def test_gather_of_a_weight_sends_codes_and_scales():
    sharding, axes = sharding_of("fsdp3", (320, 64))  # chunks of 107
    plan = plans.gather_weight("mxfp8_e4m3_32x32", sharding, axes)
    (gather,) = plan.steps
    assert plan.reason is None
    assert gather.group(1) == (0, 1, 2)
    assert gather.elements(0).chunk == 107
    assert gather.elements(0).runs == ((0, 0, 107), (1, 0, 107), (2, 0, 106))
    assert gather.elements(0).head
    # Rows 107 .. 213 lie in blocks 3 .. 6: block 3 came with the first rank, block 6 is kept here and not from the third.
    assert gather.scales(0).chunk == 5
    assert gather.scales(0).runs == ((0, 0, 4), (1, 1, 4), (2, 1, 4))
    assert gather.scales(0).index.tolist() == [0, 1, 2, 3, 6, 7, 8, 11, 12, 13]
    assert not gather.scales(0).head


def test_aligned_gather_needs_no_index():
    sharding, axes = sharding_of("fsdp8", (1024, 64))
    (gather,) = plans.gather_weight("fp8_e4m3_128x128", sharding, axes).steps
    assert gather.scales(3).chunk == 1
    assert gather.scales(3).head
    assert gather.elements(3).head


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_collective_agree_on_sizes(name):
    for i, shape in enumerate(((257, 40), (3, 5), (0, 8), (64, 0))):
        sharding, axes = sharding_of(name, shape)
        for gather in plans.gather_weight(FORMATS[7 * i + 5], sharding, axes).steps:
            for rank in range(sharding.mesh.size):
                for member in gather.group(rank):
                    assert gather.elements(member) == gather.elements(rank)
                    assert gather.scales(member) == gather.scales(rank)


def test_a_gather_along_a_packed_axis_joins_codes_where_chunks_end_inside_bytes():
    for columns, format, unpacks in ((24, "mxfp4_e2m1", False), (21, "mxfp4_e2m1", True), (30, "mxfp6_e3m2", True)):
        sharding = Sharding((4, columns), Mesh((3,), ("tp",)), (Shard(1),))
        (gather,) = plans.gather_weight(format, sharding, ("tp",)).steps
        assert gather.unpacks is unpacks
    (gather,) = plans.gather_weight("mxfp8_e4m3", sharding, ("tp",)).steps
    assert not gather.unpacks


def test_columnwise_weight():
    sharding, axes = sharding_of("fsdp2", (64, 64))
    plan = plans.gather_weight("mxfp8_e4m3_32x32", sharding, axes, columnwise=True)
    assert steps_of(plan) == [Gather, Transpose]
    assert plan.target.shape == (64, 64)
    with pytest.raises(
        ValueError, match=r"mxfp8_e4m3 has no exact transpose.*\(mxfp8_e4m3_32x32\), or multiply by the dequant"
    ):
        plans.gather_weight("mxfp8_e4m3", sharding, axes, columnwise=True)


@pytest.mark.parametrize(
    ("format", "rows", "options", "steps", "reason"),
    [
        ("mxfp8_e4m3", 50, {}, [Quantize, Gather], None),
        ("mxfp8_e4m3", 128, {"columnwise": True}, [Transpose, Quantize, Gather], None),
        ("mxfp8_e4m3", 50, {"columnwise": True}, [Gather, Transpose, Quantize], "inside a block of 32"),
        ("nvfp4", 64, {"columnwise": True, "rotate": True}, [Transpose, Rotate, Quantize, Gather], None),
        ("nvfp4", 50, {"columnwise": True, "rotate": True}, [Gather, Transpose, Rotate, Quantize], "inside a block of 16"),
        ("fp8_e4m3", 50, {"columnwise": True}, [Quantize, Gather, Transpose], None),
        (
            "fp8_e4m3",
            50,
            {"columnwise": True, "rotate": True},
            [Gather, Transpose, Rotate, Quantize],
            "inside a rotation group of 16",
        ),
        ("fp8_e4m3", 50, {"columnwise": True, "stochastic": True}, [Transpose, Quantize, Gather], None),
        ("mxfp8_e4m3_32x32", 50, {}, [Gather, Quantize], "inside a block of 32"),
        ("mxfp8_e4m3", 50, {"quantized": "mxfp8_e4m3"}, [Gather], None),
        ("fp8_e4m3", 50, {"quantized": "fp8_e4m3", "columnwise": True}, [Gather, Transpose], None),
        ("mxfp8_e4m3", 128, {"quantized": "mxfp8_e4m3", "columnwise": True}, [Dequantize, Transpose, Quantize, Gather], None),
        (
            "mxfp8_e4m3",
            50,
            {"quantized": "mxfp8_e4m3", "columnwise": True},
            [Gather, Dequantize, Transpose, Quantize],
            "axis 0 of [50, 64] is cut at 13, 26, 39, inside a block of 32; shards whose length is a multiple of 32",
        ),
    ],
)
def test_gather_of_an_activation(format, rows, options, steps, reason):
    sharding = Sharding((rows, 64), Mesh((4,), ("tp",)), (Shard(0),))
    plan = plans.gather_activation(format, sharding, ("tp",), **options)
    assert steps_of(plan) == steps
    if reason is None:
        assert plan.reason is None
    else:
        assert plan.reason is not None
        assert reason in plan.reason


def test_refusals():
    sharding = Sharding((50, 64), MESH, (Replicate(), Replicate(), Shard(0)))
    with pytest.raises(
        ValueError, match=r"rotate = True: a shard boundary on axis 1.*divides a group of 16; gather over tp first"
    ):
        plans.quantize_shards("nvfp4", sharding, operand="input", columnwise=True, rotate=True)
    batch = Sharding((50, 64), MESH, (Shard(0), Replicate(), Shard(1)))
    with pytest.raises(ValueError, match=r"Shard\(0\) on data-parallel axis 'dp' of the input.*with Replicate\(\) on 'dp'"):
        plans.quantize_shards("fp8_e4m3", batch, operand="input", data_axes=("dp",))
    experts = Sharding((4, 50, 64), MESH, (Replicate(), Shard(0), Replicate()))
    plans.quantize_shards("nvfp4_16x16", experts)
    with pytest.raises(ValueError, match=r"stochastic = True.*leading axis 0.*fold the leading axes into the rows"):
        plans.quantize_shards("nvfp4_16x16", experts, stochastic=True)
    terms = Sharding((50, 64), MESH, (Partial(), Replicate(), Replicate()))
    for plan in (
        lambda: plans.quantize_shards("nvfp4", terms),
        lambda: plans.gather_weight("nvfp4", terms, ()),
        lambda: plans.gather_activation("nvfp4", terms, ()),
    ):
        with pytest.raises(ValueError, match=r"Partial\('sum'\) on mesh axis 'dp' holds terms"):
            plan()
    with pytest.raises(ValueError, match="gather_weight plans the gather of a weight"):
        plans.gather_activation("nvfp4", sharding, ("tp",), operand="weight")
    with pytest.raises(ValueError, match="nothing to gather over it"):
        plans.gather_weight("nvfp4", sharding, ("fsdp",))
    with pytest.raises(ValueError, match="format 'mxfp9' is not known"):
        plans.gather_weight("mxfp9", sharding, ("tp",))


def test_plans_are_values_and_print():
    sharding, axes = sharding_of("strided2x2", (100, 64))
    plan = plans.gather_weight("mxfp8_e4m3_32x32", sharding, axes, columnwise=True)
    assert plan == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(plans.gather_weight(Format.parse("mxfp8_e4m3_32x32"), sharding, axes, columnwise=True))
    assert str(plan).splitlines() == [
        "all-gather of a weight in mxfp8_e4m3_32x32 over fsdp, columnwise: "
        "[100, 64] on fsdp=2 x tp=2 as (StridedShard(0, 2), Shard(0))",
        "  1. gather codes and scales along axis 0 over fsdp: 25 elements a rank, 2 scales",
        "  2. swap the last two axes",
    ]
    straddling = str(plans.quantize_shards("nvfp4_16x16", sharding))
    assert "tensor amax max-reduced over fsdp, tp" in straddling
    assert "amax of 3 blocks along axis 0 that straddle ranks max-reduced over fsdp, tp" in straddling
    activation = Sharding((50, 30), Mesh((4,), ("tp",)), (Shard(0),))
    options = {"columnwise": True, "rotate": True, "quantized": "mxfp4_e2m1"}
    for text in (
        "rotate groups of 16",
        "dequantize mxfp4_e2m1 to the nominal dtype",
        "through high precision: axis 0 of [50, 30] is cut at 13, 26, 39, ",
    ):
        assert text in str(plans.gather_activation("nvfp4", activation, ("tp",), **options))


@pytest.mark.parametrize("format", ["mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "nvfp4_16x16", "fp8_e4m3"])
@pytest.mark.parametrize("rows", [128, 150, 301])
def test_a_shard_that_is_sharded_further_is_gathered_alike(format, rows):
    """FSDP knows of a tensor-parallel shard only where it begins: its scales are joined as in the plan of both meshes."""
    whole, axes = sharding_of("strided2x2", (rows, 64))
    (expected,) = plans.gather_weight(format, whole, axes).steps
    for rank in range(4):
        fsdp, tp = whole.mesh.coordinate(rank)
        cut = Sharding((rows, 64), Mesh((2,), ("tp",)), (Shard(0),)).region(tp)
        shard = Sharding(cut.shape, Mesh((2,), ("fsdp",)), (Shard(0),))
        (step,) = plans.gather_weight(format, shard, ("fsdp",), origin=cut.origin).steps
        assert step.scales(fsdp).runs == expected.scales(rank).runs
        assert step.elements(fsdp).runs == expected.elements(rank).runs
