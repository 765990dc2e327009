"""benchmarks/evidence.py: a list of runs made in pieces, their tables, and docs/evidence.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import evidence
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
    assert set(operands["mxfp4"]) == set(evidence.OPERANDS)
    # Both rules round the same elements in most blocks, and ceil never cuts off.
    assert operands["mxfp4"]["gradient rowwise"] > operands["mxfp4_floor"]["gradient rowwise"]

    with pytest.raises(ValueError, match="is not comparable to the results"):
        evidence.add(found, dict(found["runs"][0], common=dict(found["common"], tokens=1)))
    command(monkeypatch, "show", results)
    printed = capsys.readouterr().out
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
        ([2.0, 2.2], "open: +0.0500 is within ± 0.2828"),
        ([], "open"),
    ],
)
def test_verdicts(fours, said):
    """Beside a spread of sqrt(0.02) = 0.1414 between seeds."""
    table = evidence.table_of_order(results_of(bf16=[1.9, 2.1], nvfp4=[2.0, 2.1], nvfp4_4over6=fours))
    (row,) = [row for row in table.splitlines() if row.startswith("| 4-over-6")]
    assert row.split(" | ")[2] == said
    assert row.endswith("| weight +1.50 |")


def test_the_page_has_the_tables_of_its_results():
    """docs/evidence.md is what `evidence.py show RESULTS --page docs/evidence.md` writes."""
    page = PAGE.read_text()
    places = re.findall(r"<!-- evidence (\S+) (\w+) -->", page)
    assert {table for _, table in places} == set(evidence.TABLES)
    for name in {name for name, _ in places}:
        results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        assert evidence.page_with(page, results, name) == page, name
