"""Delayed scaling with an empty history: the first step is that of current scaling."""

import copy

import pytest
import threaded
import torch
from arrays import values
from delayed_models import one_backward, trained_by_others
from same_tensors import assert_equal
from torch import nn
from torch._dynamo.testing import CompileCounter

import blockfp.torch as bfp

KINDS = {
    "codes": lambda recipe: nn.Sequential(bfp.Linear(64, 96, recipe=recipe), bfp.Linear(96, 64, recipe=recipe)),
    "values": lambda recipe: bfp.Linear(64, 64, recipe=recipe, weights="high_precision"),
    "behind an activation": lambda recipe: bfp.LayerNormMLP(64, 96, recipe=recipe, activation="swiglu"),
    "behind a norm": lambda recipe: bfp.LayerNormLinear(64, 64, recipe=recipe, norm="rms_norm"),
}


def first_gradients(kind, recipe, compiled):
    with threaded.seeded(0):
        model = KINDS[kind](recipe)
    x = values((48, 64), 5, scale=30.0).requires_grad_()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    y = run(x)
    (y.square().mean() * 1e-6).backward()
    return model, [y, x.grad, *(one.grad for one in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_that_of_current_scaling(kind, compiled):
    torch._dynamo.reset()
    model, found = first_gradients(kind, "fp8_delayed", compiled)
    _, wanted = first_gradients(kind, "fp8_current", compiled)
    assert all(one.count_nonzero() > 0 for one in found)
    assert_equal(found, wanted)
    assert all(history[0] > 0 for name, history in model.named_buffers() if name.endswith("history"))
    # The second begins with scales, and records.
    bfp.update_scales(model)
    assert all(0 < scale != 1 for name, scale in model.named_buffers() if name.endswith("scale"))


def test_a_zero_gradient_gives_no_scale():
    """Behind weights of 0 (of an output projection, of LoRA) the first gradients are 0, and the next ones may be tiny."""
    first, last = bfp.Linear(32, 32, recipe="fp8_delayed"), nn.Linear(32, 32, bias=False)
    nn.init.zeros_(last.weight)
    model, current = nn.Sequential(first, last), copy.deepcopy(first)
    bfp.set_recipe(current, None, "fp8_current")
    optimizer = torch.optim.SGD(last.parameters(), lr=1.0)
    one_backward(model)
    optimizer.step()
    bfp.update_scales(model)
    assert first.gradient_scale == 0 < first.input_scale
    first.weight.grad = None
    for layer in (first, current):
        layer(values((4, 32), 3, scale=2.0)).backward(values((4, 32), 4, scale=1e-9))
    assert first.weight.grad.count_nonzero() > 0
    assert torch.equal(first.weight.grad, current.weight.grad)


def test_one_recompilation_when_scales_are_there():
    torch._dynamo.reset()
    model, optimizer, _ = trained_by_others()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for _ in range(4):
        compiled(values((4, 32), 3, scale=2.0)).square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 2


def grouped(recipe, counts, x):
    with threaded.seeded(0):
        layer = bfp.GroupedLinear(len(counts), 32, 16, recipe=recipe)
    y = layer(x, counts)
    (y * 1e-6).sum().backward()
    return layer, y


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_groups_share_the_first_scale(bad):
    """Groups of amax 3, 5 and 4: all are multiplied as the second is, which is that of a group of its own."""
    counts = [5, 0, 7, 4]
    x = values((16, 32), 1, scale=1.0)
    for rows, amax in zip(x.split(counts), (3.0, 1.0, 5.0, 4.0), strict=True):
        rows.mul_(0).add_(amax * 0.37)
        rows[:1, 0] = amax
    if bad is not None:
        x[-1, 3] = bad  # in the last group, whose amax counts as 0 then, or as before
    layer, y = grouped("fp8_delayed", counts, x)
    assert layer.input_amax_history[0] == 5
    # Rows that have the largest amax in each group: then current scaling, of groups, multiplies by the same.
    alike = x.clone()
    for rows in alike.split(counts):
        rows[:1, 1] = 5.0
    _, wanted = grouped("fp8_current", counts, alike)
    first = [0, 5, 12]
    same = [row for row in range(16) if row not in first and row < (12 if bad is not None else 16)]
    assert torch.equal(y[same], wanted[same])


def test_loaded_scales_are_taken_and_functional_calls_look_at_theirs():
    model, optimizer, backward = trained_by_others()
    fresh = copy.deepcopy(model)
    backward()
    optimizer.step()
    x = values((4, 32), 7, scale=1e-3)
    loaded = copy.deepcopy(fresh)
    loaded.load_state_dict(model.state_dict())
    assert loaded[0].has_scales
    assert torch.equal(loaded(x), model(x))
    untrained = {**dict(model.named_parameters()), **dict(fresh.named_buffers())}
    found = torch.func.functional_call(model, untrained, (x,))
    fresh.load_state_dict(
        {**fresh.state_dict(), **{name: one for name, one in model.state_dict().items() if "weight" in name or "bias" in name}}
    )
    assert not fresh[0].has_scales
    assert torch.equal(found, fresh(x))
    assert not torch.equal(found, model(x))
