"""PEFT's LoRA by `integrations.peft`: experts on codes, DoRA, merges by the definition, unmerges to the bit."""

import copy
import math
import warnings

import numpy as np
import pytest
import threaded
import torch
from blockfp.torch_backend.integrations.peft import merged, register
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from documented import run_documented
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import blockfp
import blockfp.torch as bfp
from blockfp.cli import app

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:.*:DeprecationWarning")

TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def llama(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).eval()


def gpt_oss():
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)).eval()
    with torch.no_grad():
        for path, param in model.named_parameters():
            if path.endswith("_bias"):
                param.uniform_(-0.1, 0.1)
    return model


def deepseek():
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**SIZES, **LATENT, **experts, moe_intermediate_size=96, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(config).eval()


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
MODELS = {
    "llama": (llama, "nvfp4", ["q_proj", "down_proj"], None),
    "gpt-oss": (gpt_oss, "mxfp4", ["q_proj"], EXPERTS),
    "deepseek": (deepseek, "fp8_block", ["q_proj", "kv_b_proj"], EXPERTS),
}


def adapted(name, *, first="convert", compute="high_precision", weights="quantized", **options):
    """A model of MODELS, quantized and adapted, in either order; its products of codes are exact unless `compute` says."""
    make, recipe, modules, parameters = MODELS[name]
    model = make()
    config = register(LoraConfig(target_modules=modules, target_parameters=parameters, r=4, lora_alpha=8, **options))
    for turn in ("convert", "peft") if first == "convert" else ("peft", "convert"):
        if turn == "peft":
            torch.manual_seed(1)
            model = get_peft_model(model, config)
            spread(model)
        else:
            model = bfp.convert(
                model,
                recipe,
                filter_fn=lambda path, layer: "lm_head" not in path,
                keep_init=False,
                weights=weights,
                compute=compute,
            )
    return model.eval()


def spread(model):
    """Makes adapters say something, as large as weights are."""
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)


def codes(model):
    params = model.named_parameters()
    return {name: [part.clone() for part in q.parts] for name, q in params if isinstance(q, bfp.QuantizedTensor)}


def equal(one, other):
    return one.keys() == other.keys() and all(all(map(torch.equal, one[name], other[name])) for name in one)


def plain(model, name):
    """PEFT's own model over what the weights of `model` stand for, with the same adapters, in float64."""
    make, _, modules, parameters = MODELS[name]
    values = bfp.high_precision_state_dict(model)
    bare = {key.replace("base_model.model.", "").replace(".base_layer", ""): value for key, value in values.items()}
    base = make()
    # Expert by expert: torch's grouped product takes no float64.
    base.config._experts_implementation = "eager"
    base.load_state_dict({key: value for key, value in bare.items() if "lora_" not in key})
    dora = any("lora_magnitude" in key for key in values)
    config = LoraConfig(target_modules=modules, target_parameters=parameters, r=4, lora_alpha=8, use_dora=dora)
    made = get_peft_model(base, config).double()
    made.load_state_dict({key: values[key].double() for key in made.state_dict()})
    return made.eval()


def gradients(model):
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {key: param.grad.double() for key, param in model.named_parameters() if param.requires_grad}


def off(one, other):
    return ((one - other).norm() / other.norm()).item()


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


def expected_merge(layer, name, adapters=("default",), magnitude=None):
    """The definition: NumPy quantizes the float32 sum of what the codes stand for and the adapters."""
    weight = getattr(layer.get_base_layer(), name)
    total = weight.detach().dequantize(torch.float32)
    for adapter in adapters:
        total = total + layer.change(adapter)
    if magnitude is not None:
        total = total * (magnitude / total.norm(dim=1)).unsqueeze(1)
    return blockfp.quantize(total.numpy(), weight.format)


