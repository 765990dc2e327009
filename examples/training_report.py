"""The table and the plot of what the training examples wrote: `python examples/training_report.py RESULTS.json ..`"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

BASELINE = "bf16"


def show(results: Sequence[Path], plot: Path | None = None) -> None:
    """Prints a table of the runs in these files and writes a plot of their losses beside the first."""
    found = [json.loads(path.read_text()) for path in results]
    console = Console(width=120)
    for each in found:
        console.print(_table(each))
    plot = plot or results[0].with_suffix(".png")
    _plot(found, plot)
    console.print(f"losses drawn in {plot}")


def _table(found: dict) -> Table:
    runs = found["runs"]
    baseline = next((run["held_out"] for run in runs if run["recipe"] == BASELINE), None)
    table = Table(title=f"{found['framework']}, {found['ranks']} ranks, {runs[0]['parameters'] / 1e6:.2f} M parameters")
    table.add_column("recipe")
    for column in (
        "steps",
        "last loss",
        "held-out loss",
        f"against {BASELINE}",
        "gathered a step",
        "weights a rank",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for run in runs:
        ratio = "" if baseline is None else f"{run['held_out'] / baseline - 1:+.2%}"
        table.add_row(
            run["recipe"],
            str(len(run["losses"])),
            f"{run['losses'][-1]:.3f}",
            f"{run['held_out']:.4f}",
            ratio,
            f"{run['gathered_bytes_a_step'] / 1e6:.2f} MB",
            f"{run['weight_bytes'] / 1e6:.2f} MB",
            f"{run['seconds']:.0f}",
        )
    return table


def _plot(found: Sequence[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for each, style in zip(found, ("-", "--", ":", "-."), strict=False):
        axes.set_prop_cycle(None)
        for run in each["runs"]:
            axes.plot(run["losses"], style, label=f"{run['recipe']}, {each['framework'].split()[0]}", linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss, nats a byte", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, ncols=len(found))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    show([Path(name) for name in sys.argv[1:]])
