"""Releases of models with adapters in them: readers would find none of the layers under them, so none is written."""

import pytest
import torch
from hf_models import family
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from typer.testing import CliRunner

import blockfp.torch as bfp
from blockfp import cli
from blockfp.integrations.peft import register
from blockfp.integrations.transformers import save_in_layout, stream_in_layout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
TARGETS = ["q_proj", "v_proj"]
CONFIGS = {
    "lora": LoraConfig(target_modules=TARGETS, r=4),
    "modules_to_save": LoraConfig(target_modules=TARGETS, r=4, modules_to_save=["lm_head"]),
    "loha": LoHaConfig(target_modules=TARGETS, r=4),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "oft": OFTConfig(target_modules=TARGETS, oft_block_size=8, r=0),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
MERGE = r"merge_and_unload\(\)"


def converted():
    return bfp.convert(family("Llama", **BLOCKS), "fp8_block", filter_fn=lambda path, layer: path != "lm_head")


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_written_or_sent(name, base, tmp_path):
    model = get_peft_model(converted(), CONFIGS[name])
    if base:
        model = model.get_base_model()
        if name == "prefix":
            # It adds nothing to the model itself.
            save_in_layout(model, tmp_path / "whole", "fine-grained-fp8")
            return
    with pytest.raises(ValueError, match=MERGE):
        save_in_layout(model, tmp_path / "new", "fine-grained-fp8")
    with pytest.raises(ValueError, match=MERGE):
        stream_in_layout(model, "fine-grained-fp8")
    with pytest.raises(ValueError, match=MERGE):
        bfp.stream_weights(model, layout="fine-grained-fp8")
    assert not list(tmp_path.iterdir())


def test_a_merged_one_is_written(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(converted(), register(LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False)))
    model.merge_adapter()
    with pytest.raises(ValueError, match=MERGE):
        save_in_layout(model, tmp_path, "fine-grained-fp8")
    model = model.merge_and_unload()
    save_in_layout(model, tmp_path, "fine-grained-fp8")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert set(family("Llama", **BLOCKS).state_dict()) <= names
    assert set(bfp.stream_weights(model, layout="fine-grained-fp8").shapes) == names


def test_files_of_layouts_are_not_made_either(tmp_path):
    """Of checkpoints and files, whose own layout keeps whatever names there are."""
    model = get_peft_model(converted(), CONFIGS["lora"])
    bfp.save_checkpoint(tmp_path / "run", model, step=1)
    run = lambda *arguments: CliRunner().invoke(cli.app, list(map(str, arguments)))  # noqa: E731
    done = run("export", tmp_path / "run", tmp_path / "new", "--to", "fine-grained-fp8")
    assert done.exit_code == 2
    assert "merge_and_unload()" in " ".join(done.output.split())
    assert run("export", tmp_path / "run", tmp_path / "own.safetensors").exit_code == 0
    done = run("convert", tmp_path / "own.safetensors", tmp_path / "new", "--layout", "fine-grained-fp8")
    assert done.exit_code == 2
    assert "merge_and_unload()" in " ".join(done.output.split())
    assert not (tmp_path / "new").exists()
