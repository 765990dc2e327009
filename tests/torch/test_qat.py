"""Quantization-aware fine-tuning: a server's forward, gradients in high precision, files with the forward's bits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

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
