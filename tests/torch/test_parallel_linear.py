"""`linear` over a tensor-parallel group: operands of one process, bit for bit, and sums over the ranks."""

import copy
import threading

import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.linear.tensor_parallel import outputs
from blockfp.torch_backend.linear.tensor_parallel.parallel import Parallel
from blockfp.torch_backend.modules.cutting import part_of
from blockfp.torch_backend.sharded.rank_plan import ROWS, TensorParallelShard
from parallel_operands import (
    ALL,
    RANKS,
    SHAPES,
    STYLE_NAMES,
    STYLES,
    assert_shared,
    one_process,
    part,
    record_products,
    state_of,
    tensors,
    trained,
)
from samples import sample
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.reducing import check_reduce_format

BY_STYLE = pytest.mark.parametrize(("style", "sequence"), STYLES, ids=STYLE_NAMES)


@pytest.fixture
def seen(monkeypatch):
    return record_products(monkeypatch)


def on_rank(rank, style, sequence, shape, recipe, dtype=torch.float32):
    """Results of one rank."""
    x, w, b, g = tensors(shape, 0, dtype)
    column, weight = style == "column", w
    features = shape[2] if column else shape[1]
    parallel = Parallel(dist.group.WORLD.group_name, RANKS, rank, style, features, sequence)
    if recipe.weight.format is None:
        weight = part(w, 0 if column else 1, rank)
    else:
        lies = Sharding(tuple(w.shape), Mesh((RANKS,), ("tp",)), (Shard(0 if column else 1),))
        weight = part_of(bfp.quantize(w, recipe.weight.format), lies, rank)
    state = state_of()
    x = part(x, (0 if sequence else None) if column else 1, rank)
    g = part(g, 1 if column else (0 if sequence else None), rank)
    results = trained(x, weight, part(b, 0, rank) if column else b, g, recipe, state, parallel)
    return results, threading.get_ident(), state


@pytest.mark.filterwarnings("ignore:all-gather of the")
@BY_STYLE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_every_operand_is_that_of_one_process(name, shape, style, sequence, seen):
    recipe = recipes.for_linear(ALL[name])
    results, products, state = one_process(shape, recipe, seen)
    world = threaded.run(RANKS, on_rank, style, sequence, shape, recipe)
    for rank, (got, thread, its_state) in enumerate(world):
        assert_shared(got, seen[thread], results, products, style, sequence, rank)
        if recipe.delayed is not None:
            assert state.input_amax_history[0] >= its_state.input_amax_history[0] > 0
    if recipe.delayed is not None:
        for history in ("input_amax_history", "gradient_amax_history"):
            assert max(getattr(its, history)[0] for _, _, its in world) == getattr(state, history)[0]


@BY_STYLE
def test_overflow_on_one_rank_reaches_the_gradients_of_all(style, sequence):
    """FP8 saturates an Inf of a float16 gradient, which the loss scaler of every rank is to see."""

    def on_rank(rank):
        layer = bfp.parallelize(copy.deepcopy(whole), init_device_mesh("cpu", (2,)), style, sequence_parallel=sequence)
        x = part(torch.ones(256, 64).half(), 1 if style == "row" else (0 if sequence else None), rank).requires_grad_()
        g = torch.ones(256, 64).half()
        g[3, 5] = torch.inf
        layer(x).backward(part(g, 1 if style == "column" else (0 if sequence else None), rank))
        return not x.grad.isfinite().any() and not layer.weight.grad.to_local().isfinite().any()

    whole = bfp.Linear(64, 64, bias=False, recipe="fp8_block", dtype=torch.float16)
    assert all(threaded.run(2, on_rank))


