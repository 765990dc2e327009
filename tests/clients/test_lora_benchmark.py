"""benchmarks/lora_gpu.py with models of a few thousand parameters, on this CPU."""

import importlib.util
import sys
import warnings
from pathlib import Path

import gloo
import pytest
import torch

pytest.importorskip("peft")
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
    gloo.run(world, __file__, "rows")


def test_shapes_are_those_of_gpt_oss_20b():
    """transformers' own defaults are those of the model of 117 billion."""
    from transformers import GptOssForCausalLM

    sys.path.append(str(BENCHMARKS))
    sys.modules.pop("ranks", None)
    import lora_gpu

    with torch.device("meta"):
        model = GptOssForCausalLM(lora_gpu.config_of(lora_gpu.arguments([])))
    assert sum(param.numel() for param in model.parameters()) == 20_914_757_184
