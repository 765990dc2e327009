"""Tensors with torch's negative bit (`z.conj().imag`, `torch._neg_view`): all that reads memory takes their values."""

import functools

import emulated_cuda
import numpy as np
import pytest
import torch
from arrays import values
from same_tensors import assert_equal
from torch import nn

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

X, W, G, B = values((32, 96), 0), values((64, 96), 1), values((32, 64), 2), values((64,), 3)


def contiguous(v):
    return torch._neg_view(v.detach().neg().contiguous())


def strided(v):
    if v.dtype is torch.bfloat16:  # of which there are no complex numbers
        return torch._neg_view(torch.stack([torch.zeros_like(v), -v], -1)[..., 1])
    return torch.complex(torch.zeros_like(v), -v).conj().imag


def plain(v):
    return v.detach().clone()


BITS = pytest.mark.parametrize("negated", [contiguous, strided])
NAMES = pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "fp8_block", "fp8_row", "nvfp4", "fp8_delayed"])


def layer(name, **options):
    torch.manual_seed(0)
    return bfp.Linear(96, 64, recipe=name, **options)


def parts_of(q):
    return [part for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def input_of_a_layer(name, of):
    model, x = layer(name), of(X).requires_grad_()
    y = model(x)
    y.backward(G)
    return [y, model.weight.grad]


def input_of_three_axes(name, of):
    return [layer(name)(of(X)[None])]


def gradient(name, of):
    model, x = layer(name), X.clone().requires_grad_()
    model(x).backward(of(G))
    return [x.grad, model.weight.grad, model.bias.grad]


def gradient_of_a_gradient(name, of):
    model, x = layer(name), X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, of(G), create_graph=True)
    first.square().sum().backward()
    return [first, model.weight.grad]


def torch_func(name, of):
    model = layer(name)
    y, backward = torch.func.vjp(model, of(X))
    return [y, *backward(of(G))]


def weight_in_high_precision(name, of):
    recipe = recipes.parse(name)
    if recipe.delayed:
        return []
    return [bfp.linear(X, of(W), recipe=recipe, key=1), bfp.linear(X, W, of(B), recipe=recipe, key=1)]


def groups(name, of):
    torch.manual_seed(0)
    model, x = bfp.GroupedLinear(3, 96, 64, recipe=name, dtype=torch.bfloat16), of(X.bfloat16()).requires_grad_()
    y = model(x, [8, 8, 16])
    y.backward(of(G.bfloat16()))
    return [y, model.weight.grad]


def mlp(name, of):
    torch.manual_seed(0)
    model = bfp.LayerNormMLP(96, 64, recipe=name, norm="rms_norm", activation="swiglu")
    y = model(of(X).requires_grad_())
    y.backward(of(X))
    return [y, *(p.grad for p in model.parameters())]


def activation_in_front(name, of):
    torch.manual_seed(0)
    return [bfp.convert(nn.Sequential(nn.SiLU(), nn.Linear(96, 64)), name)(of(X))]


def quantize(name, of):
    format = recipes.parse(name).input.format
    return [part for key in (None, 3) for part in parts_of(bfp.quantize(of(X), format, key=key))]


def scales(name, of):
    q = bfp.quantize(X, recipes.parse(name).input.format)
    if q.scales.dtype is not torch.float32:
        return []
    return [bfp.QuantizedTensor.from_parts(q.codes, of(q.scales), format=q.format, columns=96, dtype=q.dtype).dequantize()]


def load_state_dict(name, of):
    model = layer(name)
    model.load_state_dict({"weight": of(W), "bias": of(B)}, strict=False)
    return [*parts_of(model.weight), model.bias, model.weight.initial]


def load_high_precision(name, of):
    model = layer(name)
    bfp.load_high_precision_(model.weight, of(W))
    return parts_of(model.weight)


def load_into_values(name, of):
    found = []
    for assign in (False, True):
        model = layer(name, weights="high_precision")
        model.load_state_dict({"weight": of(W), "bias": of(B)}, strict=False, assign=assign)
        found.append(model(X))
    return found


def initialize(name, of):
    model = layer(name)
    bfp.init_(model.weight, lambda t: t.copy_(of(W)))
    return parts_of(model.weight)


def convert(name, of, weights="quantized"):
    linear = nn.Linear(96, 64)
    linear.weight, linear.bias = nn.Parameter(of(W)), nn.Parameter(B.clone())
    torch.manual_seed(0)
    model = bfp.convert(nn.Sequential(linear), name, weights=weights)
    first = model(X).detach()
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    model(X).backward(G)
    optimizer.step()
    return [first, model(X)]


