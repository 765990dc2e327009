"""Blocks of the documents that want a model or a release: run as they are printed, with the real packages."""

import pytest
import torch
from documented import run_documented
from hf_models import family, is_quantized, load
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import blockfp.torch as bfp

# What these packages warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trainer_needs(folder):
    tokens = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=3, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    return {"model": llama(), "arguments": arguments, "data": [{"input_ids": row, "labels": row} for row in tokens]}


@pytest.mark.parametrize("block", ["transformers", "any optimizer"])
def test_trainers_update_scales(block, tmp_path):
    model = run_documented(block, **trainer_needs(tmp_path), bfp=bfp, Trainer=Trainer)["model"]
    layers = [layer for layer in model.modules() if isinstance(layer, bfp.Linear)]
    assert layers
    assert all(layer.gradient_scale.item() != 1 for layer in layers)


def test_a_model_that_others_read(tmp_path):
    space = run_documented("transformers: save", model=llama(), folder=tmp_path)
    for (name, param), again in zip(space["model"].named_parameters(), space["again"].parameters(), strict=True):
        if isinstance(param, bfp.QuantizedTensor):
            # The file has bfloat16, which not every value is.
            torch.testing.assert_close(again.dequantize().float(), param.dequantize(), rtol=0.1, atol=1e-2, msg=name)


def test_a_gradient_penalty():
    torch.manual_seed(0)
    critic = bfp.convert(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 1)), "mxfp8")
    run_documented("gradient penalty", critic=critic, x=torch.randn(8, 32))
    assert all(layer.weight.grad.abs().max() > 0 for layer in (critic[0], critic[2]))


def test_experts(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    space = run_documented("experts: transformers", model=model, tokens=torch.arange(32).view(2, 16), folder=tmp_path)
    assert "QuantizedMixtralExperts" in str(space["bfp"].summary(model))
    read = MixtralForCausalLM.from_pretrained(tmp_path)
    for name, param in model.named_parameters():
        value = param.dequantize() if isinstance(param, bfp.QuantizedTensor) else param
        assert torch.equal(read.get_parameter(name), value)


# What these packages warn of themselves.


def test_a_release_is_loaded_trained_and_served(tmp_path):
    from blockfp.integrations.transformers import BlockfpConfig, save_in_layout

    wide = {"hidden_size": 256, "intermediate_size": 384}
    family("Llama", **wide).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain", quantization_config=BlockfpConfig("fp8_block", modules_to_not_convert=["lm_head"]))
    save_in_layout(plain, tmp_path / "release", "fine-grained-fp8")

    model = run_documented("release: load", folder=tmp_path / "release")["model"]
    held = [param for param in model.parameters() if is_quantized(param)]
    before = [param.codes.clone() for param in held]
    assert len(held) == 14
    tokens = torch.arange(16).repeat(16, 1) * 3
    arguments = TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    run_documented("release: train", model=model, arguments=arguments, data=data, tuned=tmp_path / "tuned")
    assert all(not torch.equal(param.codes, old) for param, old in zip(held, before, strict=True))
    assert {param.format.name for param in held} == {"fp8_e4m3_128x128_fp32"}
    run_documented("release: serve", model=model, served=tmp_path / "served")
    values = bfp.high_precision_state_dict(model)
    # transformers dequantizes on a CPU.
    for folder in ("tuned", "served"):
        again = bfp.high_precision_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / folder))
        assert all(torch.equal(value, again[name]) for name, value in values.items())
