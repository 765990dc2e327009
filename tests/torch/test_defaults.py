"""torch.set_default_dtype and torch.set_default_device: they are for tensors that name none, and change no bit of ours."""

import copy
import io
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import blockfp.torch as bfp

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
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    states, steps = torch.load(file)
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
