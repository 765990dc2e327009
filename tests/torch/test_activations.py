"""Activations and gradients on the ranks of a threaded group: each operand equals the whole's quantization, bit for bit."""

import warnings

import numpy as np
import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.linear.tensor_parallel.operand_plans import operand_plan
from blockfp.torch_backend.sharded.gather import gather
from blockfp.torch_backend.sharded.quantize import Direction, quantize_operand_shard
from blockfp.torch_backend.sharded.rank_plan import COLUMNS, ROWS, TensorParallelShard
from held_formats import FORMATS
from samples import KINDS, sample

from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.formats import Format
from blockfp.recipes import Cast
from blockfp.sharding import plans, simulate
from blockfp.torch import quantize

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
KEY = (7, 9)


def values(kind, shape):
    return torch.from_numpy(sample(kind, shape)).to(torch.bfloat16)


def unit(format, across):
    """Elements along rows and columns that a part must be a multiple of to be aligned; packed codes count."""
    rows, columns = (1, 128) if format.per_row else format.block or (1, 1)
    return (columns, rows) if across else (rows, columns)


def shapes(format, ranks, axis, across):
    """(aligned, unaligned) shapes of the whole: a part is some blocks long, or ends inside one."""
    rows, columns = unit(format, across)
    aligned = (2 * rows * ranks, 48) if axis == ROWS else (40, 2 * columns * ranks)
    return {"aligned": aligned, "unaligned": (20 * ranks, 48) if axis == ROWS else (40, 20 * ranks)}


def encoded(x, cast, across):
    """The array that is quantized of x."""
    x = x.mT.contiguous() if across else x
    return rotate(x) if cast.rotate else x


