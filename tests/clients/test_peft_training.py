"""PEFT's LoRA and DoRA by `integrations.peft`: training as over the values, adapters of PEFT's own; the codes stay."""

import copy

import pytest
import torch
from documented import run_documented
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft_models import MODELS, TOKENS, adapted, codes, equal, gpt_oss, gradients, llama, off, plain
from torch import nn
from torch.nn.functional import linear

import blockfp.torch as bfp
from blockfp.cli import app
from blockfp.integrations.peft import register

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


def test_adapters_are_those_of_peft(tmp_path):
    """Saved, they load over PEFT's own layers, and over quantized ones again."""
    model = adapted("gpt-oss")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    own = PeftModel.from_pretrained(gpt_oss(), tmp_path)
    state = get_peft_model_state_dict(own)
    assert state.keys() == get_peft_model_state_dict(model).keys()
    assert all(torch.equal(value, state[key]) for key, value in get_peft_model_state_dict(model).items())
    base = bfp.convert(
        gpt_oss(), "mxfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute="high_precision"
    )
    again = PeftModel.from_pretrained(base, tmp_path, config=register(LoraConfig.from_pretrained(tmp_path))).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_adapters_are_not_quantized():
    """Whatever filter_fn says: `all-linear`, then convert, is the order of tutorials."""
    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear", r=4))
    bfp.convert(model, "nvfp4", keep_init=False)
    kinds = {name: type(param) for name, param in model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {nn.Parameter}
    assert sum(kind is bfp.QuantizedTensor for kind in kinds.values()) == 2 * 7 + 1


def test_what_is_nobodys_to_quantize_is_left_to_peft():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Embedding(4, 8))
    made = get_peft_model(model, register(LoraConfig(target_modules=["0", "1", "2"]))).base_model.model
    kinds = [f"{type(layer).__module__}.{type(layer).__name__}" for layer in made]
    ours, own = "blockfp.integrations.peft", "peft.tuners.lora.layer"
    assert kinds == [f"{ours}.LoraLinear", f"{own}.Linear", f"{own}.Embedding"]
    with pytest.raises(TypeError, match=r"config must be a peft\.LoraConfig, got IA3Config"):
        register(IA3Config())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights="mica"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        LoHaConfig(target_modules=["q_proj"], init_weights=False),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=16),
    ],
    ids=["pissa", "olora", "mica", "lora", "loha", "ia3", "oft"],
)
@pytest.mark.parametrize("safe_merge", [False, True])
def test_peft_itself_writes_no_codes(config, safe_merge):
    """Every way in which it writes a weight raises, and leaves the codes."""
    model = bfp.convert(llama(), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = [part.clone() for part in weight.parts]
    with pytest.raises((NotImplementedError, TypeError)):
        get_peft_model(model, copy.deepcopy(config)).merge_adapter(safe_merge=safe_merge)
    assert all(map(torch.equal, weight.parts, before))


def test_other_variants_are_refused():
    model = get_peft_model(
        bfp.convert(llama(), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False),
        register(LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1])),
    )
    with pytest.raises((NotImplementedError, ValueError)):
        model.merge_adapter()


def test_a_released_model_is_loaded_as_documented(tmp_path):
    """Written by `blockfp convert` as compressed-tensors does: NVFP4 in rows, whose codes are then the file's."""
    model = llama()
    codes_of = {
        name: bfp.quantize(param.detach(), "nvfp4") if name.endswith("proj.weight") else param.detach()
        for name, param in model.named_parameters()
    }
    bfp.save(tmp_path / "own.safetensors", codes_of)
    command = ["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "released"), "--layout", "compressed-tensors"]
    with pytest.raises(SystemExit) as ended:
        app(command)
    assert ended.value.code == 0
    names = run_documented("QLoRA: a released model", model=llama().bfloat16(), folder=tmp_path / "released")
    loaded, released = names["model"], names["released"]
    held = {name: param for name, param in loaded.named_parameters() if isinstance(param, bfp.QuantizedTensor)}
    assert held.keys() == names["formats"].keys()
    assert len(held) == 2 * 7
    for name, param in held.items():
        assert all(map(torch.equal, param.parts, released[name].parts))
        assert torch.equal(param.codes, codes_of[name].codes)
    trained = get_peft_model(loaded, register(LoraConfig(target_modules="all-linear")))
    assert trained(TOKENS, labels=TOKENS).loss.isfinite()
