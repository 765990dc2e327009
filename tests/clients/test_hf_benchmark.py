"""benchmarks/hf_gpu.py and benchmarks/lora_gpu.py with models of a few thousand parameters, on this CPU."""

import importlib.util
import sys
import warnings
from pathlib import Path

import gloo
import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import hf_gpu


@pytest.mark.parametrize("model", hf_gpu.CONFIGS)
def test_eager_steps_of_recipes(model, capsys):
    contenders = ["bf16", "torchao", "fp8_block", "nvfp4"]
    given = ["--tiny", "--models", model, "--cases", "eager", "--steps", "1", "--warm", "1", "--contenders", *contenders]
    shown = []
    found = hf_gpu.rows(hf_gpu.arguments(given), shown.append)
    assert shown == found
    # torchao is compared where it is compiled.
    assert [row["contender"] for row in found] == ["bf16", "fp8_block", "nvfp4"]
    for row in found:
        assert row["ms"] > 0, row
        hf_gpu.show(row)
    # bfloat16 weights, gradients and two moments; then codes, bfloat16 gradients and fp32 masters and moments.
    plain, *ours = (row["state_bytes_a_parameter"] for row in found)
    assert plain == pytest.approx(8, abs=0.01)
    assert all(14 < each < 16 for each in ours)
    assert "nvfp4" in capsys.readouterr().out


def test_no_contender_begins_late():
    found = hf_gpu.rows(hf_gpu.arguments(["--tiny", "--models", "llama", "--cases", "eager", "--seconds", "-1"]), str)
    assert len(found) == len(hf_gpu.CONTENDERS) - 1
    assert all("left_out" in row for row in found)


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def rows(rank):
    warnings.simplefilter("ignore")
    sys.path.append(str(BENCHMARKS))
    # What `gloo` calls this file; the benchmarks have one of that name.
    del sys.modules["ranks"]
    import lora_gpu

    contenders = lora_gpu.CONTENDERS if torch.distributed.get_world_size() == 1 else ["bf16", "mxfp4", "bitsandbytes"]
    given = ["--tiny", "--layers", "1", "--tokens", "16", "--steps", "1", "--warm", "1", "--contenders", *contenders]
    found = lora_gpu.rows(lora_gpu.arguments(given), torch.device("cpu"))
    assert [row["contender"] for row in found] == list(contenders)
    # bitsandbytes has a build for CPUs, which is not among what the tests need.
    there = torch.distributed.get_world_size() == 1 and importlib.util.find_spec("bitsandbytes") is not None
    assert ("left_out" not in found[-1]) is there, found[-1]
    figures = found if there else found[:-1]
    # Codes take what they say beside bf16: all but embeddings, norms, routers and biases, and adapters in float32.
    counted = {row["contender"]: row["counted"] for row in figures}
    assert all(count < counted["bf16"] for name, count in counted.items() if name != "bf16"), counted
    # The same adapters everywhere, and losses of one model.
    assert len({row["adapters"] for row in figures}) == 1, found
    assert all(abs(row["loss"][0] - figures[0]["loss"][0]) < 0.1 for row in figures), found


@pytest.mark.parametrize("world", [1, 2])
def test_every_contender_runs(world):
    pytest.importorskip("peft")
    gloo.run(world, __file__, "rows")


def test_shapes_are_those_of_gpt_oss_20b():
    """transformers' own defaults are those of the model of 117 billion."""
    pytest.importorskip("peft")
    from transformers import GptOssForCausalLM

    sys.path.append(str(BENCHMARKS))
    sys.modules.pop("ranks", None)
    import lora_gpu

    with torch.device("meta"):
        model = GptOssForCausalLM(lora_gpu.config_of(lora_gpu.arguments([])))
    assert sum(param.numel() for param in model.parameters()) == 20_914_757_184
