"""Prints a table and a plot of the training examples' results: `python examples/training_report.py RESULTS.json ..`"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

BASELINE = "bf16"
SMOOTHED = 10
"""Steps of which the plotted differences are the mean: single batches scatter by more than recipes differ."""


def show(results: Sequence[Path], plot: Path | None = None) -> None:
    """Prints a table of the runs in these files and plots their losses against the first."""
    found = [json.loads(path.read_text()) for path in results]
    console = Console(width=140)
    console.print(_table(found))
    plot = plot or results[0].with_suffix(".png")
    _plot(found, plot)
    console.print(f"losses drawn in {plot}")


def _table(found: Sequence[dict]) -> Table:
    table = Table(title=f"{found[0]['runs'][0]['parameters'] / 1e6:.2f} M parameters")
    table.add_column("framework, ranks")
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
    baselines = {each["framework"]: run["held_out"] for each in found for run in each["runs"] if run["recipe"] == BASELINE}
    for each in found:
        baseline = baselines.get(each["framework"])
        for run in each["runs"]:
            first = run["first_step"]
            table.add_row(
                f"{each['framework']}, {each['ranks']}",
                run["recipe"],
                f"{first} to {first + len(run['losses'])}",
                f"{run['losses'][-1]:.3f}",
                f"{run['held_out']:.4f}",
                "" if baseline is None else f"{run['held_out'] / baseline - 1:+.2%}",
                f"{run['gathered_bytes_a_step'] / 1e6:.2f} MB",
                f"{run['weight_bytes'] / 1e6:.2f} MB",
                f"{run['seconds']:.0f}",
            )
        table.add_section()
    return table


def _plot(found: Sequence[dict], path: Path) -> None:
    """Plots losses on the left and, if recipes can be told apart, differences from bf16 in the same framework on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, differences) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    recipes = list(dict.fromkeys(run["recipe"] for each in found for run in each["runs"]))
    baselines = {each["framework"]: run["losses"] for each in found for run in each["runs"] if run["recipe"] == BASELINE}
    # Curves of the same recipe all but coincide: the later ones are drawn thinner, on top, and the first shows through.
    for each, style, width in zip(found, ("-", "--", ":", "-."), (2.4, 1.2, 1.2, 1.2), strict=False):
        for run in each["runs"]:
            first = run["first_step"]
            label = f"{run['recipe']}, {each['framework'].split()[0]}" + (f" from step {first}" if first else "")
            color = f"C{recipes.index(run['recipe'])}"
            options = {"linestyle": style, "color": color, "label": label, "linewidth": width, "alpha": 0.7}
            losses.plot(range(first, first + len(run["losses"])), run["losses"], **options)
            baseline = baselines.get(each["framework"], [])[first:]
            if run["recipe"] != BASELINE and baseline:
                ratios = [loss / plain - 1 for loss, plain in zip(run["losses"], baseline, strict=False)]
                means = [sum(ratios[i : i + SMOOTHED]) / SMOOTHED for i in range(len(ratios) - SMOOTHED + 1)]
                start = first + SMOOTHED // 2
                differences.plot(range(start, start + len(means)), [100 * mean for mean in means], **options)
    losses.set(xlabel="step", ylabel="training loss, nats a byte", yscale="log")
    differences.set(xlabel="step", ylabel=f"% above {BASELINE} in the same framework (mean of {SMOOTHED} steps)")
    differences.axhline(0, color=f"C{recipes.index(BASELINE)}" if BASELINE in recipes else "black", linewidth=1)
    for axes in (losses, differences):
        axes.grid(alpha=0.3, which="both")
        # A run that goes on has no baseline beside it.
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    show([Path(name) for name in sys.argv[1:]])
