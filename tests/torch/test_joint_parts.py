"""Layers that shared casts and go on by themselves, once their scales or amaxes may differ (`joint_models`)."""

import contextlib

import emulated_cuda
import pytest
import torch
from arrays import values
from blockfp.torch_backend.linear import joint
from blockfp.torch_backend.modules.layer_calls import sharing
from counted_casts import casts_of
from joint_models import EACH, JOINTLY, adamw, by_hand, made, step, steps
from same_tensors import assert_equal

import blockfp.torch as bfp


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
