"""Layers with delayed scaling that read one input share its casts, and compute what they would compute by themselves.

Each model is trained twice: as a class whose layers may share casts, and as one of which nothing is known.
"""

import contextlib
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
from blockfp.torch_backend.linear import joint
from blockfp.torch_backend.linear.joint import Joint
from blockfp.torch_backend.modules import known_classes
from blockfp.torch_backend.modules.layer_calls import sharing
from counted_casts import casts_of
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The classes of this file are those of a library that is known."""
    mlp = bfp.MLPParts(gate="gate", up="up", down="down", activation="silu")
    monkeypatch.setitem(known_classes.KNOWN, __name__, (bfp.SharedInput("q", "k", "v"), mlp))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x, memory=None):
        query = self.q(x)
        memory = x if memory is None else memory
        return query * self.k(memory) + self.v(memory)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp, self.out = attention(), mlp(), nn.Linear(32, 32)

    def forward(self, x, memory=None):
        x = x + self.out(nn.functional.tanh(self.attention(x * 1.5, memory)))
        return x + self.mlp(nn.functional.layer_norm(x, (32,)))


class UnknownAttention(Attention):
    def forward(self, x, memory=None):
        return Attention.forward(self, x, memory)


class UnknownMLP(MLP):
    def forward(self, x):
        return MLP.forward(self, x)


UnknownAttention.__module__ = UnknownMLP.__module__ = "elsewhere"

JOINTLY, EACH = 3, 7
"""Casts of a block's inputs: of those of (q, k, v), out, (gate, up), while the activation casts down's; and of each layer's."""


def made(*, shares, weights="quantized", recipe="fp8_delayed"):
    with threaded.seeded(0):
        model = Block(*((Attention, MLP) if shares else (UnknownAttention, UnknownMLP)))
    return bfp.convert(model, recipe, weights=weights)


def state_of(model):
    """All that a model and its checkpoint hold."""
    return copy.deepcopy([model.state_dict(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}])


def step(model, optimizer, seed=0, run=None, batches=1):
    """Returns outputs, gradients and state of a step."""
    found = []
    for batch in range(batches):
        x = values((4, 8, 32), 10 * seed + batch, scale=2.0 ** (seed % 5)).requires_grad_()
        y = (model if run is None else run)(x)
        y.square().mean().backward()
        found += [y.detach(), x.grad]
    found.append(state_of(model))
    optimizer.step()
    optimizer.zero_grad()
    return [*found, state_of(model)]


def steps(model, optimizer, count=2, first=0, **options):
    return [step(model, optimizer, seed, **options) for seed in range(first, first + count)]


def adamw(model):
    return bfp.AdamW(model.parameters(), lr=1e-2)


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


def every_parameter(model):
    for param in model.parameters():
        param -= 0.1 * param.grad


def by_hand(model, write=every_parameter):
    """Steps that no optimizer takes."""
    found = []
    for seed in range(4):
        y = model(values((4, 32), seed, scale=2.0**seed))
        y.square().mean().backward()
        found.append((y.detach(), state_of(model)))
        with torch.no_grad():
            write(model)
        model.zero_grad()
    return found, model


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


# ---- layers that part


