"""transformers' models, converted: a step of each against the same model unconverted, and what transformers does to layers."""

import copy
import warnings

import pytest
import threaded
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from training import train
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WORDS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.arange(32).view(2, 16) * 7 % 126 + 1
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
RECIPES = [("llama", recipe) for recipe in ("mxfp8", "fp8_current", "fp8_block", "nvfp4")]
RECIPES += [(name, recipe) for name in ("qwen3", "vit") for recipe in ("mxfp8", "nvfp4")]


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**WORDS, **SIZES, num_key_value_heads=2, **options))


MODELS = {
    "llama": llama,
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**WORDS, **SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
    ),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=10)),
}
TIED = {
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=32)),
    "bert": lambda: BertForMaskedLM(BertConfig(**WORDS, **SIZES)),
}


def made(build):
    torch.manual_seed(0)
    return build().eval()


def loss_of(model):
    if isinstance(model, ViTForImageClassification):
        return model(IMAGES.to(model.dtype), labels=torch.tensor([3, 5])).loss
    return model(TOKENS, labels=TOKENS).loss


def trained(model, optimizer=bfp.AdamW):
    step = optimizer(model.parameters(), lr=1e-3)
    return train(step, lambda _: loss_of(model), range(2))


def assert_near(model, plain):
    expected, losses = trained(plain, torch.optim.AdamW), trained(model)
    assert losses == pytest.approx(expected, rel=0.03)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_models_train_as_they_do_unconverted(name, recipe):
    plain = made(MODELS[name]).bfloat16()
    model = bfp.convert(copy.deepcopy(plain), recipe)
    summary = bfp.summary(model)
    assert summary.share > 0.9
    assert summary.unasked <= summary.in_matrices / 10
    assert_near(model, plain)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", TIED)
def test_tied_heads_are_left_with_a_warning_that_names_them(name, recipe):
    head = {"llama_tied": "lm_head", "gpt2": "lm_head", "bert": "cls.predictions.decoder"}[name]
    plain = made(TIED[name])
    model = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match=f"because another module shares their weight: '{head}' "):
        bfp.convert(model, recipe)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not isinstance(model.get_output_embeddings(), bfp.Linear)
    assert bfp.summary(model).unasked == 0 or name == "bert"
    assert_near(model, plain)


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_that_a_filter_chose_is_an_error_and_nothing_is_changed(name):
    model = made(TIED[name])
    with pytest.raises(ValueError, match="quantizing it would untie them"):
        bfp.convert(model, "mxfp8", filter_fn=lambda path, layer: True)
    assert not bfp.summary(model).layers
    head = model.get_output_embeddings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bfp.convert(model, "mxfp8", filter_fn=lambda path, layer: layer is not head)


def test_a_head_that_the_model_will_tie_again_is_tied():
    model = made(TIED["llama_tied"])
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="'lm_head' .with model.embed_tokens.weight."):
        bfp.convert(model, "mxfp8")
    assert type(model.lm_head) is nn.Linear
    bfp.convert(other, "mxfp8", filter_fn=lambda path, layer: True)
    assert isinstance(other.lm_head, bfp.Linear)


def test_experts_that_multiply_in_their_own_way_are_named():
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Llama4TextConfig(**WORDS, **sizes, intermediate_size_mlp=96, interleave_moe_layer_step=1)
    model = made(lambda: Llama4ForCausalLM(config))
    with pytest.warns(UserWarning, match=r"left \d\d% .*experts\.gate_up_proj \[4, 64, 192\]: .*bfp\.GroupedLinear holds"):
        bfp.convert(model, "mxfp8")
    summary = bfp.summary(model)
    experts = sum(param.numel() for name, param in model.named_parameters() if "experts" in name and param.ndim == 3)
    assert summary.unasked == experts
    assert summary.parameters == sum(param.numel() for param in model.parameters())
    assert 0 < summary.share < 0.5
    assert "GroupedLinear" in str(summary)


