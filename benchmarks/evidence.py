"""Compares training curves of recipes: runs of examples/pretrain.py in sessions, their tables, and the SQNR of operands.

    python benchmarks/evidence.py run runs --size 1m --tokens 409600 --runs bf16:0,1,2 nvfp4:0,1 --results 1m.json --minutes 9
    python benchmarks/evidence.py operands runs/bf16-0 --recipes nvfp4 mxfp4 mxfp4_floor --results 1m.json
    python benchmarks/evidence.py show 1m.json --page docs/evidence.md

`run` makes the listed runs, each RECIPE:SEED,SEED in a folder RECIPE-SEED, one by one or `--parallel` at a time, until the time
is up. Called again, it continues interrupted runs and skips those in the results, on another machine too. RECIPE is a name that
pretrain.py accepts, such as mxfp8+master_none. A finished run also has a result.json in its folder. Options after "--" go to
pretrain.py. `operands` quantizes the operands of one step of a trained model in several recipes. `show` prints the tables, or
writes them into a page between "<!-- evidence NAME -->" and "<!-- end -->".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import pretrain_metrics
from evidence_tables import TABLES, page_with

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAME = ("size", "parameters", "tokens", "steps", "batch", "text")
"""Settings that the runs of one file of results have in common."""
LEAST_MINUTES = 1.5
"""With less time left no run is begun or continued: compiling takes that."""


def listed(runs: list[str]) -> list[tuple[str, int]]:
    """Returns (recipe, seed) for each "RECIPE:SEED,SEED"; the seed defaults to 0."""
    found = []
    for run in runs:
        recipe, _, seeds = run.partition(":")
        found += [(recipe, int(seed)) for seed in (seeds or "0").split(",")]
    return found


def finished(folder: Path) -> dict | None:
    """Returns the results of a finished run of pretrain.py, or None."""
    lines = pretrain_metrics.read(folder / "metrics.jsonl")
    about = json.loads((folder / "run.json").read_text()) if lines else {}
    if not lines or lines[-1]["step"] < about["steps"]:
        return None
    rates = [line["tokens_per_second"] for line in lines if line["tokens_per_second"]]
    mfu = [line["mfu"] for line in lines if line["mfu"]]
    last = about["sittings"][-1]
    return {
        "recipe": about["recipe"],
        "seed": about["seed"],
        "held_out_loss": lines[-1]["held_out_loss"],
        "held_out_rows": [round(loss, 4) for loss in lines[-1].get("held_out_rows", ())],
        "tokens_per_second": round(statistics.median(rates)) if rates else None,
        "mfu": round(statistics.median(mfu), 4) if mfu else None,
        "loss": [[line["tokens"], _rounded(line["loss"])] for line in lines],
        "held_out": [[line["tokens"], _rounded(line["held_out_loss"])] for line in lines if "held_out_loss" in line],
        "sqnr": [[line["tokens"], {k: _rounded(v["mean"]) for k, v in line["sqnr"].items()}] for line in lines if line["sqnr"]],
        "machine": {key: last[key] for key in ("device", "ranks", "threads", "compile", "torch", "blockfp", "python")},
        "date": last["date"],
        "common": {key: about[key] for key in SAME},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def read_results(path: Path) -> dict:
    """Reads a file of results; returns one without runs if it doesn't exist."""
    return json.loads(path.read_text()) if path.exists() else {"common": None, "runs": [], "operands": {}}