def one_alone(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    model.attention.k(values((4, 32), 0, scale=2.0**20)).sum().backward()
    return [found, steps(model, optimizer, first=2)], model


def cross(model):
    memory = values((4, 8, 32), 99, scale=2.0**9)
    return steps(model, adamw(model), run=lambda x: model(x, memory)), model


def two_optimizers(model):
    q = list(model.attention.q.parameters())
    others = [param for param in model.parameters() if all(param is not one for one in q)]
    first, second = bfp.AdamW(q, lr=1e-2), bfp.AdamW(others, lr=1e-2)
    found = []
    for seed in range(2):
        found.append(step(model, first, seed))
        found.append(step(model, second, seed))
    return found, model


def one_loaded(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    model.attention.v.load_state_dict(model.attention.v.state_dict() | {"input_scale": torch.tensor(4.0)})
    return [found, steps(model, optimizer, first=2)], model


def one_loaded_before_the_step(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    model(values((4, 32), 0)).square().mean().backward()
    history = torch.full_like(model.attention.v.input_amax_history, 2.0**20)
    model.attention.v.load_state_dict(model.attention.v.state_dict() | {"input_amax_history": history})
    optimizer.step()
    optimizer.zero_grad()
    return [found, steps(model, optimizer, first=2)], model


def one_without_grad(model):
    """One of three layers records nothing."""
    optimizer, attention = adamw(model), model.attention
    found = steps(model, optimizer)
    x = values((4, 32), 9, scale=2.0**12)
    with sharing((attention.q, attention.k, attention.v)):
        query = attention.q(x)
        with torch.no_grad():
            key = attention.k(x)
        (query * key + attention.v(x)).sum().backward()
    return [found, steps(model, optimizer, first=2)], model


def one_reset(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    model.attention.q.reset_buffers()
    return [found, steps(model, optimizer, first=2)], model


def one_changed(model):
    optimizer = adamw(model)
    found = steps(model, optimizer)
    bfp.set_recipe(model, optimizer, {r"attention\.k": "fp8_current", ".*": None})
    found += steps(model, optimizer, first=2)
    bfp.set_recipe(model, optimizer, {r"attention\.k": "fp8_delayed", ".*": None})
    return [found, steps(model, optimizer, first=4)], model


def one_written(model):
    """One layer's weight is written by hand, which updates its scales alone."""

    def write(model):
        model.attention.k.weight -= 0.1 * model.attention.k.weight.grad

    return by_hand(model, write)


def functionally(model):
    """A call with other buffers."""
    optimizer = adamw(model)
    found = steps(model, optimizer)
    other = {"attention.v.input_scale": torch.tensor(2.0), "attention.v.input_amax_history": torch.ones(1024)}
    y = torch.func.functional_call(model, other, values((4, 32), 0, scale=2.0**8))
    return [found, y.detach(), other, steps(model, optimizer, first=2)], model


PART = (one_loaded, one_reset, one_changed, one_written, functionally)


# On a CPU each record is counted as a write, so that another comparison follows in any case.
ON_CUDA = (one_alone, cross, two_optimizers, one_without_grad, one_loaded_before_the_step)


@pytest.mark.parametrize(
    ("case", "cuda"),
    [*((case, False) for case in PART), *((case, True) for case in ON_CUDA)],
    ids=lambda value: getattr(value, "__name__", "cuda" if value else "cpu"),
)
def test_layers_that_part_go_on_by_themselves(case, cuda):
    found = []
    for shares in (True, False):
        model = made(shares=shares, weights="high_precision" if case is one_written else "quantized")
        with emulated_cuda.launches() if cuda else contextlib.nullcontext():
            found.append(case(model)[0])
            if shares:
                left = model.attention.q.joint
                assert left is None or not left.compare()
    assert_equal(*found)


def test_frozen_layers_stay_together():
    """An optimizer's step updates those whose weights it holds, and frozen ones."""
    found = []
    for shares in (True, False):
        model = made(shares=shares)
        model.attention.k.requires_grad_(False)
        optimizer = bfp.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        found.append(steps(model, optimizer, 4))
        # Of k no columnwise codes are wanted, which makes it another cast.
        assert casts_of(model, values((4, 32), 0))[0] == (JOINTLY + 1 if shares else EACH)
    assert_equal(*found)


# ---- compiled, on several ranks, and what is left of it


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


class Done:
    """An event of a GPU that has come."""

    def record(self):
        pass

    def query(self):
        return True


def test_what_nobody_could_notice_raises_later(monkeypatch):
    """On a GPU values aren't compared each time, and a write through `.data` changes no version."""
    monkeypatch.setattr(joint, "_is_gpu", lambda device: True)
    monkeypatch.setattr(joint, "_compared", {})
    monkeypatch.setattr(torch.cuda, "Event", Done)
    model = made(shares=True)
    optimizer = adamw(model)
    with emulated_cuda.launches():
        for seed in range(2):
            step(model, optimizer, seed)
        assert model.attention.q.joint.unchanged()
        model.attention.k.input_amax_history.data.fill_(2.0**20)
        step(model, optimizer, 3)
        with pytest.raises(RuntimeError, match=r"layers that read one input \(1 groups\) have different scales"):
            step(model, optimizer, 4)
        assert model.attention.q.joint is None
        assert model.mlp.gate.joint is not None
        step(model, optimizer, 5)
    assert casts_of(model, values((4, 32), 0))[0] == JOINTLY + 2


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
