"""Layers cast by `module.to(dtype)`, and torch's default dtype and device: codes and original values don't change."""

import copy
from contextlib import contextmanager

import pytest
import threaded
import torch
from arrays import through_a_file
from blockfp.torch_backend.quantized_tensor.sharding import local_of, own_part
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

BOTH = pytest.mark.parametrize("weights", ["quantized", "high_precision"])


def layer_of(weights, recipe="mxfp8"):
    torch.manual_seed(0)
    # 50 rows: shards that are uneven and straddle blocks.
    layer = bfp.Linear(64, 50, recipe=recipe, weights=weights)
    for name, buffer in layer.named_buffers():
        if name.endswith("scale"):
            buffer.fill_(100.3)
    return layer


def x_of(dtype):
    return torch.randn((6, 64), generator=torch.Generator().manual_seed(1)).to(dtype)


def cast_by_hand(layer):
    """A bfloat16 layer that is made of another's values."""
    dtype = torch.bfloat16
    mine = bfp.Linear(64, 50, recipe=layer.recipe, weights=layer.weights, dtype=dtype)
    with torch.no_grad():
        if layer.weights == "quantized":
            w = layer.weight
            mine.weight = nn.Parameter(w.with_parts(w.codes, w.scales, w.tensor_scale, dtype=dtype))
        else:
            mine.weight.copy_(layer.weight.values)
        mine.bias.copy_(layer.bias)
    for name, buffer in layer.named_buffers():
        mine.get_buffer(name).copy_(buffer)
    return mine


@BOTH
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_a_layer_alone(recipe, weights):
    layer = layer_of(weights, recipe)
    made, initial = cast_by_hand(layer), getattr(layer.weight, "initial", None)
    layer(x_of(torch.float32)).sum().backward()
    made.weight.grad = layer.weight.grad.bfloat16()
    made.bias.grad = layer.bias.grad.bfloat16()
    for name, buffer in layer.named_buffers():
        made.get_buffer(name).copy_(buffer)
    parameter = layer.weight
    layer.to(torch.bfloat16)
    assert layer.weight is parameter
    assert getattr(layer.weight, "initial", None) is initial
    for one in (layer, copy.deepcopy(layer)):
        assert [b.dtype for b in one.buffers()] == [b.dtype for b in made.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), made.buffers(), strict=True))
        one(x_of(torch.bfloat16)).sum().backward()
    made(x_of(torch.bfloat16)).sum().backward()
    for a, b in zip(layer.parameters(), made.parameters(), strict=True):
        assert a.dtype == a.grad.dtype == torch.bfloat16
        assert torch.equal(a.grad, b.grad)
    assert list(layer.state_dict()) == list(made.state_dict())
    layer.float()
    assert layer(x_of(torch.float32)).dtype == torch.float32
    layer.to("meta", torch.float16).to_empty(device="cpu")
    assert {layer.weight.dtype, layer.bias.dtype} == {torch.float16}
    assert [b.dtype for b in layer.buffers()] == [b.dtype for b in made.buffers()]


@BOTH
def test_a_move_to_where_a_layer_is_leaves_its_weight(weights):
    """As trainers move models that are there, while a notebook still has a result whose backward never ran."""
    layer, x = layer_of(weights), x_of(torch.float32).requires_grad_()
    parameter, y = layer.weight, layer(x)
    layer.cpu().float().to("cpu", torch.float32)
    layer.share_memory()
    assert layer.weight is parameter
    assert layer.weight.is_shared()
    y.sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"waits for its backward: delete it"):
        layer.to(torch.bfloat16)
    assert layer.weight is parameter
    del y
    assert layer.to(torch.bfloat16).weight.dtype == torch.bfloat16


@BOTH
def test_a_dtype_that_has_no_formats(weights):
    layer = layer_of(weights)
    with pytest.raises(TypeError, match=r"a weight that is quantized must be one of torch.float32, .*, got torch.float64"):
        layer.double()
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}