def test_gpt2_is_the_layer_that_its_transposed_weight_would_be():
    model = made(TIED["gpt2"])
    with pytest.warns(UserWarning, match="lm_head"):
        converted = bfp.convert(copy.deepcopy(model), "mxfp8")
    for path, layer in converted.named_modules():
        if type(layer).__name__ != "QuantizedConv1D":
            continue
        conv = model.get_submodule(path)
        assert isinstance(layer, type(conv))
        linear = nn.Linear(conv.nx, conv.nf)
        linear.weight.data, linear.bias.data = conv.weight.detach().T.contiguous(), conv.bias.detach()
        bfp.convert(linear, "mxfp8")
        x = torch.randn(5, conv.nx, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        assert torch.equal(layer(x), linear(y))
        layer(x).square().sum().backward()
        linear(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(layer.weight.grad, linear.weight.grad.T)
        assert torch.equal(layer.bias.grad, linear.bias.grad)


def test_gpt2s_plain_weights_load_the_way_round_they_are():
    plain = made(TIED["gpt2"])
    model = bfp.convert(made(TIED["gpt2"]), "nvfp4", filter_fn=lambda path, layer: path != "lm_head")
    weight = plain.transformer.h[0].attn.c_proj.weight.detach()
    bfp.load_high_precision_(model.transformer.h[0].attn.c_proj.weight, weight)
    assert torch.equal(model.transformer.h[0].attn.c_proj.weight.codes, bfp.quantize(weight, "nvfp4_16x16").codes)
    with pytest.raises(ValueError, match=r"\(64, 192\), got \(192, 64\)"):
        bfp.load_high_precision_(model.transformer.h[0].attn.c_attn.weight, torch.zeros(192, 64))


def test_gpt2_needs_formats_that_can_be_transposed():
    from blockfp import recipes

    recipe = recipes.parse("mxfp8").replace(weight=recipes.Cast("mxfp8_e4m3"))
    model = made(TIED["gpt2"])
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn'.*no exact transpose"):
        bfp.convert(model, recipe, filter_fn=lambda path, layer: path != "lm_head")
    assert not bfp.summary(model).layers


def test_gpt2_compiles():
    model = bfp.convert(made(TIED["gpt2"]), "mxfp8", filter_fn=lambda path, layer: path != "lm_head").transformer.h[0].mlp
    x = torch.randn(2, 3, 64)
    eager = model(x)
    eager.sum().backward()
    gradient, model.c_fc.weight.grad = model.c_fc.weight.grad, None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    compiled.sum().backward()
    assert torch.equal(compiled, eager)
    assert torch.equal(model.c_fc.weight.grad, gradient)


def gpt2_step(rank, recipe, weights):
    model = converted_gpt2(recipe, weights)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = loss_of(model)
    loss.backward()
    bfp.AdamW(model.parameters(), lr=1e-2).step()
    return loss.item(), loss_of(model).item()


def converted_gpt2(recipe, weights):
    with threaded.seeded(0):
        model = GPT2LMHeadModel(GPT2Config(**WORDS, n_embd=64, n_layer=1, n_head=4, n_positions=32)).eval()
    return bfp.convert(model, recipe, filter_fn=lambda path, layer: path != "lm_head", weights=weights)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_gpt2_is_sharded_as_the_whole(recipe, weights):
    model = converted_gpt2(recipe, weights)
    first = loss_of(model)
    first.backward()
    bfp.AdamW(model.parameters(), lr=1e-2).step()
    expected = (first.item(), loss_of(model).item())
    for losses in threaded.run(2, gpt2_step, recipe, weights):
        assert losses == pytest.approx(expected, abs=1e-4)


def cut(rank):
    bfp.parallelize(converted_gpt2("mxfp8", "quantized").transformer.h[0].mlp.c_fc, init_device_mesh("cpu", (2,)), "column")


def test_gpt2_is_not_cut():
    for raised in threaded.errors(2, cut):
        assert isinstance(raised, ValueError)
        assert "a QuantizedConv1D, whose weight is [in, out], can't be sharded" in str(raised)


@pytest.mark.parametrize("mean_resizing", [False, True])
def test_embeddings_are_resized(mean_resizing):
    model = bfp.convert(made(llama), "mxfp8", filter_fn=lambda path, layer: path != "lm_head")
    before = model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(160, mean_resizing=mean_resizing)
    assert model.lm_head.weight.shape == (160, 64)
    assert torch.equal(model.lm_head.weight[:128], before)
    assert model(TOKENS).logits.shape == (2, 16, 160)


def test_a_quantized_head_is_not_resized_behind_ones_back():
    model = bfp.convert(made(llama), "mxfp8")
    codes = model.lm_head.weight.codes.clone()
    with pytest.raises(NotImplementedError, match=r"dequantize\(\)"):
        model.resize_token_embeddings(160, mean_resizing=False)
    assert torch.equal(model.lm_head.weight.codes, codes)


def test_transformers_initializes_quantized_layers():
    model = bfp.convert(made(llama), "nvfp4")
    layer = model.model.layers[0].mlp.up_proj
    torch.manual_seed(3)
    model._init_weights(layer)
    torch.manual_seed(3)
    expected = torch.empty(96, 64).normal_(0, model.config.initializer_range)
    assert torch.equal(layer.weight.codes, bfp.quantize(expected, "nvfp4_16x16").codes)
    assert torch.equal(layer.weight.initial, expected)


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_floating_point_operations_are_those_of_the_plain_model(name):
    plain = made((MODELS | TIED)[name])
    model = bfp.convert(copy.deepcopy(plain), "mxfp8", filter_fn=lambda path, layer: path != "lm_head")
    counts = []
    for each in (plain, model):
        with FlopCounterMode(display=False) as counter:
            loss_of(each).backward()
        counts.append((counter.get_total_flops(), each.num_parameters()))
    assert counts[0] == counts[1]


def test_greedy_generation_is_that_of_the_dequantized_weights():
    model = bfp.convert(made(llama), "mxfp8", compute="high_precision")
    plain = made(llama)
    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, bfp.Linear):
                plain.get_submodule(path).weight.copy_(layer.weight.dequantize())
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    assert torch.equal(model.generate(TOKENS, **options), plain.generate(TOKENS, **options))
