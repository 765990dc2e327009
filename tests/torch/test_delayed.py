"""Delayed scaling: histories, scales and their update, by hand and by optimizers."""

import copy
import gc

import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.linear import delayed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import scaling
from blockfp.formats import Format


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
def test_scales_follow_the_definition(length, algorithm):
    layer = bfp.Linear(32, 16, recipe=recipes.fp8_delayed(history=length, margin=1, algorithm=algorithm))
    history, scale = torch.zeros(length), torch.ones(())
    for seed, factor in enumerate((1.0, 100.0, 3.0, 1e-3, 0.0)):
        for part in range(2):
            x = values((4, 32), 10 * seed + part, scale=factor)
            layer(x).sum().backward()
            history = scaling.record(history, x.abs().max())
        assert torch.equal(layer.input_amax_history, history)
        bfp.update_scales(layer)
        element = Format.parse("fp8_e4m3").element
        history, scale = scaling.update(history, scale, element, margin=1, algorithm=algorithm)
        assert torch.equal(layer.input_amax_history, history)
        assert torch.equal(layer.input_scale, scale)
        # The gradient of a sum is one.
        assert layer.gradient_scale == 57344 / 2


def test_what_is_not_finite_counts_as_nothing():
    layer = bfp.Linear(32, 16, recipe="fp8_delayed")
    x = values((4, 32), 0, scale=1.0)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    layer(x)
    assert layer.input_amax_history[0] == 0
    bfp.update_scales(layer)
    assert layer.input_scale == 1


def test_what_is_written_lies_like_the_buffers(monkeypatch):
    # Else torch copies one buffer after the other: a launch for each.
    pairs = []
    monkeypatch.setattr(delayed, "foreach_copy_", lambda into, values: pairs.extend(zip(into, values, strict=True)))
    bfp.update_scales(two_layers())
    assert len(pairs) == 8
    assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in pairs)


def test_models_without_delayed_scaling_are_left_alone():
    bfp.update_scales(nn.Sequential(bfp.Linear(32, 16, recipe="mxfp8"), nn.GELU()))


def two_layers():
    with threaded.seeded(0):
        return nn.Sequential(bfp.Linear(32, 24, recipe="fp8_delayed"), bfp.Linear(24, 16, recipe="fp8_delayed"))


# ---- without a call


