"""Compares training curves of recipes: runs of examples/pretrain.py in sessions, their tables, and the SQNR of operands.

    python benchmarks/evidence.py run runs --size 1m --tokens 409600 --runs bf16:0,1,2 nvfp4:0,1 --results 1m.json --minutes 9
    python benchmarks/evidence.py operands runs/bf16-0 --recipes nvfp4 mxfp4 mxfp4_floor --results 1m.json
    python benchmarks/evidence.py show 1m.json --page docs/evidence.md

`run` makes the listed runs, each RECIPE:SEED,SEED in a folder RECIPE-SEED, one by one or `--parallel` at a time, until the time
is up. Called again, it continues interrupted runs and skips those in the results, on another machine too. RECIPE is a name that
pretrain.py accepts, such as mxfp8+master_none. A finished run also has a result.json in its folder. Options after "--" go to
pretrain.py. `operands` quantizes the operands of one step of a trained model in several recipes. `show` prints the tables, or
writes them into a page between "<!-- evidence NAME -->" and "<!-- end -->".

Loss differences are paired: runs of one seed start from the same weights and see the same batches, and all are judged on the
same held-out rows, whose losses are kept in the results. A 95% interval is Student's, from the variance between seeds and over
rows. A recipe with one seed gets the variance between seeds of the others.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import pretrain_metrics

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BASELINE = "bf16"
SAME = ("size", "parameters", "tokens", "steps", "batch", "text")
"""Settings that the runs of one file of results have in common."""
PUBLISHED = (
    ("nvfp4_4over6", "nvfp4", "4-over-6 better than plain NVFP4"),
    ("nvfp4_4over6+squared", "nvfp4", "4-over-6 by squared errors better than plain NVFP4"),
    ("mxfp8", "mxfp8_floor", "rule ceil better than floor, MXFP8"),
    ("mxfp4", "mxfp4_floor", "rule ceil better than floor, MXFP4"),
)
"""(better, worse, in words), as others have published it."""
PAIRS = (
    ("nvfp4", "mxfp8"),
    ("nvfp4_4over6", "mxfp8"),
    ("nvfp4_4over6", "nvfp4"),
    ("nvfp4_4over6+squared", "nvfp4"),
    ("nvfp4_4over6+squared", "nvfp4_4over6"),
    ("nvfp4+guarded", "nvfp4"),
    ("mxfp8+master_none", "mxfp8"),
)
"""Recipes that people choose between, and variants beside what they vary."""
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


def by_recipe(results: dict) -> dict[str, dict[int, dict]]:
    """Returns each recipe's runs by seed; bf16 comes first."""
    found: dict[str, dict[int, dict]] = {}
    for run in sorted(results["runs"], key=lambda run: run["recipe"] != BASELINE):
        found.setdefault(run["recipe"], {})[run["seed"]] = run
    return found


def differences(runs: dict[int, dict], others: dict[int, dict]) -> list[float]:
    """Returns the held-out losses of runs minus those of others, for every common seed."""
    return [runs[seed]["held_out_loss"] - others[seed]["held_out_loss"] for seed in sorted(runs) if seed in others]


STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for 95%, two-sided, of 1 to 30 degrees of freedom; beyond it is 1.96."""


class Interval(NamedTuple):
    """A mean difference of losses, and half the width of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half


def interval(results: dict, recipe: str, other: str) -> Interval | None:
    """Returns the difference of two recipes' held-out losses, paired by seed and row; None if the variance is unknown."""
    found = by_recipe(results)
    change = differences(found.get(recipe, {}), found.get(other, {}))
    if not change:
        return None
    if len(change) > 1:
        freedom, between = len(change) - 1, statistics.variance(change)
    else:
        # That of others, each beside bf16.
        several = [differences(runs, found.get(BASELINE, {})) for name, runs in found.items() if name != BASELINE]
        several = [each for each in several if len(each) > 1]
        freedom = sum(len(each) - 1 for each in several)
        if not freedom:
            return None
        between = sum(statistics.variance(each) * (len(each) - 1) for each in several) / freedom
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96
    variance = between / len(change) + over_rows(found[recipe], found[other])
    return Interval(statistics.mean(change), t * variance**0.5)


def over_rows(runs: dict[int, dict], others: dict[int, dict]) -> float:
    """Returns the variance of the mean difference due to the choice of held-out rows; 0 if their losses weren't kept."""
    pairs = [(runs[seed].get("held_out_rows"), others[seed].get("held_out_rows")) for seed in runs if seed in others]
    if not all(a and b for a, b in pairs):
        return 0.0
    rows = [statistics.mean(a - b for a, b in row) for row in zip(*(zip(*pair, strict=True) for pair in pairs), strict=True)]
    return statistics.variance(rows) / len(rows)


