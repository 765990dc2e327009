"""Delayed scaling: histories, scales and their update, by hand and by optimizers."""

import copy

import pytest
import torch
from arrays import values
from blockfp.torch_backend.linear import delayed
from delayed_models import one_backward, trained_by_others, two_layers
from same_tensors import assert_equal
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
    assert layer.input_scale == 0


def test_what_is_written_lies_like_the_buffers(monkeypatch):
    # Else torch copies one buffer after the other: a launch for each.
    pairs = []
    monkeypatch.setattr(delayed, "foreach_copy_", lambda into, values: pairs.extend(zip(into, values, strict=True)))
    bfp.update_scales(two_layers())
    assert len(pairs) == 8
    assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in pairs)


def test_models_without_delayed_scaling_are_left_alone():
    bfp.update_scales(nn.Sequential(bfp.Linear(32, 16, recipe="mxfp8"), nn.GELU()))


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


def moved(history, scale, element):
    """What the definition makes of a history and a scale in a step."""
    return scaling.update(history, scale, Format.parse(element).element, margin=0, algorithm="max")


def recorded(layer):
    """Histories and scales of a layer, of its input and gradient."""
    return [
        (layer.input_amax_history.clone(), layer.input_scale.clone(), "fp8_e4m3"),
        (layer.gradient_amax_history.clone(), layer.gradient_scale.clone(), "fp8_e5m2"),
    ]


def assert_moved(layers, before):
    """The layers' state is what each history, which had all amaxes of the step, becomes by the definition."""
    for layer, each in zip(layers, before, strict=True):
        for (history, scale, element), (now, scale_now, _) in zip(each, recorded(layer), strict=True):
            wanted = moved(history, scale, element)
            assert history[0] > 0
            assert torch.equal(now, wanted[0])
            assert torch.equal(scale_now, wanted[1])


@pytest.mark.parametrize("called", ["never", "before", "after", "by a hook"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, bfp.AdamW, bfp.Adam])
def test_every_optimizer_updates_scales(kind, called):
    model = trained_by_others()[0]
    optimizer = kind(model.parameters(), lr=1e-3)
    handle = bfp.update_scales_after(optimizer, model) if called == "by a hook" else None
    for _ in range(3):
        # Accumulated: both microbatches count as one step.
        for scale in (1.0, 3.0):
            one_backward(model, scale)
        before = [recorded(layer) for layer in model]
        if called == "before":
            bfp.update_scales(model)
        optimizer.step()
        if called == "after":
            bfp.update_scales(model)
        optimizer.zero_grad()
        assert_moved(model, before)
    assert all(layer.gradient_scale > 1 for layer in model)
    if handle is not None:
        handle.remove()


def test_what_is_no_step_leaves_the_histories():
    """Evaluation, accumulation, steps of other models, of no gradients, and that which makes an optimizer's state."""
    model, optimizer, backward = trained_by_others()
    backward()
    optimizer.step()
    before = buffers_of(model)
    model.eval()
    with torch.no_grad():
        model(values((4, 32), 1, scale=1.0))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    assert_equal(buffers_of(model), before)
    backward()
    backward()
    elsewhere = nn.Linear(2, 2)
    unrelated = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    elsewhere(torch.ones(2)).sum().backward()
    with_amaxes = [recorded(layer) for layer in model]
    unrelated.step()
    # Recomputed forwards record what they recorded before.
    checkpoint(model, values((4, 32), 3, scale=2.0).requires_grad_(), use_reentrant=False).sum().backward()
    for (history, scale, _), (now, scale_now, _) in zip(with_amaxes[0], recorded(model[0]), strict=True):
        assert torch.equal(now[1:], history[1:])
        assert torch.equal(scale_now, scale)


def test_optimizers_of_parts_update_their_own_layers():
    model, _, backward = trained_by_others()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    for _ in range(3):
        backward()
        before, waiting = [recorded(layer) for layer in model], buffers_of(model[1])
        first.step()
        assert_moved(model[:1], before[:1])
        assert_equal(buffers_of(model[1]), waiting)
        second.step()
        assert_moved(model, before)