@pytest.mark.parametrize("first", ["convert", "peft"])
@pytest.mark.parametrize("name", MODELS)
def test_merge_is_the_definition_and_unmerge_gives_the_codes_back(name, first):
    model = adapted(name, first=first)
    before, logits = codes(model), model(TOKENS).logits
    layers = [module for module in model.modules() if hasattr(module, "held")]
    expected = [expected_merge(layer, layer.held()[0]) for layer in layers]
    model.merge_adapter()
    for layer, wanted in zip(layers, expected, strict=True):
        _, weight = layer.held()
        np.testing.assert_array_equal(weight.codes.numpy(), wanted.codes)
        np.testing.assert_array_equal(weight.scales.numpy(), wanted.scales)
    assert not equal(codes(model), before)
    reports = merged(model)
    assert len(reports) == len(layers)
    assert all(5 < report.sqnr < 40 and report.adapters == ("default",) for report in reports)
    assert model.base_model.model.get_parameter(reports[0].name.replace("base_model.model.", "").replace(
        "q_proj", "q_proj.base_layer"
    )) is layers[0].held()[1]  # fmt: skip
    model.unmerge_adapter()
    assert equal(codes(model), before)
    assert not merged(model)
    assert torch.equal(model(TOKENS).logits, logits)


def test_a_merged_model_is_near_the_adapted_one_and_its_figures_outlive_the_adapters():
    model = adapted("llama")
    logits = model(TOKENS).logits
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.get_base_layer().weight
    total = weight.detach().dequantize() + model.base_model.model.model.layers[0].self_attn.q_proj.change("default")
    bare = model.merge_and_unload()
    assert type(bare) is LlamaForCausalLM
    assert not [name for name, _ in bare.named_parameters() if "lora" in name]
    assert off(bare(TOKENS).logits, logits) < 0.5
    report = merged(bare)[0]
    assert report.name == "model.layers.0.self_attn.q_proj.weight"
    noise = bare.get_parameter(report.name).detach().dequantize() - total
    assert report.sqnr == pytest.approx(10 * math.log10(total.square().sum() / noise.square().sum()), abs=1e-3)


def test_several_adapters_are_merged_from_the_first_codes():
    """Not one rounding after another; and a second one that comes later begins where the first did."""
    model = adapted("llama")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    model.add_adapter("more", register(LoraConfig(target_modules=["q_proj", "down_proj"], r=4)))
    spread(model)
    before = codes(model)
    both = expected_merge(layer, "weight", ("default", "more"))
    model.merge_adapter(["default"])
    assert not np.array_equal(layer.get_base_layer().weight.codes.numpy(), both.codes)
    with pytest.warns(UserWarning, match="Already following adapters"):
        model.merge_adapter(["more"])
    np.testing.assert_array_equal(layer.get_base_layer().weight.codes.numpy(), both.codes)
    assert merged(model)[0].adapters == ("default", "more")
    with model.disable_adapter():
        model(TOKENS)
    assert equal(codes(model), before)


def test_high_precision_weights_are_merged_and_unmerged_exactly_too():
    model = adapted("llama", weights="high_precision")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    weight = layer.get_base_layer().weight
    assert isinstance(weight, bfp.CastWeight)
    before, total = weight.values.detach().clone(), weight.values.detach() + layer.change("default")
    model.merge_adapter()
    assert torch.equal(weight.values.detach(), total)
    assert merged(model)[0].sqnr == math.inf
    model.unmerge_adapter()
    assert torch.equal(weight.values.detach(), before)


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


