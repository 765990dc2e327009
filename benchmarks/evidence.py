"""Curves of recipes beside bf16: the runs of examples/pretrain.py in pieces, their table, and their operands.

    python benchmarks/evidence.py run runs --size 1m --tokens 409600 --runs bf16:0,1,2 nvfp4:0,1 --results 1m.json --minutes 9
    python benchmarks/evidence.py operands runs/bf16-0 --recipes nvfp4 mxfp4 mxfp4_floor --results 1m.json
    python benchmarks/evidence.py show 1m.json --page docs/evidence.md

`run` makes the runs of a list one after the other, each RECIPE:SEED,SEED in a folder RECIPE-SEED, until the time is up; called
again it goes on with the one that was cut off, and leaves out what the results have already, also on another machine. What
follows a "--" are options of pretrain.py. `operands` quantizes the operands of one step of a trained model in several recipes.
`show` prints the tables, and puts them into a page between "<!-- evidence NAME -->" and "<!-- end -->".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import pretrain_metrics

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BASELINE = "bf16"
SAME = ("size", "parameters", "tokens", "steps", "batch", "text")
"""Settings that the runs of one file of results have in common."""
PUBLISHED = (
    ("nvfp4_4over6", "nvfp4", "4-over-6 better than plain NVFP4"),
    ("mxfp8", "mxfp8_floor", "rule ceil better than floor, MXFP8"),
    ("mxfp4", "mxfp4_floor", "rule ceil better than floor, MXFP4"),
)
"""(better, worse, in words), as others have published it."""
LEAST_MINUTES = 1.5
"""With less time left no run is begun or continued: compiling takes that."""


def listed(runs: list[str]) -> list[tuple[str, int]]:
    """(recipe, seed) of each of "RECIPE:SEED,SEED"; the seed is 0 where none is named."""
    found = []
    for run in runs:
        recipe, _, seeds = run.partition(":")
        found += [(recipe, int(seed)) for seed in (seeds or "0").split(",")]
    return found


def finished(folder: Path) -> dict | None:
    """Results of a finished run of pretrain.py, or None."""
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
    """Reads such a file; one without runs if there is none."""
    return json.loads(path.read_text()) if path.exists() else {"common": None, "runs": [], "operands": {}}


def write_results(path: Path, results: dict) -> None:
    """Writes a file of results, whole or not at all."""
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
        ValueError: it is of another size, length or text than those in the file.
    """
    common = run.pop("common")
    there = results["common"] or common
    differing = {key: (there[key], common[key]) for key in SAME if there[key] != common[key]}
    if differing:
        raise ValueError(f"{run['recipe']}:{run['seed']} is not comparable to the results: (there, here) is {differing}")
    results["common"] = common
    results["runs"].append(run)


def make_runs(options: argparse.Namespace) -> None:
    """Makes the runs that are not in the results, until the time is up.

    Raises:
        ValueError: no recipe has a name of the list.
    """
    import pretrain_model

    for recipe, _ in listed(options.runs):
        pretrain_model.recipe_of(recipe)
    end = time.monotonic() + 60 * options.minutes
    results = read_results(options.results)
    for recipe, seed in listed(options.runs):
        if any((run["recipe"], run["seed"]) == (recipe, seed) for run in results["runs"]):
            continue
        folder = options.folder / f"{recipe}-{seed}"
        if finished(folder) is None:
            left = (end - time.monotonic()) / 60
            if left < LEAST_MINUTES:
                print(f"time is up; the next is {recipe}:{seed}")
                return
            start = [sys.executable]
            if options.processes > 1:
                start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
            fixed = ["--recipe", recipe, "--seed", str(seed), "--size", options.size, "--tokens", str(options.tokens)]
            more = ["--text", str(options.folder / "text"), "--minutes", f"{left:.3f}", *options.pretrain]
            print(f"{recipe}:{seed}", flush=True)
            subprocess.run([*start, str(EXAMPLES / "pretrain.py"), str(folder), *fixed, *more], check=True)
        run = finished(folder)
        if run is None:
            print(f"time is up in {recipe}:{seed}")
            return
        add(results, run)
        write_results(options.results, results)
        if not options.keep_checkpoints:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    print("all runs are finished")


def measure_operands(options: argparse.Namespace) -> None:
    """Adds the SQNR of the operands of one step, from the weights of a run's checkpoint, for each recipe."""
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


def by_recipe(results: dict) -> dict[str, dict[int, dict]]:
    """The runs of each recipe by their seeds."""
    found: dict[str, dict[int, dict]] = {}
    for run in results["runs"]:
        found.setdefault(run["recipe"], {})[run["seed"]] = run
    return found


def differences(runs: dict[int, dict], others: dict[int, dict]) -> list[float]:
    """Held-out losses of runs less those of others, for every seed that both have."""
    return [runs[seed]["held_out_loss"] - others[seed]["held_out_loss"] for seed in sorted(runs) if seed in others]


def spread(runs: dict[int, dict]) -> float | None:
    """Standard deviation of the held-out losses between seeds; None for less than two."""
    losses = [run["held_out_loss"] for run in runs.values()]
    return statistics.stdev(losses) if len(losses) > 1 else None


