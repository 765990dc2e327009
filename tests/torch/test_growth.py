"""What is worked out once and kept: bounded, and no more of it after any number of steps with changing lengths."""

import gc
import sys

import pytest
import torch
from blockfp.torch_backend.custom_ops import quantize_plans
from torch import nn

import blockfp.torch as bfp
from blockfp.formats import FORMATS
from blockfp.kernels import switch

LENGTHS = (1, 16, 5, 128, 33, 130)
ROUNDS = 4


def entries():
    """How many entries each cache of blockfp holds: of functools, and dictionaries of modules."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("blockfp"):
            continue
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "cache_info"):
                found[f"{value.__module__}.{value.__name__}"] = value.cache_info().currsize
            elif type(value) is dict and attribute.startswith("_") and not attribute.startswith("__"):
                found[f"{name}.{attribute}"] = len(value)
    return found


def model_and_optimizer(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    bfp.convert(model, recipe)
    return model, bfp.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, length):
    x = torch.randn(length, 64, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_lengths_that_come_again_leave_nothing_behind(recipe):
    model, optimizer = model_and_optimizer(recipe)
    # What there was before is not looked through again in each round.
    gc.collect()
    gc.freeze()
    counts, objects = [], []
    for _ in range(ROUNDS):
        for length in LENGTHS:
            step(model, optimizer, length)
        gc.collect()
        counts.append(entries())
        objects.append(len(gc.get_objects()))
    assert counts[-1] == counts[1]
    assert sum(counts[-1].values()) > len(LENGTHS)
    # What the counting itself keeps, and no entry for each step.
    assert objects[-1] - objects[1] < len(LENGTHS)


def test_plans_are_bounded(monkeypatch):
    """However many lengths come: one more than are kept drops all."""
    most = 8
    monkeypatch.setattr(switch, "MOST", most)
    # Plans that other tests have left.
    for plans in _plans():
        plans.clear()
    model, optimizer = model_and_optimizer("mxfp8")
    seen = 0
    for length in range(1, 40):
        step(model, optimizer, length)
        sizes = [len(plans) for plans in _plans()]
        seen = max(seen, *sizes)
        assert max(sizes) <= most
    assert seen == most


def _plans():
    """The dictionaries of plans: those that lengths are part of the keys of."""
    from blockfp.torch_backend.custom_ops import linear_ops
    from blockfp.torch_backend.linear import linear

    return [quantize_plans._plans, linear_ops._forwards, linear_ops._backwards, linear._calls]


def test_every_cache_is_bounded():
    """Or is one of answers about formats, dtypes and this machine, of which there are so many and no more."""
    unbounded = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("blockfp"):
            for value in vars(module).values():
                if hasattr(value, "cache_parameters") and value.cache_parameters()["maxsize"] is None:
                    unbounded.add(value)
    for value in unbounded:
        assert value.cache_info().currsize <= 8 * len(FORMATS), value.__qualname__