def whole_quantized(x, cast, across, key):
    """Codes, scales and tensor scale that one process gives the whole."""
    q = quantize(encoded(x, cast, across), cast.format, key=key)
    return [part for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def part_of(x, place, ranks, rank):
    return (
        x.view(place.runs, -1, x.shape[1]).chunk(ranks, 1)[rank].reshape(-1, x.shape[1])
        if place.dim == ROWS
        else (x.chunk(ranks, 1)[rank].contiguous())
    )


def gathered(x, cast, place, columnwise, key, operand="input"):
    """The whole's codes and scales on this rank, as the plan says, and that plan."""
    plan = operand_plan(x.shape, cast, place, columnwise=columnwise, operand=operand)
    if plan.by_codes:
        parts = quantize_operand_shard(x, [Direction(cast, plan.quantize, key)], place)[0]
    else:
        parts = [x]
    parts = gather(plan, place, parts)
    if not plan.by_codes:
        assert parts[0].is_contiguous()
        assert parts[0].dtype == x.dtype
        parts = whole_quantized(parts[0], cast, plan.quantize.columnwise, key)
    if plan.transposes:
        columns = x.shape[1] if place.dim == ROWS else plan.quantize.shape[1]
        codes, scales = numerics.transpose(parts[0], parts[1], cast.format, columns=columns)
        parts[:2] = codes.contiguous(), scales.contiguous()
    return parts, plan


def place_on(rank, ranks, axis, **more):
    return TensorParallelShard(dist.group.WORLD.group_name, ranks, rank, axis, **more)


def same(got, expected, format=None, x=None):
    """Bits of parts; those of an operand x with an Inf in it have scales that are NaN instead, in products alone."""
    assert len(got) == len(expected)
    overflows = x is not None and bool(x.isinf().any())
    factor = (2 if format.scale.two_level else 1) if overflows else None
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if i == factor:
            nan = a == 255 if a.dtype is torch.uint8 else a.isnan()
            # Of blocks, those of the rank that has the Inf; fp16's, and a scale of the whole, everywhere.
            assert nan.any() if format.block and not format.scale.two_level else nan.all()
            a, b = a[~nan], b[~nan]
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def casts(format):
    yield Cast(format)
    yield Cast(format, stochastic=True)
    if str(format) == "nvfp4":
        yield Cast(format, rotate=True)
        yield Cast(format, stochastic=True, rotate=True)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("axis", [ROWS, COLUMNS], ids=["rows", "columns"])
@BY_NAME
def test_what_is_gathered_is_the_quantization_of_the_whole(format, axis):
    """{aligned, unaligned} x {rows, columns cut} x {rowwise, columnwise} x {nearest, stochastic, rotated}; 2 and 4 ranks."""
    cases = []
    for ranks in (2, 4):
        for across in (False, True):
            for name, shape in shapes(format, ranks, axis, across).items():
                cases += [(ranks, across, name, shape, cast) for cast in casts(format)]

    def on_rank(rank, ranks, across, shape, cast, kind):
        x, key = values(kind, shape), torch.tensor(KEY, dtype=torch.int32) if cast.stochastic else None
        place = place_on(rank, ranks, axis)
        parts, plan = gathered(part_of(x, place, ranks, rank), cast, place, across, key)
        same(parts, whole_quantized(x, cast, across, key), format, encoded(x, cast, across) if plan.by_codes else None)
        return plan.by_codes

    for i, (ranks, across, name, shape, cast) in enumerate(cases):
        by_codes = threaded.run(ranks, on_rank, ranks, across, shape, cast, KINDS[i % len(KINDS)])
        # Where ranks have parts of rows that have one scale, no length is aligned.
        cut = format.per_row and (axis == COLUMNS) != across
        assert all(by_codes) or name == "unaligned" or cut, (ranks, across, shape, cast)


@BY_NAME
def test_parts_that_stay_share_the_blocks_that_straddle(format):
    """Codes of parts of columns (row-parallel inputs) and of rows, even and uneven, by the plan that `simulate` carries out."""
    cases = [(COLUMNS, 100, 4), (COLUMNS, 130, 4), (COLUMNS, 5, 4), (ROWS, 70, 3), (ROWS, 9, 4)]

    def on_rank(rank, ranks, axis, length, columnwise, operand, key):
        x = values(KINDS[length % len(KINDS)], (length, 40) if axis == ROWS else (24, length))
        place = place_on(rank, ranks, axis, length=length)
        local = place.sharding(local_shape(x, place))
        own = x[local.region(rank).slices].contiguous()
        cast = Cast(format, stochastic=key is not None)
        plan = operand_plan(own.shape, cast, place, columnwise=columnwise, operand=operand, gathers=False)
        words = None if key is None else torch.tensor(key, dtype=torch.int32)
        return quantize_operand_shard(own, [Direction(cast, plan.quantize, words)], place)[0], local, x

    for i, (axis, length, ranks) in enumerate(cases):
        for columnwise in (False, True):
            key, operand = (None, KEY)[i % 2], ("input", "gradient", "weight")[i % 3]
            world = threaded.run(ranks, on_rank, ranks, axis, length, columnwise, operand, key)
            _, sharding, x = world[0]
            plan = plans.quantize_shards(format, sharding, operand=operand, columnwise=columnwise, stochastic=key is not None)
            shards = simulate.shards(x.float().numpy(), sharding)
            expected = simulate.run(plan, shards, key=key, nominal="bfloat16")
            for (parts, *_), local, part in zip(world, expected, map(torch.from_numpy, shards), strict=True):
                numbers = [n for n in (local.codes, local.scales, local.tensor_scale) if n is not None]
                expected_parts = [torch.from_numpy(np.array(n)) for n in numbers]
                # Of formats with blocks each part is marked by itself; an empty one needs no mark.
                whole = part.numel() and format.has_tensor_scale
                same(parts, expected_parts, format, x if whole else part)


def local_shape(x, place):
    chunk = -(-place.length // place.ranks)
    own = max(0, min(chunk, place.length - place.rank * chunk))
    return (own, x.shape[1]) if place.dim == ROWS else (x.shape[0], own)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3_32x32", "mxfp6_e3m2", "nvfp4"])
def test_several_sequences_are_gathered_each(name):
    """[sequences, tokens, width] cut along the tokens: rows of the whole are those of one sequence after another."""
    format = Format.parse(name)

    def on_rank(rank, tokens, columnwise, cast):
        x, key = values("bf16_valued", (3 * tokens, 64)), torch.tensor(KEY, dtype=torch.int32) if cast.stochastic else None
        place = place_on(rank, 2, ROWS, runs=3)
        parts, plan = gathered(part_of(x, place, 2, rank), cast, place, columnwise, key)
        same(parts, whole_quantized(x, cast, columnwise, key))
        return plan.by_codes

    for tokens in (256, 20):
        for columnwise in (False, True):
            for cast in casts(format):
                assert all(threaded.run(2, on_rank, tokens, columnwise, cast)) or tokens == 20


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3_1x128", "mxfp4_e2m1", "mxfp6_e2m3_32x32", "nvfp4"])
def test_uneven_and_empty_parts_are_gathered(name):
    format = Format.parse(name)

    def on_rank(rank, length, columnwise):
        x, place = values("gaussian", (length, 96)), place_on(rank, 4, ROWS, length=length)
        start = min(rank * -(-length // 4), length)
        own = x[start : start + local_shape(x, place)[0]].contiguous()
        parts, _ = gathered(own, Cast(format), place, columnwise, None)
        same(parts, whole_quantized(x, Cast(format), columnwise, None))

    for length in (250, 5, 9, 384 + 7):
        for columnwise in (False, True):
            threaded.run(4, on_rank, length, columnwise)


def test_one_warning_names_the_plans_reason():
    def on_rank(rank, rows=20):
        x = torch.ones(rows, 64)
        return gathered(x, Cast("mxfp8_e4m3"), place_on(rank, 2, ROWS), True, None, operand="gradient")[1].by_codes

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            # Who makes it an error gets one at each call.
            assert all(isinstance(error, UserWarning) for error in threaded.errors(2, on_rank))
    with pytest.warns(UserWarning, match=r"gradient.*high precision.*axis 0 of \[40, 64\] is cut at 20, inside a block of 32"):
        assert threaded.run(2, on_rank) == [False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threaded.run(2, on_rank)
        # Nor of another length.
        threaded.run(2, on_rank, 24)


def test_a_part_of_the_wrong_shape_is_refused_on_every_rank():
    def on_rank(rank):
        operand_plan((7, 8), Cast("mxfp8_e4m3"), TensorParallelShard("", 2, rank, ROWS, length=10))

    for error in threaded.errors(2, on_rank):
        assert isinstance(error, ValueError)
        assert "must hold 5 x 8" in str(error)