def table_of_losses(results: dict) -> str:
    """Each recipe's held-out loss, what it is above bf16's of the same seeds, and its speed."""
    found = by_recipe(results)
    rows = [
        "| recipe | seeds | held-out loss | between seeds | above bf16 of the same seed | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, runs in found.items():
        losses = [run["held_out_loss"] for run in runs.values()]
        above = differences(runs, found.get(BASELINE, {})) if recipe != BASELINE else []
        rates = [run["tokens_per_second"] for run in runs.values() if run["tokens_per_second"]]
        mfu = [run["mfu"] for run in runs.values() if run["mfu"]]
        cells = [
            "bf16" if recipe == BASELINE else f"`{recipe}`",
            str(len(losses)),
            f"{statistics.mean(losses):.4f}",
            f"± {spread(runs):.4f}" if len(losses) > 1 else "",
            ", ".join(f"{each:+.4f}" for each in above),
            f"{statistics.median(rates):,.0f}" if rates else "",
            f"{statistics.median(mfu):.1%}" if mfu else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


OPERANDS = ("input rowwise", "input columnwise", "weight", "gradient rowwise", "gradient columnwise")


def table_of_sqnr(results: dict) -> str:
    """SQNR of each operand in dB, from the same weights and data."""
    rows = [f"| recipe | {' | '.join(OPERANDS)} |", "|---|" + "---|" * len(OPERANDS)]
    for recipe, sqnr in results["operands"].items():
        cells = [f"{sqnr[operand]:.2f}" if operand in sqnr else "" for operand in OPERANDS]
        rows.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_order(results: dict) -> str:
    """Sets published findings beside those made here."""
    found, operands = by_recipe(results), results["operands"]
    noise = spread(found.get(BASELINE, {}))
    rows = [
        "| published | held-out loss, same seeds | verdict by loss | SQNR, dB: the largest and the smallest change |",
        "|---|---|---|---|",
    ]
    for better, worse, words in PUBLISHED:
        change = differences(found.get(better, {}), found.get(worse, {}))
        changes = {
            operand: operands[better][operand] - operands[worse][operand]
            for operand in OPERANDS
            if {better, worse} <= operands.keys() and operands[better].get(operand) != operands[worse].get(operand)
        }
        ends = dict.fromkeys((max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__))) if changes else ()
        most = ", ".join(f"{operand} {changes[operand]:+.2f}" for operand in ends) or "not measured"
        cells = [words, ", ".join(f"{each:+.4f}" for each in change) or "not run", verdict(change, noise), most]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def verdict(change: list[float], noise: float | None) -> str:
    """Judges differences of losses by the spread between seeds of bf16: twice that is taken for a difference."""
    if not change or noise is None:
        return "open"
    mean = statistics.mean(change)
    # A mean of differences of two runs each.
    limit = 2 * noise * (2 / len(change)) ** 0.5
    if abs(mean) <= limit:
        return f"open: {mean:+.4f} is within ± {limit:.4f}"
    return f"{'confirmed' if mean < 0 else 'contradicted'}: {mean:+.4f} is outside ± {limit:.4f}"


TABLES = {"losses": table_of_losses, "operands": table_of_sqnr, "order": table_of_order}


def page_with(page: str, results: dict, name: str) -> str:
    """A page's text with the tables of results put in their places, "<!-- evidence NAME TABLE -->" .. "<!-- end -->"."""
    for table, make in TABLES.items():
        place = rf"(<!-- evidence {re.escape(name)} {table} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda at, make=make: f"{at[1]}{make(results)}\n{at[2]}", page, flags=re.DOTALL)
    return page


def show(options: argparse.Namespace) -> None:
    """Prints the tables, or puts them into a page."""
    results = read_results(options.results)
    if options.page is None:
        print("\n\n".join(make(results) for make in TABLES.values()))
    else:
        options.page.write_text(page_with(options.page.read_text(), results, options.results.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="make the runs that are not finished")
    run.add_argument("folder", type=Path, help="of the runs' folders and the text")
    run.add_argument("--runs", nargs="+", required=True, metavar="RECIPE:SEED,SEED", help="the runs, in the order wanted")
    run.add_argument("--size", default="124m", help="as pretrain.py has them")
    run.add_argument("--tokens", type=int, default=100_000_000, help="of each run")
    run.add_argument("--results", type=Path, required=True, help="finished runs are added to it; its own are not made again")
    run.add_argument("--minutes", type=float, default=float("inf"), help="time for all of it; the run at hand is saved then")
    run.add_argument("--processes", type=int, default=1, help="more are started by torchrun")
    run.add_argument("--keep-checkpoints", action="store_true", help="of finished runs too")
    run.set_defaults(command=make_runs)
    operands = commands.add_parser("operands", help="measure operands of a trained model")
    operands.add_argument("run", type=Path, help="folder of a run with a checkpoint")
    operands.add_argument("--recipes", nargs="+", required=True)
    operands.add_argument("--results", type=Path, required=True)
    operands.set_defaults(command=measure_operands)
    tables = commands.add_parser("show", help="the tables")
    tables.add_argument("results", type=Path)
    tables.add_argument("--page", type=Path, help="Markdown to put them into")
    tables.set_defaults(command=show)
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.pretrain = arguments[cut + 1 :]
    options.command(options)


if __name__ == "__main__":
    main()
