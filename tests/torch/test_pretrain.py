"""examples/pretrain.py: it learns, goes on where it was, and is judged on text that it has not seen."""

import json
import os
import sys
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import pretrain
import pretrain_metrics
import pretrain_model
import pretrain_text

import blockfp.torch as bfp
from blockfp import recipes

LIMIT = 300_000
STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A prepared text of this repository's own files."""
    folder = tmp_path_factory.mktemp("pretrain") / "text"
    pretrain_text.prepare(folder, LIMIT, [Path(__file__).parents[1]])
    return folder


def options(folder, text, recipe, *more):
    size = pretrain_model.SIZES["tiny"]
    tokens = STEPS * size.batch * size.context
    fixed = f"--size tiny --tokens {tokens} --text {text} --text-bytes {LIMIT} --evaluate-rows 16 --evaluate-every 6"
    every = "--device cpu --log-every 2 --observe-every 4 --save-every 0"
    return pretrain.parsed([str(folder), "--recipe", recipe, *fixed.split(), *every.split(), *more])


def sitting(options):
    training = pretrain.Training(options, pretrain.time.monotonic())
    return training.run(), training


def lines(folder):
    """The metrics without what depends on the clock."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in ("tokens_per_second", "mfu")}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def on_two_ranks(rank):
    """Goes on with the run in the folder, sharded; the first time one rank alone is told to stop."""
    folder, text = Path(os.environ["PRETRAIN_RUN"]), Path(os.environ["PRETRAIN_TEXT"])
    training = pretrain.Training(options(folder, text, "nvfp4"), pretrain.time.monotonic())
    assert training.sharded
    assert training.step == 2
    if rank == 1:
        training.stop()
    assert not training.run()
    assert training.step == 4
    finished, training = sitting(options(folder, text, "nvfp4"))
    assert finished
    assert training.step == STEPS


@pytest.fixture(scope="module")
def nvfp4(text, tmp_path_factory):
    """The folder of a run that nothing has interrupted; stochastic rounding and rotation are part of it."""
    folder = tmp_path_factory.mktemp("whole") / "nvfp4"
    assert sitting(options(folder, text, "nvfp4"))[0]
    return folder


def test_it_learns_and_says_what_it_measures(nvfp4):
    found = lines(nvfp4)
    assert [line["step"] for line in found] == list(range(2, STEPS + 1, 2))
    assert found[-1]["held_out_loss"] < found[0]["loss"] - 1
    assert [line["step"] for line in found if "held_out_loss" in line] == [6, 12]
    assert [len(line.get("held_out_rows", ())) for line in found] == [0, 0, 0, 0, 0, 16]
    assert np.mean(found[-1]["held_out_rows"]) == pytest.approx(found[-1]["held_out_loss"], abs=1e-5)
    observed = [line["sqnr"] for line in found if line["sqnr"]]
    assert len(observed) == 3
    for sqnr in observed:
        assert set(sqnr) == {*(f"{o} {d}wise" for o in ("input", "gradient") for d in ("row", "column")), "weight"}
        assert all(10 < one["least"] <= one["mean"] < 25 for one in sqnr.values())
        # Stochastic rounding errs more than rounding to nearest.
        assert sqnr["gradient rowwise"]["mean"] < sqnr["input rowwise"]["mean"] - 2
    about = json.loads((nvfp4 / "run.json").read_text())
    assert (about["recipe"], about["steps"], len(about["sittings"])) == ("nvfp4", STEPS, 1)
    assert (nvfp4 / "plot.png").stat().st_size


def test_an_interrupted_run_has_the_same_losses(nvfp4, text, tmp_path):
    """Stopped after every line, and once with lines that its checkpoint knows nothing of, the last cut short."""
    folder, finished, sittings = tmp_path / "nvfp4", False, 0
    while not finished:
        finished, _ = sitting(options(folder, text, "nvfp4", "--minutes", "0"))
        sittings += 1
        with (folder / "metrics.jsonl").open("a") as file:
            if not finished:
                file.write('{"step": 99, "loss": 0.0}\n{"step": 100, "lo')
    assert sittings == STEPS // 2
    assert lines(folder) == lines(nvfp4)
    assert len(json.loads((folder / "run.json").read_text())["sittings"]) == sittings
    assert sitting(options(folder, text, "nvfp4"))[0]
    assert lines(folder) == lines(nvfp4)


def test_a_run_goes_on_on_two_ranks(nvfp4, text, tmp_path, monkeypatch):
    folder = tmp_path / "nvfp4"
    assert not sitting(options(folder, text, "nvfp4", "--minutes", "0"))[0]
    monkeypatch.setenv("PRETRAIN_RUN", str(folder))
    monkeypatch.setenv("PRETRAIN_TEXT", str(text))
    gloo.run(2, __file__, "on_two_ranks")
    whole, found = lines(nvfp4), lines(folder)
    assert [line["step"] for line in found] == [line["step"] for line in whole]
    for key in ("loss", "held_out_loss", "held_out_rows"):
        ours, theirs = ([line[key] for line in each if key in line] for each in (found, whole))
        np.testing.assert_allclose(ours, theirs, rtol=0.02)
    assert [sitting["ranks"] for sitting in json.loads((folder / "run.json").read_text())["sittings"]] == [1, 2, 2]


def test_bf16_quantizes_nothing(text, tmp_path, monkeypatch, capsys):
    """By the command itself; its first weights are those of every recipe."""
    folder = tmp_path / "bf16"
    arguments = ["--size", "tiny", "--tokens", "1024", "--text", str(text), "--text-bytes", str(LIMIT), "--evaluate-rows", "8"]
    arguments += ["--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", str(folder), *arguments])
    monkeypatch.setattr(pretrain.signal, "signal", lambda *_: None)
    pretrain.main()
    assert capsys.readouterr().out.endswith("finished\n")
    (line,) = lines(folder)
    assert line["sqnr"] == {}
    how = {"shard": False, "compiled": False}
    size, device = pretrain_model.SIZES["tiny"], torch.device("cpu")
    plain = pretrain_model.build(size, None, 0, device, **how)
    quantized = pretrain_model.build(size, recipes.mxfp8(), 0, device, **how)
    for (name, p), q in zip(plain.named_parameters(), quantized.parameters(), strict=True):
        # What masters are made of.
        assert torch.equal(p, q if q.__class__ is p.__class__ else q.initial.to(p.dtype)), name


def test_held_out_text_is_not_trained_on(text):
    roots = [Path(__file__).parents[1]]
    named = pretrain_text.files(roots)
    sides = [{path for name, path in named if pretrain_text.is_held_out(name) is side} for side in (True, False)]
    assert all(sides)
    assert not sides[0] & sides[1]
    training, held_out = pretrain_text.collect(roots, 10**9)
    long = [{p for p in side.split(b"\n\n") if len(p) >= pretrain_text.SHORT} for side in (training, held_out)]
    assert all(long)
    # Where a file ends the next begins without a paragraph's end.
    assert len(long[0] & long[1]) == 0
    paragraphs = [p for p in training.split(b"\n\n") if len(p) >= pretrain_text.SHORT]
    assert len(paragraphs) == len(set(paragraphs))
    prepared = pretrain_text.read(text, LIMIT)
    assert len(prepared.training) <= LIMIT
    assert len(prepared.held_out) <= LIMIT // pretrain_text.HELD_OUT
    again = text.parent / "again"
    pretrain_text.prepare(again, LIMIT, roots)
    assert pretrain_text.read(again, LIMIT).digest == prepared.digest


def test_every_piece_comes_once_an_epoch():
    order = pretrain_text.Order(np.arange(100, dtype=np.uint8), 9, seed=3)
    assert order.pieces == 11
    rows = order.rows(0, 22)
    for epoch in (rows[:11], rows[11:]):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 99, 9))
    assert rows[:11].tolist() != rows[11:].tolist()
    # It goes on anywhere.
    np.testing.assert_array_equal(pretrain_text.Order(order.text, 9, seed=3).rows(7, 8), rows[7:15])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "1"], "another run: seed 0 there, 1 here"),
        (["--batch", "3"], "--evaluate-rows of --batch; got 3 and 16"),
        (["--tokens", "100"], "--tokens must be a step's 512 or more, got 100"),
        (["--text-bytes", "5"], "a limit of 300000 bytes, not 5"),
        (["--recipe", "fp3"], "recipe 'fp3' is not known"),
    ],
)
def test_what_can_not_be(nvfp4, text, more, message):
    before = (nvfp4 / "run.json").read_bytes(), (nvfp4 / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        pretrain.Training(options(nvfp4, text, "nvfp4", *more), 0.0)
    assert before == ((nvfp4 / "run.json").read_bytes(), (nvfp4 / "metrics.jsonl").read_bytes())


def test_intervals_that_do_not_fit(tmp_path, capsys):
    with pytest.raises(SystemExit):
        pretrain.parsed([str(tmp_path), "--log-every", "10", "--save-every", "15"])
    assert "--save-every must be a multiple of --log-every, which is 1 or more; got 15 and 10" in capsys.readouterr().err


def test_names_of_runs():
    """What stands behind a recipe's name goes to the recipe, the model or the optimizer."""
    assert pretrain_model.recipe_of("nvfp4+guarded") == recipes.nvfp4(guarded=True)
    assert pretrain_model.recipe_of("nvfp4_4over6+squared") == recipes.nvfp4_4over6(squared_errors=True)
    assert pretrain_model.recipe_of("torchao") is pretrain_model.recipe_of("bf16+moments_fp8") is None
    assert pretrain_model.arguments_of("torchao", "build") == {"torchao": True}
    assert pretrain_model.arguments_of("mxfp8+master_none+moments_fp8", "optimizer") == {"master": None, "moments": "fp8"}
    with pytest.raises(ValueError, match=r"option 'ende' is not known; choose of guarded"):
        pretrain_model.recipe_of("mxfp8+ende")
    with pytest.raises(TypeError, match="guarded"):
        pretrain_model.recipe_of("mxfp8+guarded")
    size = pretrain_model.SIZES["3m"]
    how = {"shard": False, "compiled": False, **pretrain_model.arguments_of("mxfp8+ends", "build")}
    model = pretrain_model.build(size, recipes.mxfp8(), 0, torch.device("cpu"), **how)
    kinds = {name: isinstance(layer, bfp.Linear) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert kinds == {name: name.startswith(("blocks.1.", "blocks.2.")) for name in kinds}


@pytest.mark.parametrize("name", ["mxfp8+master_none", "nvfp4+guarded+moments_fp8"])
def test_runs_with_options(name, text, tmp_path):
    finished, training = sitting(options(tmp_path / "run", text, name))
    assert finished
    (state,) = {frozenset(state) for p, state in training.optimizer.state.items() if isinstance(p, bfp.QuantizedTensor)}
    assert ("master" in state, "exp_avg_scales" in state) == ("master_none" not in name, "fp8" in name.partition("moments")[2])
    found = lines(tmp_path / "run")
    assert found[-1]["held_out_loss"] < found[0]["loss"] - 0.5


def test_recipes_with_ocps_rule():
    recipe = pretrain_model.recipe_of("mxfp4_floor")
    assert str(recipe.weight.format) == "mxfp4_e2m1_32x32_floor"
    assert str(recipe.gradient_columnwise.format) == "mxfp6_e3m2_floor"
    assert pretrain_model.recipe_of("nvfp4") == recipes.nvfp4()


def test_sizes_are_what_they_are_called():
    for name, size in pretrain_model.SIZES.items():
        if name != "tiny":
            with torch.device("meta"):
                parameters = sum(p.numel() for p in pretrain_model.Transformer(size).parameters())
            assert abs(parameters / 1e6 / float(name[:-1]) - 1) < 0.15, name
    # 6 operations a weight of a matrix and token, and attention's.
    assert 6 * 124e6 < pretrain_model.operations(pretrain_model.SIZES["124m"]) < 6.8 * 124e6


def test_numbers_that_json_has_not(tmp_path):
    metrics = pretrain_metrics.Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.add({"step": 1, "loss": float("nan"), "sqnr": {"weight": {"mean": float("inf")}}})
    assert pretrain_metrics.read(metrics.path) == [{"step": 1, "loss": None, "sqnr": {"weight": {"mean": None}}}]
