"""DoRA by `integrations.peft`: outputs, gradients and merges are those of its formula in float64."""

import copy

import pytest
import torch
from peft_models import adapted, gradients, off, plain
from torch import nn
from torch.nn.functional import linear

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:.*:DeprecationWarning")


def dora_reference(layer, x):
    """DoRA in float64: m (x (w + d)^T) / ||w + d||, whose norm is of each output's row."""
    base = layer.get_base_layer()
    total = base.weight.detach().dequantize().double() + layer.change("default").double()
    norm = total.norm(dim=1)
    y = linear(x.double(), total) * (layer.lora_magnitude_vector["default"].weight.double() / norm)
    return y if base.bias is None else y + base.bias.double()


@pytest.mark.parametrize("first", ["convert", "peft"])
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_dora(first, weights):
    model = adapted("llama", first=first, weights=weights, use_dora=True)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    magnitude = layer.lora_magnitude_vector["default"].weight
    if first == "convert" and weights == "quantized":
        # It began as the norm of what the codes stand for; adapters began at zero.
        assert torch.allclose(magnitude, layer.get_base_layer().weight.detach().dequantize().norm(dim=1))
    with torch.no_grad():
        magnitude.mul_(torch.rand(64) + 0.5)
    x = torch.randn(5, 64)
    held = layer.get_base_layer().weight
    if weights == "high_precision":
        quantized = copy.deepcopy(layer)
        quantized.get_base_layer().weight = nn.Parameter(held.quantized(), requires_grad=False)
        assert off(layer(x).double(), dora_reference(quantized, x)) < 1e-6
        return
    assert off(layer(x).double(), dora_reference(layer, x)) < 1e-6
    before = [part.clone() for part in held.parts]
    total = held.detach().dequantize() + layer.change("default")
    total = total * (magnitude.detach() / total.norm(dim=1)).unsqueeze(1)
    layer.merge()
    wanted = bfp.quantize(total, held.format).dequantize()
    assert off(held.detach().dequantize(), wanted) < 1e-3
    assert torch.equal(layer(x), layer.get_base_layer()(x))
    layer.unmerge()
    assert all(map(torch.equal, held.parts, before))


def test_dora_trains_as_in_float64():
    model = adapted("llama", use_dora=True)
    loss, found = gradients(model)
    expected_loss, expected = gradients(plain(model, "llama"))
    assert any("lora_magnitude_vector" in key for key in found)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert max(off(found[key], expected[key]) for key in found) < 2e-5


def test_dora_with_dropout_multiplies_what_is_left():
    model = adapted("llama", use_dora=True, lora_dropout=0.5).train()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 64)
    torch.manual_seed(4)
    left = layer.lora_dropout["default"](x)
    torch.manual_seed(4)
    # The base itself sees all of x; what DoRA changes is computed of what dropout leaves.
    expected = layer.base_layer(x) + dora_reference(layer, left) - layer.base_layer(left)
    assert off(layer(x).double(), expected) < 1e-6