def test_conv1d_lies_the_other_way():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=4)).eval()
    with pytest.warns(UserWarning, match="lm_head"):
        bfp.convert(model, "mxfp8", keep_init=False, compute="high_precision")
    model = get_peft_model(model, register(LoraConfig(target_modules=["c_attn"], r=4))).eval()
    spread(model)
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    weight, x = layer.get_base_layer().weight, torch.randn(3, 64)
    before, change = [part.clone() for part in weight.parts], layer.change("default")
    assert change.shape == weight.shape == (64, 192)
    y = x @ (weight.detach().dequantize() + change) + layer.get_base_layer().bias
    assert off(layer(x), y) < 1e-5
    model.merge_adapter()
    assert off(layer(x), y) < 0.1
    model.unmerge_adapter()
    assert all(map(torch.equal, weight.parts, before))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = bfp.GroupedLinear(3, 32, 64, bias=False, recipe="mxfp8", compute="high_precision", keep_init=False)

    def forward(self, x, counts):
        return self.up(x, counts)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_grouped_linear_is_adapted_by_its_parameter(kind):
    torch.manual_seed(0)
    model = get_peft_model(Routed(), register(LoraConfig(target_modules=[], target_parameters=["up.weight"], r=3)))
    spread(model)
    layer = model.base_model.model.up
    weight, x = layer.get_base_layer().weight, torch.randn(9, 32)
    total = weight.detach().dequantize() + layer.change("default")
    expected = torch.cat([rows @ w.T for rows, w in zip(x.split([4, 0, 5]), total, strict=True)])
    assert off(model(x, kind([4, 0, 5])), expected) < 1e-6
    before = [part.clone() for part in weight.parts]
    model.merge_adapter()
    assert off(model(x, kind([4, 0, 5])), expected) < 0.1
    model.unmerge_adapter()
    assert all(map(torch.equal, weight.parts, before))


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
    ours, own = "blockfp.torch_backend.integrations.peft", "peft.tuners.lora.layer"
    assert kinds == [f"{ours}.LoraLinear", f"{own}.Linear", f"{own}.Embedding"]
    with pytest.raises(TypeError, match=r"config must be a peft\.LoraConfig, got IA3Config"):
        register(IA3Config())


def test_a_change_that_rounding_swallows_is_said():
    model = adapted("llama")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.mul_(1e-3)
    with pytest.warns(UserWarning, match="lost more than half of what the adapter changes"):
        model.merge_adapter()
    assert all(report.change_sqnr < 3 < report.sqnr for report in merged(model))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_values_that_codes_cannot_hold_are_refused(value):
    model = adapted("llama")
    before = codes(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight[0, 0] = value
    with pytest.raises(ValueError, match=r"adapters \['default'\] has an Inf or a NaN"):
        layer.merge()
    assert not layer.merged
    assert equal(codes(model), before)


def test_codes_that_were_loaded_since_are_not_undone():
    model = adapted("llama")
    loaded = copy.deepcopy(model.state_dict())
    model.merge_adapter()
    model.load_state_dict(loaded)
    with pytest.raises(ValueError, match="was overwritten after a merge"):
        model.unmerge_adapter()


def ranks_without_rows(rank, made):
    # Threads share torch's generator, so the model is made before.
    whole, model = copy.deepcopy(made), copy.deepcopy(made)
    fully_shard(model)
    before = [[part.clone() for part in local_of(param).parts] for name, param in model.named_parameters() if is_base(name)]
    whole.merge_adapter()
    model.merge_adapter()
    assert [each.sqnr for each in merged(model)] == pytest.approx([each.sqnr for each in merged(whole)])
    model.unmerge_adapter()
    after = [local_of(param).parts for name, param in model.named_parameters() if is_base(name)]
    assert all(all(map(torch.equal, one, other)) for one, other in zip(before, after, strict=True))
    return local_of(model.base_model.model[1].get_base_layer().weight).shape[0]


def is_base(name):
    return name.endswith("base_layer.weight")


def test_a_rank_without_rows_merges_with_the_others():
    torch.manual_seed(0)
    model = bfp.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), "mxfp8", keep_init=False)
    model = get_peft_model(model, register(LoraConfig(target_modules=["0", "1"], r=4)))
    spread(model)
    assert threaded.run(3, ranks_without_rows, model) == [1, 1, 0]


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


def test_a_bias_of_adapters_is_merged_and_given_back():
    model = llama(attention_bias=True)
    bfp.convert(model, "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute="high_precision")
    config = register(LoraConfig(target_modules=["q_proj"], r=4, lora_bias=True))
    model = get_peft_model(model, config).eval()
    spread(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].bias.uniform_()
        layer.get_base_layer().bias.uniform_()
    bias = layer.get_base_layer().bias.detach().clone()
    model.merge_adapter()
    assert torch.equal(layer.get_base_layer().bias, bias + layer.lora_B["default"].bias * layer.scaling["default"])
    model.unmerge_adapter()
    assert torch.equal(layer.get_base_layer().bias, bias)


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


def test_the_documented_lines():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = run_documented("PEFT: merge", model=llama())["model"]
    assert type(model) is LlamaForCausalLM
    assert merged(model)
