"""PEFT's LoRA by `integrations.peft` trains as over what the codes stand for, experts too; the codes stay."""

import copy

import pytest
import torch
from peft_models import MODELS, TOKENS, adapted, codes, equal, gradients, off, plain

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:.*:DeprecationWarning")


@pytest.mark.parametrize("first", ["convert", "peft"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_values(name, first):
    """Weight-only products are exact: PEFT's own layers in float64, over the dequantized weights, give the same."""
    model = adapted(name, first=first)
    reference = plain(model, name)
    before = codes(model)
    loss, found = gradients(model)
    expected_loss, expected = gradients(reference)
    assert found.keys() == expected.keys()
    assert len(found) == 2 * sum(type(layer).__name__ in ("LoraLinear", "ParamWrapper") for layer in model.modules())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert max(off(found[key], expected[key]) for key in found) < 2e-5
    assert equal(codes(model), before)


@pytest.mark.parametrize(("name", "bound"), [("llama", 0.35), ("gpt-oss", 0.7), ("deepseek", 0.3)])
def test_quantized_products_stay_within_their_recipe(name, bound):
    """Inputs and gradients are rounded as the recipe says, by up to 2^-4 or 2^-2, in each product; the direction stays."""
    model = adapted(name, compute="quantized")
    _, found = gradients(model)
    _, expected = gradients(plain(model, name))
    assert max(off(found[key], expected[key]) for key in found) < bound
    assert min(torch.cosine_similarity(found[key].flatten(), expected[key].flatten(), dim=0) for key in found) > 0.8


def test_rounding_in_the_base_does_not_reach_its_adapters_gradients():
    """They see the layer's input and its output's gradient as they are; only the input's own gradient is the recipe's."""
    model = adapted("llama", compute="quantized")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x, gradient = torch.randn(7, 64, requires_grad=True), torch.randn(7, 64)
    layer(x).backward(gradient)
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    through = 2 * gradient.double() @ b.detach().double()
    assert off(a.grad, through.T @ x.detach().double()) < 1e-6
    assert off(b.grad, 2 * gradient.double().T @ (x.detach().double() @ a.detach().double().T)) < 1e-6
    values = layer.get_base_layer().weight.detach().dequantize().double()
    assert 0.01 < off(x.grad, gradient.double() @ values + through @ a.detach().double()) < 0.2


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls_as_over_high_precision_and_codes_stay(name):
    losses = {}
    for quantized in (True, False):
        model = adapted(name, compute="quantized")
        before = codes(model)
        trained = model if quantized else plain(model, name).float()
        optimizer = torch.optim.AdamW([param for param in trained.parameters() if param.requires_grad], lr=1e-2)
        losses[quantized] = []
        for _ in range(20):
            loss = trained(TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[quantized].append(loss.item())
        assert equal(codes(model), before)
    assert losses[True][-1] < 0.9 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.1)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_the_same():
    """Experts and their adapters compile into the graph around them."""
    model = adapted("gpt-oss").train()
    other = copy.deepcopy(model)
    loss, expected = gradients(model)
    for layer in other.base_model.model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    compiled_loss, found = gradients(other)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    for (name, one), two in zip(expected.items(), found.values(), strict=True):
        assert off(two, one) < 1e-5, name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_gradient(name, reentrant):
    model = adapted(name, compute="quantized").train()
    if name == "llama":
        for module in model.modules():
            if getattr(module, "rng_key", None) is not None:
                module.rng_key.fill_(5)
    start = {key: value.clone() for key, value in model.named_buffers()}
    _, expected = gradients(model)
    model.zero_grad()
    for key, value in model.named_buffers():
        value.copy_(start[key])
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