def spread(runs: dict[int, dict]) -> float | None:
    """Returns the standard deviation of held-out losses between seeds; None for fewer than two."""
    losses = [run["held_out_loss"] for run in runs.values()]
    return statistics.stdev(losses) if len(losses) > 1 else None


def table_of_losses(results: dict) -> str:
    """Returns each recipe's held-out loss, its difference from bf16 with the same seeds, and its speed.

    All single runs are compared with the same bf16 run, whose deviation is in each difference, so they decide nothing.
    """
    found = by_recipe(results)
    rows = [
        "| recipe | seeds | held-out loss | std of seeds | minus bf16, same seed | verdict | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, runs in found.items():
        losses = [run["held_out_loss"] for run in runs.values()]
        above, beside = interval(results, recipe, BASELINE), ""
        alone = differences(runs, found.get(BASELINE, {}))
        if recipe != BASELINE and alone:
            beside = "not decided" if len(alone) < 2 else side(above, "above", "below")
        rates = [run["tokens_per_second"] for run in runs.values() if run["tokens_per_second"]]
        mfu = [run["mfu"] for run in runs.values() if run["mfu"]]
        cells = [
            "bf16" if recipe == BASELINE else f"`{recipe}`",
            str(len(losses)),
            f"{statistics.mean(losses):.4f}",
            f"± {spread(runs):.4f}" if len(losses) > 1 else "",
            "" if recipe == BASELINE else ", ".join(f"{each:+.4f}" for each in alone) if above is None else str(above),
            beside,
            f"{statistics.median(rates):,.0f}" if rates else "",
            f"{statistics.median(mfu):.1%}" if mfu else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def side(found: Interval | None, more: str, less: str) -> str:
    """Returns the word for an interval's side of zero."""
    return "not decided" if found is None or not found.decided else more if found.mean > 0 else less


def table_of_pairs(results: dict) -> str:
    """Returns the differences of recipe pairs with several common seeds."""
    rows = ["| recipe | minus | difference of losses | verdict |", "|---|---|---|---|"]
    found = by_recipe(results)
    for recipe, other in PAIRS:
        if len(differences(found.get(recipe, {}), found.get(other, {}))) > 1:
            change = interval(results, recipe, other)
            rows.append(f"| `{recipe}` | `{other}` | {change} | {side(change, 'higher', 'lower')} |")
    return "\n".join(rows)


OPERANDS = ("input rowwise", "input columnwise", "weight", "gradient rowwise", "gradient columnwise")


def table_of_sqnr(results: dict) -> str:
    """Returns the SQNR of each operand in dB, from the same weights and data."""
    rows = [f"| recipe | {' | '.join(OPERANDS)} |", "|---|" + "---|" * len(OPERANDS)]
    for recipe, sqnr in results["operands"].items():
        cells = [f"{sqnr[operand]:.2f}" if operand in sqnr else "" for operand in OPERANDS]
        rows.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_order(results: dict) -> str:
    """Compares published findings with those made here."""
    found, operands = by_recipe(results), results["operands"]
    noise = spread(found.get(BASELINE, {}))
    rows = [
        "| published | held-out loss, same seeds | verdict by loss | SQNR, dB: largest and smallest change |",
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
        judged = judge(interval(results, better, worse)) or verdict(change, noise)
        cells = [words, ", ".join(f"{each:+.4f}" for each in change) or "not run", judged, most]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def judge(found: Interval | None) -> str | None:
    """Judges by an interval, if there is one."""
    if found is None:
        return None
    return f"{'not decided' if not found.decided else 'confirmed' if found.mean < 0 else 'contradicted'}: {found}"


def verdict(change: list[float], noise: float | None) -> str:
    """Judges differences without an interval by bf16's spread between seeds: twice the spread is significant."""
    if not change or noise is None:
        return "not decided"
    mean = statistics.mean(change)
    # A mean of differences of two runs each.
    limit = 2 * noise * (2 / len(change)) ** 0.5
    if abs(mean) <= limit:
        return f"not decided: {mean:+.4f} is within ± {limit:.4f}"
    return f"{'confirmed' if mean < 0 else 'contradicted'}: {mean:+.4f} is outside ± {limit:.4f}"


TABLES = {"losses": table_of_losses, "pairs": table_of_pairs, "operands": table_of_sqnr, "order": table_of_order}


def page_with(page: str, results: dict, name: str) -> str:
    """Returns a page with the tables of results between "<!-- evidence NAME TABLE -->" and "<!-- end -->"."""
    for table, make in TABLES.items():
        place = rf"(<!-- evidence {re.escape(name)} {table} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda at, make=make: f"{at[1]}{make(results)}\n{at[2]}", page, flags=re.DOTALL)
    return page


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
