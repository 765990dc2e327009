"""`linear` over a tensor-parallel group: the operands of every product are those of one process, bit for bit."""

import copy
import threading

import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.linear.parallel import Parallel
from blockfp.torch_backend.modules.cutting import part_of
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
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.placement import Mesh, Shard, Sharding

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