def test_keeping_products_leaves_no_collective_unwaited():
    """The backward gathers again what the forward did, and gets what was summed from the forward."""
    unwaited = torch._C._distributed_c10d._get_work_registry_size

    def on_rank(rank):
        mlp = bfp.parallelize(copy.deepcopy(whole), init_device_mesh("cpu", (2,)), sequence_parallel=True)
        x, before = torch.randn(2, 64, 64, requires_grad=True), unwaited()
        checkpoint(mlp, x, use_reentrant=False, context_fn=bfp.keep_products).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(mlp(x).sum(), x)[0])
        dist.barrier()
        return unwaited() - before

    whole = bfp.LayerNormMLP(64, 96, recipe="mxfp8")
    assert threaded.run(2, on_rank) == [0, 0]


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("style", ["column", "row"])
def test_nothing_is_shared_too(style, recipe):
    """No sequences, or none that has a token."""

    def on_rank(rank):
        for shape in ((0, 32), (2, 0), (0,)):
            for reduce_format in (None, "mxfp8_e5m2"):
                layer = bfp.parallelize(
                    copy.deepcopy(whole), init_device_mesh("cpu", (2,)), style, sequence_parallel=True,
                    reduce_format=reduce_format,
                )  # fmt: skip
                x = torch.empty(*shape, 64 if style == "column" else 32, requires_grad=True)
                y = layer(x)
                y.sum().backward()
                tokens = shape[-1] * 2 if style == "column" else shape[-1] // 2
                assert y.shape == (*shape[:-1], tokens, 32 if style == "column" else 64)
                assert x.grad.shape == x.shape
                assert not layer.weight.grad.to_local().any()

    whole = bfp.Linear(64, 64, recipe=recipe)
    threaded.run(2, on_rank)


@pytest.mark.filterwarnings("ignore:all-gather of the")
def test_a_rank_may_have_no_expert_or_no_feature():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (4,))
        grouped, row = (copy.deepcopy(layer) for layer in (experts, wide))
        bfp.parallelize(grouped, mesh, "experts")
        own = counts[2 * rank : 2 * rank + 2]
        first = sum(counts[: 2 * rank])
        x = rows[first : first + sum(own)].clone().requires_grad_()
        y = grouped(x, own)
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert grouped.weight.grad.to_local().shape == (len(own), 64, 32)
        assert torch.equal(y, experts(rows, counts)[first : first + sum(own)])
        bfp.parallelize(row, mesh, "row", sequence_parallel=True)
        x = rows[:8, 3 * rank : min(3 * rank + 3, 9)].clone().requires_grad_()
        y = row(x)
        y.sum().backward()
        assert x.grad.shape == x.shape
        torch.testing.assert_close(y, wide(rows[:8, :9])[2 * rank : 2 * rank + 2])

    counts, rows = [3, 1, 0, 4, 2], torch.randn(10, 32)
    experts, wide = bfp.GroupedLinear(5, 32, 64, recipe="mxfp8"), bfp.Linear(9, 64, recipe="mxfp8")
    threaded.run(4, on_rank)


@pytest.mark.parametrize("style", ["column", "row"])
def test_tokens_before_batches(style):
    """[tokens, batch, features] as DTensors: a token is several rows."""
    x, whole = torch.randn(32, 3, 64), bfp.Linear(64, 64, recipe="fp8_current")

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        layer = bfp.parallelize(copy.deepcopy(whole), mesh, style, sequence_parallel=True, sequence_dim=0)
        y = layer(dtensor.distribute_tensor(x, mesh, [dtensor.Shard(0 if style == "column" else 2)], src_data_rank=None))
        torch.testing.assert_close(y.full_tensor(), whole(x))
        with pytest.raises(ValueError, match=r"5 tokens on axis 0, which 2 ranks don't divide: pad them$"):
            layer(dtensor.distribute_tensor(x[:5], mesh, [dtensor.Replicate()], src_data_rank=None))

    threaded.run(2, on_rank)