def on_a_mesh(rank, layer, made, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    steps = {
        "cut": lambda: bfp.parallelize(layer, mesh["tp"], "column"),
        "shard": lambda: fully_shard(layer, mesh=mesh["dp"]),
        "cast": lambda: layer.to(torch.bfloat16),
    }
    layer = copy.deepcopy(layer)
    for step in order:
        steps[step]()
    local = local_of(layer.weight)
    assert type(local) is (bfp.CastWeight if layer.weights == "high_precision" else bfp.QuantizedTensor)
    assert local.dtype == layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    if isinstance(local, bfp.QuantizedTensor):
        assert torch.equal(local.initial, own_part(made.weight.initial, layer.weight))
    optimizer = bfp.AdamW(layer.parameters(), lr=0.1)
    outputs = []
    for _ in range(2):
        layer.unshard()
        # What is gathered is what one process quantizes.
        assert type(local_of(layer.weight)) is bfp.QuantizedTensor
        layer(x_of(torch.bfloat16)).sum().backward()
        outputs.append(layer(x_of(torch.bfloat16)).detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


@BOTH
@pytest.mark.parametrize("order", ["cut cast shard", "cut shard cast", "shard cast"])
def test_on_a_mesh(order, weights):
    layer = layer_of(weights)
    made = cast_by_hand(layer)
    if weights == "quantized":
        made.weight.initial = layer.weight.initial
    optimizer, outputs = bfp.AdamW(made.parameters(), lr=0.1), []
    results = threaded.run(4, on_a_mesh, layer, made, order.split())
    for _ in range(2):
        made(x_of(torch.bfloat16)).sum().backward()
        outputs.append(made(x_of(torch.bfloat16)).detach())
        optimizer.step()
        optimizer.zero_grad()
    for rank, ys in enumerate(results):
        for y, want in zip(ys, outputs, strict=True):
            assert torch.equal(y, want.chunk(2, -1)[rank % 2] if "cut" in order else want)


def trained(dtype, recipe, weights, rows):
    """What a layer gives in two steps under a default dtype; `rows` makes a shape of its own, whose plans are new."""
    values = nn.Linear(64, 48, dtype=torch.float32, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for seed, param in enumerate(values.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32))
    x = torch.randn((rows, 64), generator=torch.Generator().manual_seed(7), dtype=torch.float32).bfloat16()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = bfp.convert(nn.Sequential(values.bfloat16()), recipe, weights=weights)
        if model[0].stateful and model[0].rng_key is not None:
            model[0].rng_key.fill_(3)
        optimizer = bfp.AdamW(model.parameters(), lr=0.1)
        found = []
        with bfp.observe(model) as observed:
            for _ in range(2):
                y = model(x)
                y.square().sum().backward()
                found += [y.detach(), model[0].weight.grad, model[0].bias.grad]
                optimizer.step()
                optimizer.zero_grad()
                found += [buffer.clone() for buffer in model.buffers()]
            figures = observed.step()
        found += bfp.high_precision_state_dict(model, dtype=torch.float32).values()
        found += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
        return [one.detach() for one in found], figures
    finally:
        torch.set_default_dtype(before)


@BOTH
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_row", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 37), (torch.float16, 39), (torch.float64, 41)])
def test_the_default_dtype_changes_nothing(dtype, rows, recipe, weights):
    (mine, figures), (plain, wanted) = (trained(one, recipe, weights, rows) for one in (dtype, torch.float32))
    assert [one.dtype for one in mine] == [one.dtype for one in plain]
    assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
    assert figures == wanted


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def results(model, recipe, weights):
    """Everything that a layer's life makes: converted, trained, observed, saved and loaded."""
    bfp.convert(model, recipe, weights=weights)
    for name, buffer in model.named_buffers():
        if name.endswith("rng_key"):
            buffer.fill_(7)
    optimizer, found = bfp.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(2):
        x = X.clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [y.detach(), x.grad]
    with bfp.observe(model):
        model(X)
    states, steps = through_a_file((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(states)
    optimizer.load_state_dict(steps)
    found += model.state_dict().values()
    found += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*found, bfp.quantize(X, "nvfp4", key=5).dequantize(), bfp.fake_quantize(X, "mxfp4_e2m1")]


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "fp8_current", "nvfp4", "mxfp4_rotated"])
def test_no_bit_follows_a_default(recipe, weights, route):
    model = plain()
    expected = results(copy.deepcopy(model), recipe, weights)
    for default in (torch.bfloat16, torch.float16, torch.float64, "meta"):
        with torch.device("meta") if default == "meta" else default_dtype(default):
            found = results(copy.deepcopy(model), recipe, weights)
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, a.device) == (b.dtype, b.device)
            assert torch.equal(a, b)


def test_delayed_scales_of_a_model_that_is_built_in_bfloat16():
    """As libraries build models: the layers' own state stays in float32."""
    with default_dtype(torch.bfloat16):
        layer = bfp.Linear(64, 32, recipe="fp8_delayed")
        experts = bfp.GroupedLinear(2, 64, 32, recipe="fp8_delayed")
    assert layer.weight.dtype == experts.weight.dtype == torch.bfloat16
    assert {buffer.dtype for made in (layer, experts) for buffer in made.buffers()} == {torch.float32}
