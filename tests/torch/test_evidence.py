"""benchmarks/evidence.py: a list of runs made in pieces, their tables, and docs/evidence.md."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import evidence
import evidence_tables
import pretrain
import pretrain_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"
LIMIT = 300_000
FIXED = [
    "--text-bytes",
    str(LIMIT),
    "--evaluate-rows",
    "16",
    "--log-every",
    "2",
    "--observe-every",
    "2",
    "--save-every",
    "0",
    "--device",
    "cpu",
]


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs the programs that `evidence` starts here; returns the recipes and seeds that were begun."""
    begun = []

    def run(command, check):
        assert check
        assert command[:2] == [sys.executable, str(ROOT / "examples" / "pretrain.py")]
        options = pretrain.parsed([*command[2:], "--evaluate-every", "0"])
        begun.append((options.recipe, options.seed))
        # Time is up once, in the middle of the second run.
        options.minutes = 0.0 if len(begun) == 2 else options.minutes
        pretrain.Training(options, pretrain.time.monotonic()).run()

    monkeypatch.setattr(subprocess, "run", run)
    return begun


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evidence.py", *map(str, arguments)])
    evidence.main()


def test_a_list_of_runs_in_pieces(tmp_path, monkeypatch, in_this_process, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results.json"
    pretrain_text.prepare(runs / "text", LIMIT, [ROOT / "tests"])
    listed = ["--size", "tiny", "--tokens", 2048, "--runs", "bf16:0,1", "mxfp4", "mxfp4_floor", "--results", results]
    command(monkeypatch, "run", runs, *listed, "--keep-checkpoints", "--", *FIXED)
    assert in_this_process == [("bf16", 0), ("bf16", 1)]
    assert capsys.readouterr().out.endswith("time is up in bf16:1\n")
    assert [run["seed"] for run in evidence.read_results(results)["runs"]] == [0]

    command(monkeypatch, "operands", runs / "bf16-0", "--recipes", "mxfp4", "mxfp4_floor", "--results", results)
    command(monkeypatch, "run", runs, *listed, "--", *FIXED)
    assert in_this_process[2:] == [("bf16", 1), ("mxfp4", 0), ("mxfp4_floor", 0)]
    assert capsys.readouterr().out.endswith("all runs are finished\n")
    assert not (runs / "mxfp4-0" / "checkpoints").exists()

    # On another machine, which has the results alone.
    command(monkeypatch, "run", tmp_path / "elsewhere", *listed, "--", *FIXED)
    assert len(in_this_process) == 5
    found = evidence.read_results(results)
    assert [(run["recipe"], run["seed"], len(run["loss"]), len(run["sqnr"])) for run in found["runs"]] == [
        ("bf16", 0, 2, 0),
        ("bf16", 1, 2, 0),
        ("mxfp4", 0, 2, 2),
        ("mxfp4_floor", 0, 2, 2),
    ]
    operands = found["operands"]
    assert set(operands["mxfp4"]) == set(evidence_tables.OPERANDS)
    # Both rules round the same elements in most blocks, and ceil never cuts off.
    assert operands["mxfp4"]["gradient rowwise"] > operands["mxfp4_floor"]["gradient rowwise"]

    with pytest.raises(ValueError, match="is not comparable to the results"):
        evidence.add(found, dict(found["runs"][0], common=dict(found["common"], tokens=1)))
    command(monkeypatch, "show", results)
    printed = capsys.readouterr().out
    assert [len(run["held_out_rows"]) for run in found["runs"]] == [16] * 4
    kept = json.loads((runs / "mxfp4-0" / "result.json").read_text())
    assert kept["common"] == found["common"]
    assert dict(kept, common=None) == dict(found["runs"][2], common=None)
    assert f"| bf16 | 2 | {(found['runs'][0]['held_out_loss'] + found['runs'][1]['held_out_loss']) / 2:.4f} | ± " in printed
    assert "not run" in printed


def test_time_that_is_up_before_it_began(tmp_path, monkeypatch, in_this_process, capsys):
    command(monkeypatch, "run", tmp_path, "--runs", "nvfp4:3", "--results", tmp_path / "r.json", "--minutes", "0.1")
    assert capsys.readouterr().out == "time is up; the next is nvfp4:3\n"
    assert in_this_process == []


def test_a_recipe_that_there_is_not(tmp_path, monkeypatch, in_this_process):
    """Before any run."""
    with pytest.raises(ValueError, match="recipe 'nvfp3' is not known"):
        command(monkeypatch, "run", tmp_path, "--runs", "bf16", "nvfp3", "--results", tmp_path / "r.json")
    assert in_this_process == []


def results_of(**losses):
    runs = [{"recipe": r, "seed": i, "held_out_loss": x} for r, found in losses.items() for i, x in enumerate(found)]
    return {"runs": runs, "operands": {"nvfp4": {"weight": 19.0}, "nvfp4_4over6": {"weight": 20.5}}}


@pytest.mark.parametrize(
    ("fours", "said"),
    [
        ([1.7, 1.8], "confirmed: -0.3000 is outside ± 0.2828"),
        ([2.3, 2.4], "contradicted: +0.3000 is outside ± 0.2828"),
        ([2.0, 2.2], "not decided: +0.0500 is within ± 0.2828"),
        ([], "not decided"),
    ],
)
def test_verdicts_without_an_interval(fours, said):
    """Beside a spread of sqrt(0.02) = 0.1414 between seeds of bf16."""
    change = [a - b for a, b in zip(fours, [2.0, 2.1], strict=False)]
    assert (
        evidence_tables.verdict(change, evidence_tables.spread({0: {"held_out_loss": 1.9}, 1: {"held_out_loss": 2.1}})) == said
    )


@pytest.mark.parametrize(
    ("fours", "said"),
    [
        ([1.7, 1.8, 1.82], "confirmed"),
        ([2.3, 2.42, 2.4], "contradicted"),
        ([2.0, 2.2, 2.0], "not decided"),
        ([2.6], "contradicted"),
        ([2.1], "not decided"),
    ],
)
def test_verdicts_by_intervals(fours, said):
    """Student's, as scipy has it; a single run has the variance of those with several seeds."""
    results = results_of(bf16=[1.9, 2.1, 2.0], nvfp4=[2.0, 2.1, 2.11], nvfp4_4over6=fours)
    table = evidence_tables.table_of_order(results)
    (row,) = [row for row in table.splitlines() if row.startswith("| 4-over-6 better")]
    change, found = (
        np.subtract(fours, [2.0, 2.1, 2.11][: len(fours)]),
        evidence_tables.interval(results, "nvfp4_4over6", "nvfp4"),
    )
    assert row.split(" | ")[2] == f"{said}: {found}"
    assert row.endswith("| weight +1.50 |")
    # Of nvfp4 beside bf16, where there is one difference alone.
    deviation = np.std(change if len(fours) > 1 else [0.1, 0.0, 0.11], ddof=1)
    assert found.half == pytest.approx(scipy.stats.t.ppf(0.975, 2) * deviation / len(fours) ** 0.5, rel=1e-3)
    assert found.mean == pytest.approx(change.mean())


def test_single_runs_decide_nothing():
    """They share one run of bf16, here an unlucky one; recipes with several seeds are told from each other."""
    results = results_of(bf16=[2.5, 2.0, 2.0], mxfp8=[2.01, 2.0, 2.02], nvfp4=[2.11, 2.1, 2.11], mxfp6=[0.5])
    for run in results["runs"]:
        run |= {"tokens_per_second": None, "mfu": None}
    assert evidence_tables.interval(results, "mxfp6", "bf16").decided
    (row,) = [row for row in evidence_tables.table_of_losses(results).splitlines() if row.startswith("| `mxfp6`")]
    assert row.split(" | ")[5] == "not decided"
    found = evidence_tables.interval(results, "nvfp4", "mxfp8")
    assert evidence_tables.table_of_pairs(results).splitlines()[2:] == [f"| `nvfp4` | `mxfp8` | {found} | higher |"]


def test_intervals_know_the_rows():
    """Two seeds that differ by nothing but the rows: their mean has the standard error of a paired test over rows."""
    rng = np.random.default_rng(0)
    rows, change = 2 + rng.standard_normal(200), 0.01 + 0.02 * rng.standard_normal(200)
    results = results_of(bf16=[rows.mean()] * 2, nvfp4=[(rows + change).mean()] * 2)
    for run in results["runs"]:
        run["held_out_rows"] = (rows if run["recipe"] == "bf16" else rows + change).tolist()
    found = evidence_tables.interval(results, "nvfp4", "bf16")
    assert found.mean == pytest.approx(change.mean())
    assert found.half == pytest.approx(12.706 * change.std(ddof=1) / 200**0.5, rel=1e-3)
    assert not found.decided
    for run in results["runs"]:
        run |= {"tokens_per_second": None, "mfu": None}
    assert f"| {found} | not decided |" in evidence_tables.table_of_losses(results)
    # Losses of rows scatter by 1, and their differences by a fiftieth of that.
    assert found.half < 12.706 / 200**0.5 / 40


def test_several_runs_at_a_time(tmp_path, monkeypatch):
    """As many as asked for, no more; each writes its own file; what fails is raised when the others are done."""
    running, most, gate = [], [], threading.Barrier(2)

    def run(command, check):
        folder, recipe = Path(command[2]), command[command.index("--recipe") + 1]
        running.append(recipe)
        most.append(len(running))
        if recipe in ("bf16", "mxfp8+master_none"):
            gate.wait(timeout=60)
        folder.mkdir(parents=True)
        about = {"recipe": recipe, "seed": 0, "steps": 1, "size": "tiny", "parameters": 1, "tokens": 1, "batch": 1, "text": "x"}
        sitting = dict.fromkeys(("device", "ranks", "threads", "compile", "torch", "blockfp", "python", "date"))
        (folder / "run.json").write_text(json.dumps(about | {"sittings": [sitting]}))
        line = {"step": 1, "tokens": 1, "loss": 2.0, "held_out_loss": 2.0, "held_out_rows": [2.0], "sqnr": {}}
        (folder / "metrics.jsonl").write_text(json.dumps(line | {"tokens_per_second": None, "mfu": None}) + "\n")
        running.remove(recipe)
        if recipe == "mxfp8":
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    listed = ["--runs", "bf16", "mxfp8+master_none", "mxfp8", "nvfp4+guarded", "--results", tmp_path / "r.json"]
    with pytest.raises(subprocess.CalledProcessError):
        command(monkeypatch, "run", tmp_path, *listed, "--parallel", "2")
    assert max(most) == 2
    found = {run["recipe"] for run in evidence.read_results(tmp_path / "r.json")["runs"]}
    assert found == {"bf16", "mxfp8+master_none", "nvfp4+guarded"}
    assert (tmp_path / "nvfp4+guarded-0" / "result.json").exists()


def test_the_page_has_the_tables_of_its_results():
    """docs/evidence.md is what `evidence.py show RESULTS --page docs/evidence.md` writes."""
    page = PAGE.read_text()
    places = re.findall(r"<!-- evidence (\S+) (\w+) -->", page)
    assert {table for _, table in places} == set(evidence_tables.TABLES)
    for name in {name for name, _ in places}:
        results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        assert evidence_tables.page_with(page, results, name) == page, name