def trained_by_others(name="fp8_delayed"):
    """A model, torch's own optimizer of it, and what makes its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        bfp.Linear(32, 24, recipe=name, weights="high_precision"), bfp.Linear(24, 16, recipe=name, weights="high_precision")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lambda: one_backward(model)


def one_backward(model, loss_scale=1.0):
    (model(values((4, 32), 3, scale=2.0)).square().mean() * loss_scale).backward()


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


def test_a_hook_is_a_call_after_each_step():
    model, optimizer, backward = trained_by_others()
    other, other_optimizer, other_backward = trained_by_others()
    handle = bfp.update_scales_after(optimizer, model)
    for _ in range(3):
        backward()
        optimizer.step()
        bfp.update_scales(model)  # left alone: no second time
        optimizer.zero_grad()
        other_backward()
        other_optimizer.step()
        bfp.update_scales(other)
        other_optimizer.zero_grad()
    assert model[0].gradient_scale > 1
    for a, b in zip(buffers_of(model), buffers_of(other), strict=True):
        assert torch.equal(a, b)
    handle.remove()
    for _ in range(2):
        backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if _ == 0:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"2 layers that it trains .* use bfp.AdamW"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("optimizer_class", [bfp.AdamW, bfp.Adam])
def test_our_optimizers_update_scales(optimizer_class):
    model = two_layers()
    for called in (False, True, "before"):
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = optimizer_class(one.parameters(), lr=1e-3)
        layers = [recorded(layer) for layer in other]
        for _ in range(3):
            # Accumulated: both microbatches count as one step.
            for scale in (1e-6, 3e-6):
                one_backward(one, scale)
            histories = [layer.input_amax_history.clone() for layer in one]
            if called == "before":
                bfp.update_scales(one)
            optimizer.step()
            if called is True:
                bfp.update_scales(one)
            optimizer.zero_grad()
            for i, (history, (kept, scale)) in enumerate(zip(histories, layers, strict=True)):
                kept[0] = history[0]
                layers[i] = scaling.update(kept, scale, Format.parse("fp8_e4m3").element, margin=0, algorithm="max")
                assert torch.equal(one[i].input_amax_history, layers[i][0])
                assert torch.equal(one[i].input_scale, layers[i][1])
        assert all(layer.gradient_scale > 1e6 for layer in one)
        assert one[0].weight.grad is None


def recorded(layer):
    return layer.input_amax_history.clone(), layer.input_scale.clone()


def test_gradients_of_a_small_loss_are_seen_in_the_second_step():
    """With a scale of 1 all of them would be zero for ever."""
    layer = bfp.Linear(32, 16, recipe="fp8_delayed")
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-3)
    for step in range(2):
        (layer(values((4, 32), 0, scale=1.0)) * 1e-6).square().mean().backward()
        assert (layer.weight.grad.abs().max() > 0) == (step > 0)
        optimizer.step()
        optimizer.zero_grad()


def test_what_does_not_count_as_stale():
    """Accumulation, evaluation, recomputed forwards, steps of other models, and the step in which states are made."""
    model, optimizer, backward = trained_by_others()
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    for _ in range(4):
        backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(values((4, 32), 1, scale=1.0))
    optimizer.zero_grad()
    optimizer.step()  # no gradient
    elsewhere = nn.Linear(2, 2)
    unrelated = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    for _ in range(3):
        elsewhere(torch.ones(2)).sum().backward()
        unrelated.step()
    checkpoint(model, values((4, 32), 1, scale=1.0).requires_grad_(), use_reentrant=False).sum().backward()
    bfp.update_scales(model)
    optimizer.step()
    backward()
    with pytest.raises(RuntimeError, match="another step"):
        optimizer.step()


def by_data(parameter, gradient):
    parameter.data.add_(gradient, alpha=-0.1)  # fastai's


def in_place(parameter, gradient):
    with torch.no_grad():
        parameter -= 0.1 * gradient


def at_once(parameter, gradient):
    torch._foreach_add_([parameter.data], [gradient], alpha=-0.1)  # Keras'


def replaced(parameter, gradient):
    new = parameter.data.clone()
    parameter.data = new.copy_(parameter.data - 0.1 * gradient)


@pytest.mark.parametrize("write", [by_data, in_place, at_once, replaced])
def test_steps_of_others_than_torchs_optimizers_are_followed_up_or_refused(write):
    model, _, backward = trained_by_others()

    def step():
        backward()
        backward()  # accumulated
        for parameter in model.parameters():
            write(parameter, parameter.grad)
            parameter.grad.zero_()

    for _ in range(3):
        step()
        bfp.update_scales(model)
    assert model[0].gradient_scale > 1
    for _ in range(2):
        step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call bfp.update_scales\(model\) after each step"):
            backward()
    with torch.no_grad():
        model(values((4, 32), 3, scale=2.0))
    bfp.update_scales(model)
    step()


def test_what_writes_weights_and_is_no_step():
    """Loads, differences, weights that are drawn anew, and what an optimizer of torch does in its step."""
    model, _, backward = trained_by_others()
    state = copy.deepcopy(model.state_dict())
    for _ in range(3):
        backward()
        model.load_state_dict(state)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight += 1e-3
        model(values((4, 32), 3, scale=2.0))
    average = copy.deepcopy(model)
    for _ in range(3):
        average(values((4, 32), 3, scale=2.0))
        average[0].weight.data.lerp_(model[0].weight.data, 0.5)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6)

    def closure():
        optimizer.zero_grad()
        loss = model(values((4, 32), 3, scale=2.0)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        model[0].weight.data.mul_(0.9)
        optimizer.step(closure)
        bfp.update_scales(model)


def test_updates_within_closures_count():
    model, optimizer, backward = trained_by_others()

    def closure():
        optimizer.zero_grad()
        bfp.update_scales(model)
        backward()

    for _ in range(3):
        optimizer.step(closure)
    with pytest.raises(RuntimeError, match="another step"):
        optimizer.step(backward)


def test_frozen_layers_need_a_keeper():
    """Adapters beside frozen layers: no optimizer holds the weights whose inputs and gradients are cast."""
    layer, adapter = bfp.Linear(32, 32, recipe="fp8_delayed").requires_grad_(False), nn.Linear(32, 32)
    optimizer = bfp.AdamW(adapter.parameters(), lr=1e-3)
    model = nn.Sequential(adapter, layer)
    one_backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="1 frozen layers"):
        optimizer.step()
    handle = bfp.update_scales_after(optimizer, model)
    for _ in range(3):
        one_backward(model)
        optimizer.step()
    assert layer.gradient_scale > 1
    handle.remove()


def test_a_model_that_nobody_has_any_more_refuses_no_step_of_another():
    """Its layers wait for the garbage collector where the model refers to itself, with the amaxes of a last evaluation."""

    def tuned():
        layer, adapter = bfp.Linear(32, 32, recipe="fp8_delayed").requires_grad_(False), nn.Linear(32, 32)
        model = nn.Sequential(adapter, layer)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=1e-3)
        bfp.update_scales_after(optimizer, model)
        for _ in range(3):
            one_backward(model)
            optimizer.step()
        model(torch.ones(4, 32))
        vars(layer)["within"] = model

    gc.disable()
    try:
        for _ in range(2):
            tuned()
    finally:
        gc.enable()


@pytest.mark.parametrize("optimizer", [bfp.AdamW, torch.optim.AdamW])
def test_an_optimizer_that_is_loaded_after_the_model_leaves_the_histories(optimizer):
    """As Composer and accelerate do: torch makes a new optimizer's state by a step whose learning rate is 0."""

    def made(seed):
        torch.manual_seed(seed)
        model = bfp.convert(nn.Sequential(nn.Linear(32, 32)), "fp8_delayed", weights="high_precision")
        found = optimizer(model.parameters(), lr=1e-3)
        if optimizer is not bfp.AdamW:
            bfp.update_scales_after(found, model)
        return model, found

    model, first = made(0)
    for _ in range(3):
        one_backward(model)
        first.step()
        first.zero_grad()
    again, second = made(1)
    again.load_state_dict(model.state_dict())
    set_optimizer_state_dict(again, second, get_optimizer_state_dict(model, first))
    assert all(torch.equal(one, other) for one, other in zip(buffers_of(again), buffers_of(model), strict=True))
    # A step of a warm-up that begins at 0 has a forward, and counts.
    second.param_groups[0]["lr"] = 0.0
    one_backward(again)
    second.step()
    assert [layer.input_amax_history.count_nonzero() for layer in (model[0], again[0])] == [3, 4]


