"""Layers with delayed scaling that read one input share its casts, and compute what they would compute by themselves.

Each model is trained twice (`joint_models`): as a class whose layers may share casts, and as one of which nothing is known.
"""

import copy
import gc
import pickle
import weakref
from unittest import mock

import emulated_cuda
import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.linear.joint import Joint
from counted_casts import casts_of
from joint_models import EACH, JOINTLY, adamw, by_hand, made, step, steps
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp

# Each takes a model and returns what there is to compare, and a model whose casts are counted at the end.


def many(model):
    return steps(model, adamw(model), 5), model


def by_torch(model):
    return steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2)), model


def accumulated(model):
    return steps(model, adamw(model), batches=3), model


def evaluated(model):
    optimizer, found = adamw(model), []
    for seed in range(3):
        with torch.no_grad():
            found.append(model.eval()(values((4, 32), 90)))
            # One layer's call that records nothing.
            found.append(model.attention.q(values((4, 32), 91)))
        with torch.inference_mode():
            found.append(model(values((4, 32), 92)).clone())
        found += [step(model.train(), optimizer, seed), model(values((4, 32), 93)).detach()]
    return found, model


def recomputed(model, **options):
    run = lambda x: checkpoint(model, x, **options)  # noqa: E731
    return steps(model, adamw(model), run=run), model


def recomputed_inside(model):
    attention, own = model.attention, type(model.attention).forward

    def run(x):
        y = x + model.out(nn.functional.tanh(checkpoint(lambda x: own(attention, x), x * 1.5, use_reentrant=False)))
        return y + checkpoint(model.mlp, y, use_reentrant=False)

    return steps(model, adamw(model), run=run), model


def copied(model):
    found = steps(model, adamw(model))
    again = copy.deepcopy(model)
    return [found, steps(again, adamw(again), first=2), steps(model, adamw(model), first=4)], again


def loaded(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    kept = copy.deepcopy(model.state_dict())
    found += steps(model, optimizer, first=2)
    model.load_state_dict(kept)
    return [found, steps(model, optimizer, first=4)], model


def moved(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    model.to(torch.bfloat16).to(torch.float32)
    return [found, steps(model, optimizer, first=2)], model


def failed(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    with mock.patch.object(type(model.mlp.down), "multiply", side_effect=MemoryError), pytest.raises(MemoryError):
        model.mlp.down(values((4, 64), 0))
    with pytest.raises(ValueError, match="must share in"):
        model(values((4, 16), 0))
    return [found, steps(model, optimizer, first=2)], model


def changed(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    bfp.set_recipe(model, optimizer, "fp8_current")
    found += steps(model, optimizer, first=2)
    bfp.set_recipe(model, optimizer, "fp8_delayed")
    return [found, steps(model, optimizer, first=4)], model


SHARE = (many, accumulated, evaluated, copied, loaded, moved, failed, changed, recomputed_inside)


@pytest.mark.parametrize("case", SHARE, ids=lambda case: case.__name__)
def test_layers_that_share_casts_have_the_bits_of_each(case):
    (found, model), (wanted, other) = (case(made(shares=shares)) for shares in (True, False))
    assert_equal(found, wanted)
    assert casts_of(model, values((4, 32), 0))[0] == JOINTLY
    assert casts_of(other, values((4, 32), 0))[0] == EACH


@pytest.mark.parametrize("case", [many, by_torch, by_hand, loaded], ids=lambda case: case.__name__)
def test_weights_that_are_cast_at_use(case):
    (found, model), (wanted, _) = (case(made(shares=shares, weights="high_precision")) for shares in (True, False))
    assert_equal(found, wanted)
    assert model.attention.q.joint is not None
    assert model.attention.q.joint.compare()


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}, {"context_fn": bfp.keep_products}])
def test_under_checkpointing(options):
    options = {"use_reentrant": False} | options
    (found, model), (wanted, _) = (recomputed(made(shares=shares), **options) for shares in (True, False))
    assert_equal(found, wanted)
    assert casts_of(model, values((4, 32), 0))[0] == JOINTLY


@pytest.mark.parametrize("case", [accumulated, evaluated], ids=lambda case: case.__name__)
def test_on_the_cuda_path(case):
    """Its kernels record and update without torch's knowledge."""
    found = []
    for shares in (True, False):
        model = made(shares=shares)
        with emulated_cuda.launches():
            found.append(case(model)[0])
    assert_equal(*found)


def test_on_the_cuda_path_nothing_is_compared_twice():
    """A comparison waits for the GPU."""
    model = made(shares=True)
    optimizer = adamw(model)
    with emulated_cuda.launches():
        step(model, optimizer)
        with mock.patch.object(torch, "equal", side_effect=AssertionError("waits")):
            for seed in range(2):
                step(model, optimizer, seed, batches=2)
            model(values((4, 32), 0))
    assert isinstance(model.attention.q.joint, Joint)
    assert model.attention.q.joint is model.attention.v.joint


def test_what_compiled_code_records_is_not_taken_for_equal():
    """Compiled code of all layers, and of one of them, between eager calls."""
    found = []
    for compiles in (True, False):
        model = made(shares=True).attention
        every, one = (torch.compile(part, backend="eager") if compiles else part for part in (model, model.q))
        optimizer = adamw(model)
        found.append(steps(model, optimizer, 1, run=every))
        found[-1] += steps(model, optimizer, first=1)
        # That this was compiled before doesn't matter.
        assert model.q.joint is not None
        found[-1] += steps(model, optimizer, first=3, run=every)
        assert compiles is (model.q.joint is None)
        one(values((4, 32), 0, scale=2.0**20)).sum().backward()
        found[-1] += steps(model, optimizer, first=5)
    assert_equal(*found)


def sharded(rank, shares, weights):
    model = made(shares=shares, weights=weights)
    for part in (model.mlp, model.attention, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    optimizer, found = adamw(model), []
    for seed in range(3):
        for batch in range(2):
            y = model(values((4, 32), seed * 4 + batch * 2 + rank, scale=2.0 ** (seed + 3 * rank)))
            y.square().mean().backward()
            found.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append([buffer.clone() for buffer in model.buffers()])
    if shares:
        assert model.attention.q.joint is not None
        assert model.attention.q.joint.compare()
    return found


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_ranks_of_fsdp(weights):
    ours, theirs = (threaded.run(2, sharded, shares, weights) for shares in (True, False))
    assert_equal(ours, theirs)


def test_a_checkpoint_has_each_layers_own_state():
    model = made(shares=True)
    steps(model, adamw(model))
    state = model.state_dict()
    names = [f"attention.{name}.input_{kind}" for name in "qkv" for kind in ("amax_history", "scale")]
    assert len({state[name].data_ptr() for name in names}) == len(names)
    again = pickle.loads(pickle.dumps(model))
    assert_equal(again.state_dict(), state)
    assert again.attention.q.joint is None
    assert casts_of(again, values((4, 32), 0))[0] == JOINTLY


def test_layers_that_share_are_freed():
    model = made(shares=True)
    model(values((4, 32), 0))
    alive = weakref.ref(model.attention.q)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
