"""Parts of a layer that `convert` keeps (hooks, attributes, classes, references), and refuses where it can't."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from arrays import through_a_file
from torch import nn
from torch.nn.utils import parametrizations, prune

import blockfp.torch as bfp


class Scaled(nn.Linear):
    """A subclass with torch's forward, an attribute, a method and an initializer of its own."""

    def __init__(self, *args, **options):
        self.std = 0.5
        super().__init__(*args, **options)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.std)

    def doubled(self, x):
        return 2 * self(x)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Clashing(nn.Linear):
    def multiply(self, x):
        return x


def test_a_layer_is_a_torch_linear():
    layer = bfp.Linear(32, 16, recipe="mxfp8")
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (32, 16)
    assert isinstance(bfp.convert(nn.Linear(32, 16), "mxfp8"), nn.Linear)


def test_references_and_attributes_stay():
    layer = nn.Linear(32, 16).eval()
    model, elsewhere = nn.Sequential(layer), [layer]
    layer.note, layer.weight.no_decay = "kept", True
    layer.register_buffer("extra", torch.ones(3))
    layer.weight.grad = torch.ones(16, 32)
    bias = layer.bias
    bfp.convert(model, "mxfp8")
    assert model[0] is elsewhere[0] is layer
    assert isinstance(layer, bfp.Linear)
    assert (layer.note, layer.weight.no_decay) == ("kept", True)
    assert torch.equal(layer.extra, torch.ones(3))
    assert torch.equal(layer.weight.grad, torch.ones(16, 32))
    assert layer.bias is bias
    assert not layer.training


def test_hooks_are_called_and_can_be_removed():
    layer, called = nn.Linear(32, 16), []
    handles = [
        layer.register_forward_pre_hook(lambda *_: called.append("before")),
        layer.register_forward_hook(lambda *_, **__: called.append("after"), with_kwargs=True),
        layer.register_full_backward_pre_hook(lambda *_: called.append("backward")),
        layer.register_full_backward_hook(lambda *_: called.append("behind")),
        layer.register_state_dict_pre_hook(lambda *_: called.append("saving")),
        layer.register_state_dict_post_hook(lambda module, state, *_: called.append(sorted(state)[-1])),
        layer.register_load_state_dict_pre_hook(lambda module, *_: called.append(module)),
        layer.register_load_state_dict_post_hook(lambda module, _: called.append(module)),
    ]
    bfp.convert(layer, "mxfp8")
    layer(torch.ones(2, 32, requires_grad=True)).sum().backward()
    assert called == ["before", "after", "backward", "behind"]
    called.clear()
    state = layer.state_dict()
    # It sees what is saved, codes and scales.
    assert called == ["saving", sorted(state)[-1]]
    assert "scale" in called[1]
    called.clear()
    layer.load_state_dict(state)
    assert called == [layer, layer]
    called.clear()
    for handle in handles:
        handle.remove()
    layer(torch.ones(2, 32, requires_grad=True)).sum().backward()
    layer.load_state_dict(layer.state_dict())
    assert not called


def test_subclasses_with_torchs_forward_are_converted_and_stay_what_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(32, 16), nn.Linear(16, 8))
    plain = copy.deepcopy(model)
    bfp.convert(model, "mxfp8")
    layer = model[0]
    assert isinstance(layer, Scaled)
    assert isinstance(layer, bfp.Linear)
    x = torch.randn(4, 32)
    expected = bfp.linear(x, plain[0].weight, plain[0].bias, recipe="mxfp8")
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.doubled(x), 2 * expected)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    assert torch.equal(layer.weight.initial, torch.empty(16, 32).normal_(std=0.5))


def test_layers_of_subclasses_are_copied_and_pickled():
    layer = bfp.convert(Scaled(32, 16), "nvfp4")
    x = torch.randn(4, 32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), through_a_file(layer, weights_only=False)):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))
        other.load_state_dict(layer.state_dict())


def test_a_subclass_with_a_forward_of_its_own_is_left_and_named():
    model = nn.Sequential(Own(32, 32), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=r"left 50% .*0\.weight \[32, 32\]: a Own has its own forward"):
        bfp.convert(model, "mxfp8")
    assert type(model[0]) is Own


def pruned():
    layer = nn.Linear(32, 16)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def hooked():
    layer = nn.Linear(32, 16)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def patched():
    layer = nn.Linear(32, 16)
    layer.forward = lambda x: x
    return layer


def bound():
    layer = nn.Linear(32, 16)
    layer.old_forward = layer.forward
    return layer


def named():
    layer = nn.Linear(32, 16)
    layer.recipe = "mine"
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(32, 16)), r"parametrizations \(weight: _WeightNorm\).*remove_param"),
        (lambda: parametrizations.spectral_norm(nn.Linear(32, 16)), r"parametrizations \(weight: _SpectralNorm\)"),
        (lambda: nn.utils.spectral_norm(nn.Linear(32, 16)), "has a SpectralNorm hook"),
        (pruned, "has a RandomUnstructured hook"),
        (hooked, "the weight of .* has hooks"),
        (patched, r"methods put into it \(forward\)"),
        (bound, r"methods put into it \(old_forward\)"),
        (named, "has recipe, which are names of a Linear's"),
        (lambda: Clashing(32, 16), "has multiply, which are names of a Linear's"),
        (lambda: nn.LazyLinear(16), "has no shape yet"),
    ],
)
def test_what_would_be_lost_is_refused_before_anything_is_changed(layer, message):
    model = nn.Sequential(nn.Linear(32, 32), layer())
    with pytest.raises(ValueError, match=message) as raised:
        bfp.convert(model, "mxfp8")
    assert "'1'" in str(raised.value)
    assert type(model[0]) is nn.Linear
    bfp.convert(model, "mxfp8", filter_fn=lambda path, _: path == "0")
    assert isinstance(model[0], bfp.Linear)


def test_no_layer_is_changed_where_one_cannot_be_quantized():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).double())
    with pytest.raises(TypeError):
        bfp.convert(model, "mxfp8")
    assert type(model[0]) is nn.Linear


def test_nothing_keeps_the_old_values():
    values = np.ones((32, 32), np.float32)
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight = nn.Parameter(torch.from_numpy(values))
    old = weakref.ref(values)
    del values
    bfp.convert(model, "mxfp8", keep_init=False)
    gc.collect()
    assert old() is None


def test_memory_from_meta_has_its_buffers_set():
    """Initializers of other libraries know parameters alone."""
    for recipe in ("fp8_delayed", "nvfp4"):
        layer = bfp.convert(nn.Linear(32, 16, device="meta"), recipe).to_empty(device="cpu")
        if recipe == "nvfp4":
            assert layer.step == 0
            assert 0 <= layer.rng_key.min() <= layer.rng_key.max() < 2**32
        else:
            assert layer.input_scale == layer.gradient_scale == 0
            assert not layer.input_amax_history.any()


def test_layers_that_were_shared_are_converted_once():
    layer = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    bfp.convert(model, "mxfp8")
    assert model["a"] is model["b"][0]
    assert len(bfp.summary(model).layers) == 1