def test_an_average_that_takes_the_models_own_buffers():
    """As ignite's EMAHandler does: what the model records stands in both, and is the model's."""
    model = bfp.convert(nn.Sequential(nn.Linear(32, 32)), "fp8_delayed", weights="high_precision")
    optimizer, average = bfp.AdamW(model.parameters(), lr=1e-3), copy.deepcopy(model).requires_grad_(False)
    for _ in range(3):
        one_backward(model)
        optimizer.step()
        for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
            mine.data = theirs.data
    assert average[0].input_scale == model[0].input_scale != 1


def test_bad_arguments_of_the_hook():
    model, optimizer, _ = trained_by_others()
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Sequential"):
        bfp.update_scales_after(model, model)
    with pytest.raises(TypeError, match="model must be"):
        bfp.update_scales_after(optimizer, optimizer)
    with pytest.raises(ValueError, match="no layer of model"):
        bfp.update_scales_after(optimizer, bfp.Linear(32, 16, recipe="mxfp8"))


@pytest.mark.parametrize("optimizer", [bfp.AdamW, torch.optim.SGD])
def test_a_model_that_is_frozen_while_another_is_trained_may_be_trained_next(optimizer):
    """As a GAN's two are: what was frozen during steps of the other optimizer recorded nothing, and nothing is stale."""
    one, other = (bfp.convert(nn.Sequential(nn.Linear(8, 8)), "fp8_delayed", weights="high_precision") for _ in range(2))
    steps = []
    for model in (one, other):
        steps.append(optimizer(model.parameters(), lr=0.1))
        if optimizer is torch.optim.SGD:
            bfp.update_scales_after(steps[-1], model) if model is one else None
    other.requires_grad_(False)
    for _ in range(3):
        one(torch.ones(2, 8)).sum().backward()
        steps[0].step()
    other.requires_grad_(True)
    other(torch.ones(2, 8)).sum().backward()
    steps[1].step()
