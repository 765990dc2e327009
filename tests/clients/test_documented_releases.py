"""The blocks of "Fine-tune an FP8 release with transformers", one after another, as they are printed."""

import pytest
import torch
from documented import run_documented
from hf_models import family, is_quantized, load
from transformers import AutoModelForCausalLM, TrainingArguments

import blockfp.torch as bfp

# What these packages warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


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