def write_results(path: Path, results: dict) -> None:
    """Writes a file of results atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    # A line for each run: differences can be read.
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    operands = json.dumps(results["operands"])
    new.write_text(f'{{"common": {json.dumps(results["common"])},\n"operands": {operands},\n"runs": [\n{runs}\n]}}\n')
    new.replace(path)


def add(results: dict, run: dict) -> None:
    """Adds a finished run.

    Raises:
        ValueError: its size, length or text differs from the file's runs.
    """
    common = run.pop("common")
    there = results["common"] or common
    differing = {key: (there[key], common[key]) for key in SAME if there[key] != common[key]}
    if differing:
        raise ValueError(f"{run['recipe']}:{run['seed']} is not comparable to the results: (there, here) is {differing}")
    results["common"] = common
    results["runs"].append(run)


def make_runs(options: argparse.Namespace) -> None:
    """Makes the runs missing in the results, until the time is up.

    Raises:
        ValueError: a listed name is not a recipe.
    """
    import pretrain_model

    for recipe, _ in listed(options.runs):
        pretrain_model.recipe_of(recipe)
    end = time.monotonic() + 60 * options.minutes
    results, writing, time_is_up = read_results(options.results), threading.Lock(), threading.Event()
    there = {(run["recipe"], run["seed"]) for run in results["runs"]}

    def make(recipe: str, seed: int) -> None:
        folder = options.folder / f"{recipe}-{seed}"
        if time_is_up.is_set():
            return
        if finished(folder) is None:
            left = (end - time.monotonic()) / 60
            if left < LEAST_MINUTES:
                time_is_up.set()
                print(f"time is up; the next is {recipe}:{seed}", flush=True)
                return
            print(f"{recipe}:{seed}", flush=True)
            subprocess.run(command_of(options, recipe, seed, folder, left), check=True)
        run = finished(folder)
        if run is None:
            time_is_up.set()
            print(f"time is up in {recipe}:{seed}", flush=True)
            return
        (folder / "result.json").write_text(json.dumps(run))
        with writing:
            add(results, run)
            write_results(options.results, results)
        if not options.keep_checkpoints:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        begun = [pool.submit(make, *run) for run in listed(options.runs) if run not in there]
        failed = [error for each in begun if (error := each.exception()) is not None]
    if failed:
        raise failed[0]
    if not time_is_up.is_set():
        print("all runs are finished")


def command_of(options: argparse.Namespace, recipe: str, seed: int, folder: Path, minutes: float) -> list[str]:
    """Returns the command of one run."""
    start = [sys.executable]
    if options.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    fixed = ["--recipe", recipe, "--seed", str(seed), "--size", options.size, "--tokens", str(options.tokens)]
    more = ["--text", str(options.folder / "text"), "--minutes", f"{minutes:.3f}", *options.pretrain]
    return [*start, str(EXAMPLES / "pretrain.py"), str(folder), *fixed, *more]


def measure_operands(options: argparse.Namespace) -> None:
    """Adds the SQNR of one step's operands for each recipe, from the weights of a run's checkpoint."""
    import pretrain_model
    import pretrain_text
    import torch

    import blockfp.torch as bfp

    about = json.loads((options.run / "run.json").read_text())
    text = pretrain_text.read(options.run.parent / "text", about["text_bytes"])
    size = pretrain_model.SIZES[about["size"]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = read_results(options.results)
    # The same pieces for all, which the run has not come to yet, unless it went over the text more than once.
    order = pretrain_text.Order(text.training, size.context + 1, about["seed"])
    rows = torch.from_numpy(order.rows(about["steps"] * about["batch"], about["batch"])).to(device, torch.int64)
    for name in options.recipes:
        recipe = pretrain_model.recipe_of(name)
        model = pretrain_model.build(size, recipe, about["seed"], device, shard=False, compiled=False)
        optimizer = pretrain_model.optimizer_of(model, 0.0)
        bfp.load_checkpoint(options.run / "checkpoints", model, optimizer, requantize=True)
        with bfp.observe(model) as observation:
            pretrain_model.loss_of(model, rows).backward()
            sqnr = pretrain_metrics.sqnr_of_operands(observation.step())
        sqnr |= pretrain_metrics.sqnr_of_weights(model, optimizer, reduce=False)
        results["operands"][name] = {operand: _rounded(one["mean"]) for operand, one in sqnr.items()}
        write_results(options.results, results)
        print(name, results["operands"][name], flush=True)


def show(options: argparse.Namespace) -> None:
    """Prints the tables, or writes them into a page."""
    results = read_results(options.results)
    if options.page is None:
        print("\n\n".join(make(results) for make in TABLES.values()))
    else:
        options.page.write_text(page_with(options.page.read_text(), results, options.results.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="make the unfinished runs")
    run.add_argument("folder", type=Path, help="folder of the runs and the text")
    run.add_argument("--runs", nargs="+", required=True, metavar="RECIPE:SEED,SEED", help="the runs, in order")
    run.add_argument("--size", default="124m", help="a size of pretrain.py")
    run.add_argument("--tokens", type=int, default=100_000_000, help="tokens per run")
    run.add_argument("--results", type=Path, required=True, help="finished runs are added to it; runs in it are skipped")
    run.add_argument("--minutes", type=float, default=float("inf"), help="total time; the current run is saved then")
    run.add_argument("--processes", type=int, default=1, help="processes per run; several are started by torchrun")
    run.add_argument("--parallel", type=int, default=1, help="concurrent runs, which share the GPU")
    run.add_argument("--keep-checkpoints", action="store_true", help="keep checkpoints of finished runs too")
    run.set_defaults(command=make_runs)
    operands = commands.add_parser("operands", help="measure the operands of a trained model")
    operands.add_argument("run", type=Path, help="folder of a run with a checkpoint")
    operands.add_argument("--recipes", nargs="+", required=True)
    operands.add_argument("--results", type=Path, required=True)
    operands.set_defaults(command=measure_operands)
    tables = commands.add_parser("show", help="print the tables")
    tables.add_argument("results", type=Path)
    tables.add_argument("--page", type=Path, help="Markdown page to write them into")
    tables.set_defaults(command=show)
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.pretrain = arguments[cut + 1 :]
    options.command(options)


if __name__ == "__main__":
    main()
