"""transformers: models saved and loaded, and trained by its Trainer, with its optimizer and with blockfp's."""

import logging
import warnings

import pytest
import torch
from same_tensors import assert_equal
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D, id_tensor_storage

import blockfp.torch as bfp

RECIPES = ("mxfp8", "fp8_current", "fp8_delayed", "nvfp4")


def llama(seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (16, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_saved_and_loaded(recipe, weights, tmp_path):
    model = bfp.convert(llama().to(torch.bfloat16), recipe, weights=weights)
    state = bfp.high_precision_state_dict(model)
    model.save_pretrained(tmp_path, state_dict=dict(state))  # which it empties
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.bfloat16)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == state.keys()
    for name, param in model.named_parameters():
        values = param.detach()
        values = values.dequantize() if isinstance(values, bfp.QuantizedTensor) else getattr(values, "values", values)
        assert torch.equal(loaded.get_parameter(name), values if torch.is_tensor(values) else param), name
    again = bfp.convert(llama(5).to(torch.bfloat16), recipe, weights=weights)
    assert not any(again.load_state_dict(loaded.state_dict()))
    for name, value in bfp.high_precision_state_dict(again).items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_codes_are_no_weights_for_from_pretrained(recipe, tmp_path):
    model = bfp.convert(llama(), recipe)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)q_proj\.weight.*MISMATCH|size mismatch|mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = llama(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for .*q_proj\.weight.*\[0, 32, 32\]"):
        plain.load_state_dict(model.state_dict(), strict=False)
    # Its own layout comes back to the bit.
    from safetensors.torch import load_file

    other = bfp.convert(llama(4), recipe)
    assert not any(other.load_state_dict(load_file(tmp_path / "model.safetensors")))
    assert_equal(other.parameters(), model.parameters())


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_weights_are_told_apart(weights):
    model = bfp.convert(llama(), "mxfp8", weights=weights)
    assert len({id_tensor_storage(param) for param in model.parameters()}) == len(list(model.parameters()))
    bytes_ = sum(param.nelement() * param.element_size() for param in model.parameters())
    assert model.get_memory_footprint(return_buffers=False) == bytes_
    assert model.num_parameters() == llama().num_parameters()


def _trainer(model, folder, optimizer, steps, **options):
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], save_strategy="steps",
        save_steps=2, use_cpu=True, disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant", **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows(), optimizers=(optimizer, None))


@pytest.mark.parametrize("own", [True, False], ids=["its own AdamW", "bfp.AdamW"])
def test_trainer(own, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    states = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' and accelerate's, of their own
        for resumed in (False, True):
            model = bfp.convert(llama(), "nvfp4", weights="high_precision" if own else "quantized")
            before = bfp.high_precision_state_dict(model)
            before = {name: value.clone() for name, value in before.items()}
            optimizer = None if own else bfp.AdamW(model.parameters(), lr=1e-2)
            trainer = _trainer(model, tmp_path / "run", optimizer, 4)
            result = trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2") if resumed else None)
            assert result.metrics["train_loss"] < 4.4
            states.append(bfp.high_precision_state_dict(trainer.model))
            moved = [not torch.equal(value, before[name]) for name, value in states[-1].items()]
            assert all(moved)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_transposed_layer_is_converted_under_another_default_dtype():
    layer = Conv1D(64, 32)
    torch.set_default_dtype(torch.float64)
    try:
        assert bfp.convert(nn.Sequential(layer), "mxfp8")[0].weight.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
