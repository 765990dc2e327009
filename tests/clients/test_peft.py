"""PEFT: LoRA on quantized weights, in both orders; what moves, what is saved, and what is refused."""

import copy

import pytest
import torch
from arrays import values
from documented import run_documented
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, prepare_model_for_kbit_training
from torch import nn
from training import train
from transformers import LlamaConfig, LlamaForCausalLM

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TARGETS = ["q_proj", "v_proj"]
TOKENS = torch.arange(32).view(2, 16) * 7 % 128


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def lora(**options):
    # A nonzero second matrix, so that adapters say something from the start.
    return LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False, **options)


def convert_first(recipe):
    model = bfp.convert(llama(), recipe, filter_fn=lambda path, layer: path != "lm_head", keep_init=False)
    torch.manual_seed(1)
    return get_peft_model(model, lora())


def lora_first(recipe):
    torch.manual_seed(1)
    model = llama()
    torch.manual_seed(1)
    model = get_peft_model(model, lora())
    return bfp.convert(
        model, recipe, filter_fn=lambda path, layer: "lora_" not in path and "lm_head" not in path, keep_init=False
    )


ORDERS = pytest.mark.parametrize("made", [convert_first, lora_first])


def codes(model):
    return {
        name: [part.clone() for part in (param.codes, param.scales, param.tensor_scale) if part is not None]
        for name, param in model.named_parameters()
        if isinstance(param, bfp.QuantizedTensor)
    }


def adapters(model):
    return {name: param.detach().clone() for name, param in model.named_parameters() if "lora_" in name}


def equal(one, other):
    return one.keys() == other.keys() and all(
        all(map(torch.equal, a, b)) if isinstance(a, list) else torch.equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@ORDERS
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, bfp.AdamW])
def test_adapters_move_and_base_codes_stay(made, recipe, optimizer):
    model = made(recipe)
    before, start = codes(model), adapters(model)
    assert len(before) == 2 * 7
    assert all("lora_" in name for name, param in model.named_parameters() if param.requires_grad)
    step = optimizer([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = train(step, lambda _: model(TOKENS, labels=TOKENS).loss, range(4))
    assert losses[-1] < losses[0]
    assert equal(codes(model), before)
    assert not any(torch.equal(value, start[name]) for name, value in adapters(model).items())


def test_both_orders_are_the_same_model():
    first, second = convert_first("nvfp4"), lora_first("nvfp4")
    assert equal(codes(first), codes(second))
    assert equal(adapters(first), adapters(second))
    assert torch.equal(first(TOKENS).logits, second(TOKENS).logits)


def test_a_layer_is_its_base_and_its_adapter():
    model = convert_first("mxfp8")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, bfp.Linear)
    x = values((3, 64), 2)
    adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
    base = bfp.linear(x, layer.base_layer.weight, recipe="mxfp8")
    assert torch.equal(layer(x), base + adapter)
    with model.disable_adapter():
        assert torch.equal(layer(x), base)


@ORDERS
def test_adapters_are_saved_and_loaded(made, tmp_path):
    model = made("nvfp4")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    base = bfp.convert(llama(), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert equal(
        dict(sorted(get_peft_model_state_dict(loaded).items())), dict(sorted(get_peft_model_state_dict(model).items()))
    )
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_the_documented_lines():
    model = run_documented("PEFT", model=llama())["model"]
    assert sum(param.requires_grad for param in model.parameters()) == 2 * 2 * 2
    assert all(param.initial is None for param in model.parameters() if isinstance(param, bfp.QuantizedTensor))
    assert bfp.summary(model).quantized == sum(
        layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, bfp.Linear)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert_first("nvfp4").merge_and_unload(), r"(?s)add_.*weights=\"high_precision\".*load_high_precision_"),
        (lambda: get_peft_model(converted(), lora(use_dora=True)), r"dequantize\(\)"),
        (
            lambda: get_peft_model(converted(), LoraConfig(target_modules=TARGETS, init_lora_weights="pissa")),
            r"cast|dequantize",
        ),
    ],
    ids=["merge", "dora", "pissa"],
)
def test_what_reads_or_writes_values_is_refused(call, message):
    with pytest.raises((NotImplementedError, TypeError), match=message):
        call()


def test_preparing_for_training_casts_the_nominal_dtype_alone():
    model = converted(torch.bfloat16)
    before = {name: param.codes.clone() for name, param in model.named_parameters() if isinstance(param, bfp.QuantizedTensor)}
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    weights = {name: param for name, param in model.named_parameters() if isinstance(param, bfp.QuantizedTensor)}
    assert weights.keys() == before.keys()
    for name, param in weights.items():
        assert param.dtype is torch.float32
        assert not param.requires_grad
        assert torch.equal(param.codes, before[name])


def test_a_refused_merge_leaves_the_codes():
    model = convert_first("nvfp4")
    before = codes(model)
    with pytest.raises(NotImplementedError):
        model.merge_adapter()
    assert equal(codes(model), before)


def converted(dtype=torch.float32):
    return bfp.convert(llama(dtype), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False)


def test_high_precision_weights_take_merges():
    model = bfp.convert(llama(), "mxfp8", filter_fn=lambda path, layer: path != "lm_head", weights="high_precision")
    model = get_peft_model(model, lora())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    weight = layer.base_layer.weight.detach().values.clone()
    expected = weight + layer.get_delta_weight("default")
    merged = copy.deepcopy(model).merge_and_unload().model.layers[0].self_attn.q_proj
    assert isinstance(merged, bfp.Linear)
    assert torch.equal(merged.weight.detach().values, expected)


def test_targets_found_by_class():
    """`all-linear` looks for `torch.nn.Linear`s."""
    model = get_peft_model(converted(), LoraConfig(target_modules="all-linear", r=2))
    assert sum(isinstance(layer, nn.Linear) and hasattr(layer, "recipe") for layer in model.modules()) == 2 * 7
    assert len([name for name, _ in model.named_parameters() if "lora_A" in name]) == 2 * 7