def adamws_gradient(name, of, weights="quantized"):
    model = layer(name, weights=weights)
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    for seed in (4, 5):
        for p in model.parameters():
            p.grad = of(values(tuple(p.shape), seed))
        optimizer.step()
    return [model(X)]


def adamws_state(name, of):
    model = layer(name)
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = values(tuple(p.shape), 4)
    optimizer.step()
    found = optimizer.state_dict()
    for state in found["state"].values():
        state.update({key: of(each) for key, each in state.items() if each.is_floating_point() and each.ndim})
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    optimizer.load_state_dict(found)
    optimizer.step()
    return [model(X)]


def clip(name, of):
    model = layer(name)
    for p in model.parameters():
        p.grad = of(values(tuple(p.shape), 4))
    return [bfp.clip_grad_norm_(model.parameters(), 0.1), *(p.grad.resolve_neg() for p in model.parameters())]


def dispatch(name, of):
    recipe = recipes.parse(name)
    if recipe.delayed:
        return []
    w = bfp.quantize(values((4, 64, 96), 5), recipe.weight.format)
    received = bfp.dispatch(of(X), torch.arange(32)[:, None] % 4, 4, recipe=recipe, key=1)
    y = received.multiply(of(values((32, 96), 6)), w)
    return [received.multiply(received.tokens, w), bfp.combine(of(y), received, of(values((32, 1), 7)))]


ON_CUDA = (input_of_a_layer, gradient, groups, mlp, activation_in_front, load_state_dict, adamws_gradient)
WAYS = (
    *(input_of_three_axes, gradient_of_a_gradient, torch_func, weight_in_high_precision, quantize, scales, load_high_precision),
    *(load_into_values, initialize, convert, adamws_state, clip, dispatch, *ON_CUDA),
)


@BITS
@NAMES
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_values_are_taken_not_memory(way, name, negated):
    assert_equal(way(name, negated), way(name, plain))


@BITS
@pytest.mark.parametrize("way", [convert, adamws_gradient], ids=lambda way: way.__name__)
def test_weights_in_high_precision(way, negated):
    assert_equal(way("mxfp8", negated, "high_precision"), way("mxfp8", plain, "high_precision"))


@BITS
@NAMES
@pytest.mark.filterwarnings("ignore:groups are multiplied one after another")
@pytest.mark.parametrize("way", ON_CUDA, ids=lambda way: way.__name__)
def test_no_cuda_kernel_is_given_such_memory(way, name, negated, monkeypatch):
    given = []

    def watched(function):
        @functools.wraps(function)
        def run(*arguments):
            given.extend(each.is_neg() for each in arguments if isinstance(each, torch.Tensor))
            return function(*arguments)

        return run

    watching = {name: watched(function) for name, function in emulated_cuda.FUNCTIONS.items()}
    monkeypatch.setattr(emulated_cuda, "FUNCTIONS", watching)
    with emulated_cuda.launches():
        found = way(name, negated)
        assert given
        assert not any(given)
        assert_equal(found, way(name, plain))


@BITS
def test_adamw_refuses_parameters_of_such_memory(negated):
    p = nn.Parameter(negated(W))
    p.grad = W.clone()
    with pytest.raises(ValueError, match=r"params: the memory of a parameter of shape \(64, 96\) holds the negated values"):
        bfp.AdamW([p]).step()
    assert torch.equal(p, W)


@BITS
def test_files_hold_the_values(negated, tmp_path):
    model = nn.Sequential(nn.Linear(96, 64), bfp.Linear(64, 32, recipe="mxfp8"))
    model[0].weight = nn.Parameter(negated(W))
    bfp.save(tmp_path / "one.safetensors", model.state_dict())
    assert np.array_equal(blockfp.load(tmp_path / "one.safetensors")["0.weight"], W.numpy())
    bfp.save_checkpoint(tmp_path / "run", model, step=1)
    with torch.no_grad():
        model[0].weight = nn.Parameter(torch.zeros_like(W))
    bfp.load_checkpoint(tmp_path / "run", model)
    assert torch.equal(model[0].weight, W)
    model[0].weight = nn.Parameter(negated(W))
    for bucket in bfp.stream_weights(model, layout="compressed-tensors"):
        assert torch.equal(bucket.tensors.get("0.weight", W), W)


@BITS
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_code_refuses_it(negated, grad):
    """Inductor reads memory: torch's own compiled layers give other signs."""
    compiled = torch.compile(layer("mxfp8"), backend="aot_eager")
    with torch.set_grad_enabled(grad), pytest.raises(Exception, match=r"is_neg\(\).*give compiled code resolve_neg\(\) of it"):
        compiled(negated(X))
    assert torch.equal(compiled(negated(X).resolve_neg()), compiled(X))
