"""examples/pretrain.py on a GPU, compiled: it learns, and goes on where it was."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

LIMIT = 300_000
RECIPES = ("bf16", "fp8_current", "mxfp8", "nvfp4")

# torch 2.11's compiler looks at .grad of what is no leaf, and warns itself of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_run_goes_on(recipe, tmp_path):
    import pretrain
    import pretrain_text

    pretrain_text.prepare(tmp_path / "text", LIMIT, [Path(__file__).parents[1]])

    def sitting(name, *more):
        fixed = f"--recipe {recipe} --size 1m --tokens 40960 --text-bytes {LIMIT} --evaluate-rows 16 --evaluate-every 10"
        every = "--device cuda --compile --log-every 5 --observe-every 5 --save-every 0"
        options = pretrain.parsed([str(tmp_path / name), *fixed.split(), *every.split(), *more])
        finished = pretrain.Training(options, pretrain.time.monotonic()).run()
        return finished, [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    finished, whole = sitting("whole")
    assert finished
    assert [line["step"] for line in whole] == [5, 10, 15, 20]
    assert whole[-1]["held_out_loss"] < whole[0]["loss"] - 0.5
    assert whole[-1]["tokens_per_second"] > 0
    assert all(bool(line["sqnr"]) is (recipe != "bf16") for line in whole)
    assert not sitting("cut", "--minutes", "0")[0]
    finished, cut = sitting("cut")
    assert finished
    # Attention's backward adds in no fixed order.
    for one, other in zip(cut, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