class Wrapped(torch.optim.Optimizer):
    """Optimizers within one, as ZeroRedundancyOptimizer and torchtitan have it."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, options)
        self.inner = [torch.optim.SGD([param], **options) for param in params]

    def step(self, closure=None):
        for one in self.inner:
            one.step()


def test_of_optimizers_within_another_the_outer_one_counts(monkeypatch):
    """The inner ones of different ranks hold different layers: ranks would not reduce the same amaxes together."""
    model, _, backward = trained_by_others()
    optimizer, updated = Wrapped(model.parameters(), lr=0.1), []
    monkeypatch.setattr(delayed, "update_layers", lambda layers: updated.append(list(layers)))
    for _ in range(2):
        backward()
        optimizer.step()
    assert updated == [list(model)] * 2


def test_a_step_that_raised_hides_none_behind_it():
    """An outer optimizer that is still there, and holds the same weights: the next forward sees the step, as one by hand."""
    (model, optimizer, backward), (other, other_optimizer, other_backward) = trained_by_others(), trained_by_others()
    outer = Wrapped(model.parameters(), lr=0.1)
    outer.inner = [None]
    with pytest.raises(AttributeError):
        outer.step()
    for _ in range(3):
        backward()
        optimizer.step()
        other_backward()
        other_optimizer.step()
    bfp.update_scales(model)
    assert_equal(buffers_of(model), buffers_of(other))


def test_a_compiled_step_updates_scales():
    torch._dynamo.reset()
    model, optimizer, backward = trained_by_others()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        backward()
        before = [recorded(layer) for layer in model]
        step()
        assert_moved(model, before)


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


def by_hand(model, write):
    one_backward(model)
    one_backward(model)  # accumulated
    for parameter in model.parameters():
        write(parameter, parameter.grad)
        parameter.grad.zero_()


@pytest.mark.parametrize("write", [by_data, in_place, at_once, replaced])
def test_steps_by_hand_are_seen_by_the_next_forward(write):
    model, other = trained_by_others()[0], trained_by_others()[0]
    for _ in range(3):
        by_hand(model, write)
        by_hand(other, write)
        bfp.update_scales(other)
        with torch.no_grad():  # an evaluation sees the old scales, and changes nothing
            model(values((4, 32), 1, scale=1.0))
    assert other[0].gradient_scale > 1
    # The last step's amaxes still wait.
    bfp.update_scales(model)
    assert_equal(buffers_of(model), buffers_of(other))


def test_what_writes_weights_and_is_no_step():
    """Loads while a step is accumulated, and weights that are drawn or averaged where nothing was recorded."""
    model, _, backward = trained_by_others()
    with torch.no_grad():
        model[0].weight += 1e-3
    backward()
    state, before = copy.deepcopy(model.state_dict()), [layer.input_amax_history.clone() for layer in model]
    model.load_state_dict(state)
    backward()
    assert_equal([layer.input_amax_history for layer in model], before)


@pytest.mark.parametrize("optimizer", [bfp.AdamW, torch.optim.SGD])
def test_frozen_layers_are_updated_by_any_step(optimizer):
    """Adapters beside frozen layers: no optimizer holds the weights whose inputs and gradients are cast."""
    layer, adapter = bfp.Linear(32, 32, recipe="fp8_delayed").requires_grad_(False), nn.Linear(32, 32)
    step, model = optimizer(adapter.parameters(), lr=1e-3), nn.Sequential(adapter, layer)
    for _ in range(3):
        one_backward(model)
        before = [recorded(layer)]
        step.step()
        assert_moved([layer], before)


@pytest.mark.parametrize("optimizer", [bfp.AdamW, torch.optim.AdamW])
def test_an_optimizer_that_is_loaded_after_the_model_leaves_the_histories(optimizer):
    """As Composer and accelerate do: torch makes a new optimizer's state by a step whose learning rate is 0."""

    def made(seed):
        torch.manual_seed(seed)
        model = bfp.convert(nn.Sequential(nn.Linear(32, 32)), "fp8_delayed", weights="high_precision")
        found = optimizer(model.parameters(), lr=1e-3)
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
    other.requires_grad_(False)
    for _ in range(3):
        one(torch.ones(2, 8)).sum().backward()
        steps[0].step()
    other.requires_grad_(True)
    other(torch.ones(2, 8)).sum().backward()
    steps[1].step()