def test_plain_rows_give_all_ranks_as_many_tokens():
    """The next column could not gather them."""

    def on_rank(rank):
        layer = bfp.Linear(64, 64, recipe="mxfp8")
        bfp.parallelize(layer, init_device_mesh("cpu", (2,)), "row", sequence_parallel=True)
        layer(torch.ones(1, 5, 32))

    for error in threaded.errors(2, on_rank):
        assert "5 tokens on axis 1, which 2 ranks don't divide: pad them, or pass a DTensor" in str(error)


@pytest.mark.filterwarnings("error")
@threaded.on(1)
def test_one_rank_has_all_sequences_whole(rank):
    """No cut, none inside a block."""
    layer = bfp.Linear(64, 64, recipe="mxfp8")
    bfp.parallelize(layer, init_device_mesh("cpu", (1,)), "column", sequence_parallel=True)
    assert layer(torch.ones(3, 20, 64, requires_grad=True)).shape == (3, 20, 64)


def terms(ranks, rows, columns):
    """Each rank's terms of y: integers, whose sums are exact in any order."""
    return [torch.from_numpy(sample("integers", (rows, columns), seed=rank)).bfloat16() // 8 for rank in range(ranks)]


def scattered(rank, ranks, rows, columns, runs, format):
    place = TensorParallelShard(dist.group.WORLD.group_name, ranks, rank, ROWS, runs=runs)
    format = None if format is None else check_reduce_format(format)
    pending = outputs.begin(terms(ranks, rows, columns)[rank], place, format)
    return outputs.finish(pending, place, columns, torch.bfloat16, format)


def rows_of(y, rank, ranks, runs):
    return torch.cat(
        [sequence[rank * -(-len(sequence) // ranks) :][: -(-len(sequence) // ranks)] for sequence in y.chunk(runs)]
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("rows", "runs"), [(12, 1), (7, 1), (24, 2), (3, 1)])
def test_each_rank_gets_its_rows_of_the_sum(ranks, rows, runs):
    whole = sum(y.float() for y in terms(ranks, rows, 48)).bfloat16()
    for rank, got in enumerate(threaded.run(ranks, scattered, ranks, rows, 48, runs, None)):
        assert torch.equal(got, rows_of(whole, rank, ranks, runs))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp6_e3m2", "mxfp4_e2m1"])
@pytest.mark.parametrize(("rows", "runs"), [(12, 1), (7, 1), (24, 2)])
def test_quantized_terms_are_added_in_the_order_of_the_ranks(format, rows, runs):
    ranks = 3
    whole = torch.zeros(rows, 144)
    for y in terms(ranks, rows, 144):
        whole = whole + bfp.quantize(y, format).dequantize(torch.float32)
    for rank, got in enumerate(threaded.run(ranks, scattered, ranks, rows, 144, runs, format)):
        assert torch.equal(got, rows_of(whole.bfloat16(), rank, ranks, runs))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "mxint8"])
def test_an_overflow_reaches_the_sum(format):
    """Also of formats that saturate Inf."""
    y = torch.ones(4, 144, dtype=torch.float16)
    y[3, 5] = torch.inf

    def on_rank(rank):
        place, parsed = TensorParallelShard(dist.group.WORLD.group_name, 2, rank, ROWS), check_reduce_format(format)
        return outputs.finish(outputs.begin(y, place, parsed), place, 144, torch.float16, parsed)

    assert [bool(got.isfinite().all()) for got in threaded.run(2, on_rank)] == [True, False]


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4"])
def test_formats_whose_rows_share_a_scale_are_refused(format):
    with pytest.raises(ValueError, match=f"reduce_format {format}: rows that go to different ranks"):
        check_reduce_format(format)


def test_the_sum_on_every_rank():
    whole = sum(y.float() for y in terms(3, 5, 8)).bfloat16()
    for got in threaded.run(3, lambda rank: outputs.all_reduce(terms(3, 5, 8)[rank], dist.group.WORLD.group_name)):
        assert torch.equal(got, whole)
