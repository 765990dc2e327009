"""PEFT's adapters by `integrations.peft` are merged by the definition, and unmerged to the bit."""

import copy
import math
import warnings

import numpy as np
import pytest
import threaded
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from documented import run_documented
from peft import LoraConfig, get_peft_model
from peft_models import MODELS, TOKENS, adapted, codes, equal, llama, off, spread
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import blockfp
import blockfp.torch as bfp
from blockfp.integrations.peft import merged, register

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:.*:DeprecationWarning")


def expected_merge(layer, name, adapters=("default",)):
    """The definition: NumPy quantizes the float32 sum of what the codes stand for and the adapters."""
    weight = getattr(layer.get_base_layer(), name)
    total = weight.detach().dequantize(torch.float32)
    for adapter in adapters:
        total = total + layer.change(adapter)
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


def test_a_change_that_rounding_swallows_is_said():
    model = adapted("llama")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.mul_(1e-3)
    with pytest.warns(UserWarning, match="lost more than half of the adapter's change"):
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


def test_the_documented_lines():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = run_documented("PEFT: merge", model=llama())["model"]
    assert type(model) is LlamaForCausalLM
    assert merged(model)
