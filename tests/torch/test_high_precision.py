"""`high_precision_state_dict` on every mesh, and quantization-aware fine-tuning with gradients in high precision."""

import math

import numpy as np
import pytest
import threaded
import torch
import torch.nn.functional as F
from resumed import MESHES, model_of, shard
from torch import nn

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

SHAPES = [(64, 128), (37, 64), (50, 64)]


def _gathered(rank, mesh, format, expected, offload):
    found = bfp.high_precision_state_dict(shard(model_of(format, SHAPES), mesh), cpu_offload=offload)
    if offload and rank != 0:
        assert found == {}
        return
    assert list(found) == list(expected)
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if MESHES[mesh]])
@pytest.mark.parametrize("format", ["mxfp8_e4m3_32x32", "nvfp4_16x16", None])
def test_sharded(mesh, format):
    whole = model_of(format, SHAPES)
    expected = bfp.high_precision_state_dict(whole)
    assert list(expected) == [f"{i}.{name}" for i in range(len(SHAPES)) for name in ("weight", "bias")]
    for i, layer in enumerate(whole):
        assert torch.equal(expected[f"{i}.weight"], layer.weight.detach().dequantize() if format else layer.weight)
    threaded.run(math.prod(MESHES[mesh][0]), _gathered, mesh, format, expected, mesh == "fsdp2")


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_a_plain_model_takes_it_and_gives_it_back(recipe, weights):
    plain, other = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 33)) for _ in range(2))
    model = bfp.convert(plain, recipe, weights=weights)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    state = bfp.high_precision_state_dict(model)
    assert not any(other.load_state_dict(state))
    again = bfp.convert(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 33)), recipe, weights=weights)
    before = {name: value.clone() for name, value in again.named_buffers()}
    assert not any(again.load_state_dict(other.state_dict()))
    for name, value in bfp.high_precision_state_dict(again).items():
        # Quantizing what was dequantized doesn't always give the same values.
        held = dict(again.named_parameters()).get(name)
        loaded = bfp.quantize(state[name], held.format).dequantize() if isinstance(held, bfp.QuantizedTensor) else state[name]
        assert torch.equal(value, loaded), name
    # What only the recipe keeps is as it was.
    assert all(torch.equal(value, before[name]) for name, value in again.named_buffers() if "1." not in name)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*\"0\.bias\""):
        again.load_state_dict({name: value for name, value in state.items() if name != "0.bias"})
    half = bfp.high_precision_state_dict(model, dtype=torch.bfloat16)
    assert (half["0.weight"].dtype, half["0.bias"].dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(TypeError, match=r"dtype must be one of .*got torch\.float64"):
        bfp.high_precision_state_dict(model, dtype=torch.float64)


def test_tied_weights_are_one_tensor():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    state = bfp.high_precision_state_dict(bfp.convert(model, "mxfp8"))
    assert state["0.weight"] is state["1.weight"]


FORMATS = ("nvfp4", "mxfp4_e2m1", "fp8_e4m3_128x128_fp32", "fp8_e4m3_row", "mxfp8_e4m3")
LAYOUTS = {"nvfp4": "compressed-tensors", "mxfp4_e2m1": "compressed-tensors", "fp8_e4m3_128x128_fp32": "fine-grained-fp8"}


def cast(x, format):
    """By the NumPy face."""
    return torch.from_numpy(blockfp.quantize(x.detach().numpy(), format).dequantize())


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_forward_and_gradients(format, activations, weights):
    torch.manual_seed(0)
    layer = nn.Linear(256, 128)
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    inputs = {"fp8_e4m3_128x128_fp32": "fp8_e4m3_1x128"}.get(format, format) if activations else None
    bfp.convert(layer, recipes.qat(format, inputs), weights=weights)
    x, g = torch.randn(8, 256, requires_grad=True), torch.randn(8, 128)
    y = layer(x)
    y.backward(g)
    seen, held = x.detach() if inputs is None else cast(x, inputs), cast(w, format)
    torch.testing.assert_close(y.detach(), F.linear(seen, held, b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g @ held, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, g.mT @ x.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", LAYOUTS)
def test_exported_weights_are_those_of_the_forward(format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    bfp.convert(model, recipes.qat(format))
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 128)
    losses = []
    for _ in range(5):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    sent = {name: tensor for bucket in bfp.stream_weights(model, layout=LAYOUTS[format]) for name, tensor in bucket}
    for i in (0, 2):
        used = model[i].weight
        codes = sent.get(f"{i}.weight_packed", sent.get(f"{i}.weight"))
        assert torch.equal(codes.view(torch.uint8).reshape(-1), used.codes.reshape(-1))
        scales = sent.get(f"{i}.weight_scale", sent.get(f"{i}.weight_scale_inv"))
        np.testing.assert_array_equal(scales.view(used.scales.dtype).numpy().reshape(-1), used.scales.numpy().reshape(-1))
        # What the forward multiplied with is the quantization of the optimizer's master.
        master = blockfp.quantize(optimizer.state[used]["master"].numpy(), format)
        np.testing.assert_array_equal(used.codes.numpy(), master.codes)
        np.testing.assert_array_equal(used.scales.numpy(), master.scales)
