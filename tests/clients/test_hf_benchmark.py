"""benchmarks/hf_gpu.py with models of a few thousand parameters, on this CPU."""

import sys
from pathlib import Path

import pytest

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
