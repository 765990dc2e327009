"""transformers' Trainer on models that its quantizer "blockfp" has loaded: optimizers, resuming, checkpointing, DDP, FSDP2."""

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path

import gloo
import pytest
import torch
import torch.distributed as dist
from hf_models import family, is_quantized
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import blockfp.torch as bfp
from blockfp.integrations.transformers import BlockfpConfig, save_in_layout

# transformers' and accelerate's, of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


def rows():
    tokens = torch.arange(16).repeat(16, 1) * 3 + torch.arange(16).view(-1, 1) % 4
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, folder, steps=3, *, own=False, **options):
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant", **{"save_strategy": "no", **options},
    )  # fmt: skip
    chosen = {} if own else {"optimizer_cls_and_kwargs": (bfp.AdamW, {"lr": 1e-2})}
    return Trainer(model, arguments, train_dataset=rows(), **chosen)


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def values_of_model(model):
    return {name: value.clone() for name, value in bfp.high_precision_state_dict(model).items()}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


@pytest.mark.parametrize(
    ("name", "recipe", "own"),
    [
        ("Llama", "nvfp4", True),
        ("Qwen3Moe", "mxfp8", True),
        ("Llama", "nvfp4", False),
        ("Qwen3Moe", "mxfp8", False),
        ("Llama", "fp8_delayed", False),
    ],
)
def test_trains_as_a_converted_model_does(name, recipe, own, tmp_path):
    family(name).save_pretrained(tmp_path / "plain")
    weights = "high_precision" if own else "quantized"
    config = BlockfpConfig(recipe, weights=weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    plain = bfp.convert(plain, recipe, weights=weights)
    for name, buffer in plain.named_buffers():
        if name.endswith("rng_key"):
            model.get_buffer(name).copy_(buffer)
    before = values_of_model(model)
    found = []
    for one in (model, plain):
        run = trainer(one, tmp_path / "run", own=own)
        run.train()
        found.append(losses(run))
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert found[0][-1] < found[0][0]
    after = values_of_model(model)
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(after[name], value) for name, value in values_of_model(plain).items())


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_resumes_to_the_bit(weights, tmp_path):
    family("Qwen3Moe").save_pretrained(tmp_path / "plain")
    states = []
    for resumed in (False, True):
        config = BlockfpConfig("nvfp4", weights=weights)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
        own = weights == "high_precision"
        run = trainer(model, tmp_path / "run", 4, own=own, save_strategy="steps", save_steps=2)
        run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2") if resumed else None)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    # A checkpoint is a model that from_pretrained reads.
    folder = tmp_path / "run" / "checkpoint-4"
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "blockfp"
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in states[1].items())


def test_gradient_checkpointing(tmp_path):
    family("Llama").save_pretrained(tmp_path / "plain")
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=BlockfpConfig("mxfp8"))
        run = trainer(model, tmp_path / "run", gradient_checkpointing=checkpointing)
        run.train()
        found.append((losses(run), values_of_model(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_frozen_codes_beside_adapters(tmp_path):
    from peft import LoraConfig, get_peft_model

    family("Llama").save_pretrained(tmp_path / "plain")
    config = BlockfpConfig("nvfp4", trainable=False, modules_to_not_convert=["lm_head"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    codes = {name: param.codes.clone() for name, param in base.named_parameters() if is_quantized(param)}
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "up_proj"]))
    run = trainer(model, tmp_path / "run", own=True)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    held = {name.replace("base_layer.", ""): param for name, param in base.named_parameters() if is_quantized(param)}
    assert held.keys() == codes.keys()
    assert all(torch.equal(held[name].codes, value) for name, value in codes.items())


def test_adapters_on_the_experts_of_a_gpt_oss_release(tmp_path):
    from peft import LoraConfig, get_peft_model

    from blockfp.integrations.peft import register

    family("GptOss").save_pretrained(tmp_path / "plain")
    config = BlockfpConfig("mxfp4", modules_to_not_convert=["self_attn", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    save_in_layout(model, tmp_path / "release", "mxfp4")
    config = BlockfpConfig("mxfp8", trainable=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "release", quantization_config=config)
    held = [param for param in base.parameters() if is_quantized(param)]
    codes = [param.codes.clone() for param in held]
    assert {param.format.name for param in held} == {"mxfp4_e2m1"}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(base, register(LoraConfig(target_modules=["q_proj"], target_parameters=experts)))
    run = trainer(model, tmp_path / "run", own=True)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    adapters = {name: param for name, param in model.named_parameters() if "lora_B" in name}
    assert sum("experts" in name for name in adapters) == 4
    assert all(param.abs().max() > 0 for param in adapters.values())
    assert all(torch.equal(param.codes, old) for param, old in zip(held, codes, strict=True))


def _in_processes(rank):
    logging.getLogger("transformers").disabled = True
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    folder = Path(where[0])
    if rank == 0:
        family("Qwen3Moe").save_pretrained(folder / "plain")
    dist.barrier()
    return folder


@gloo.on(2)
def test_ddp(rank):
    folder = _in_processes(rank)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=BlockfpConfig("mxfp8"))
    before = values_of_model(model)
    run = trainer(model, folder / "run", ddp_backend="gloo")
    run.train()
    assert run.accelerator.distributed_type.value == "MULTI_CPU"
    assert losses(run)[-1] < losses(run)[0]
    after = values_of_model(model)
    assert all(not torch.equal(value, before[name]) for name, value in after.items())
    for value in after.values():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(value, first)


def _fsdp2_trainer(folder, run="run", kind="SHARDED_STATE_DICT"):
    """accelerate takes FSDP on accelerators only: its state is told so here; all else is its own code, and Trainer's."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=BlockfpConfig("mxfp8"))
    run = trainer(model, folder / run, 3, ddp_backend="gloo", save_strategy="steps", save_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False, state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )  # fmt: skip
    run.accelerator.state.fsdp_plugin, run.is_fsdp_enabled = plugin, True
    for state in (PartialState(), run.accelerator.state):
        state.distributed_type = DistributedType.FSDP
    return run


@gloo.on(2)
def test_fsdp2(rank):
    folder = _in_processes(rank)
    run = _fsdp2_trainer(folder)
    before = values_of_model(run.model)
    run.train()
    assert run.accelerator.is_fsdp2
    assert losses(run)[-1] < losses(run)[0]
    assert all(isinstance(param, torch.distributed.tensor.DTensor) for param in run.model.parameters())
    after = values_of_model(run.model)
    assert all(not torch.equal(value, before[name]) for name, value in after.items())

    # What is saved for others is read by from_pretrained.
    run.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    run.save_model(str(folder / "saved"))
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert all(torch.equal(value, after[name]) for name, value in values_of_model(again).items())
    save_in_layout(run.model, folder / "layout", "compressed-tensors")
    dist.barrier()
    config = BlockfpConfig("mxfp8", trainable=False)
    again = AutoModelForCausalLM.from_pretrained(folder / "layout", quantization_config=config)
    assert all(torch.equal(value, after[name]) for name, value in values_of_model(again).items())

    # Checkpoints of either kind resume to the bit.
    _fsdp2_trainer(folder, "full", "FULL_STATE_DICT").train()
    for where, kind in (("run", "SHARDED_STATE_DICT"), ("full", "FULL_STATE_DICT")):
        resumed = _fsdp2_trainer(folder, where, kind)
        resumed.train(resume_from_checkpoint=str(folder / where / "checkpoint-2"))
        assert all(torch.equal(value, after[name]) for name, value in values_of_model(resumed.model).items())
