"""The chart of docs/evidence.md, drawn with `Drawing` of drawings.py from a file of results of benchmarks/evidence.py."""

from __future__ import annotations

import statistics
from typing import Any

KINDS = {
    "fp8_current": ("r3", False),
    "fp8_block": ("r3", True),
    "mxfp8": ("r2", False),
    "mxfp4": ("r1", True),
    "nvfp4": ("r0", False),
    "nvfp4_4over6": ("r0", True),
}
"""Colour of each recipe, and whether its line is dashed."""
WINDOW = 3
"""Number of training losses that are averaged, since batches scatter more than recipes differ."""


def differences(results: dict, losses: str, since: float) -> dict[str, list[tuple[float, float]]]:
    """Returns each recipe's (tokens, mean over its seeds of loss minus bf16's loss for the same seed and batches).

    `results` are from benchmarks/evidence.py; `losses` is "loss" (training) or "held_out". Points before `since` tokens are
    left out: while losses fall steeply, differences show the pace instead.
    """
    bf16 = {run["seed"]: run[losses] for run in results["runs"] if run["recipe"] == "bf16"}
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for run in results["runs"]:
        if run["recipe"] in KINDS and run["seed"] in bf16:
            pairs = zip(run[losses], bf16[run["seed"]], strict=True)
            found.setdefault(run["recipe"], []).append([(tokens, loss - plain) for (tokens, loss), (_, plain) in pairs])
    curves = {}
    for recipe, runs in found.items():
        means = [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*runs, strict=True)]
        means = [point for point in means if point[0] >= since]
        window = WINDOW if losses == "loss" else 1
        windows = [means[i : i + window] for i in range(len(means) - window + 1)]
        curves[recipe] = [(w[len(w) // 2][0], statistics.mean(loss for _, loss in w)) for w in windows]
    return curves


def sqnr(results: dict, operand: str) -> dict[str, list[tuple[float, float]]]:
    """Returns (tokens, dB) of an operand in each recipe's first run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in results["runs"]:
        if run["recipe"] in KINDS and run["recipe"] not in found:
            found[run["recipe"]] = [(tokens, one[operand]) for tokens, one in run["sqnr"]]
    return found


def panel(drawing: Any, left: float, curves: dict[str, list[tuple[float, float]]], title: str, zero: bool) -> None:
    """Draws curves with a title above into a box of 210 x 200 at (left, 60); `zero` includes 0 in the scale, with a line."""
    values = [y for points in curves.values() for _, y in points] + [0.0] * zero
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    ends = [x for points in curves.values() for x, _ in points]
    first, last = min(ends), max(ends)
    first = 0 if first < last / 4 else first

    def place(x: float, y: float) -> tuple[float, float]:
        return left + 210 * (x - first) / (last - first), 260 - 200 * (y - low) / (high - low)

    drawing.text(left, 52, title, "s")
    drawing.box(left, 60, 210, 200)
    for value in (low, (low + high) / 2, high):
        drawing.text(left - 5, place(first, value)[1] + 4, f"{value:.3f}" if zero else f"{value:.0f}", "s", "end")
    if zero:
        drawing.lines.append(f'<path d="M{left:g} {place(first, 0)[1]:.4g}h210" class="l"/>')
    for recipe, points in curves.items():
        kind, dashed = KINDS[recipe]
        drawing.line([place(x, y) for x, y in points], kind, dashed)
    for x, anchor in ((first, "start"), (last, "end")):
        drawing.text(place(x, 0)[0], 276, f"{x / 1e6:.3g} M", "s", anchor)


def evidence(drawing: Any, results: dict, losses: str = "loss", since: float = 0.0) -> Any:
    """Draws losses relative to bf16's, and the SQNR of inputs and gradients over time; returns the drawing.

    `drawing` is a `Drawing` of 800 x 320; the other arguments are as for `differences`.
    """
    common = results["common"]
    last = max(run["date"] for run in results["runs"])[:10]
    words = f"{common['parameters'] / 1e6:.1f} million parameters, {common['tokens'] / 1e6:.3g} million tokens, {last}"
    drawing.text(20, 22, f"Recipes compared with bf16: {words}", "b")
    kind = {"loss": "training", "held_out": "held-out"}[losses]
    panel(drawing, 60, differences(results, losses, since), f"{kind} loss above bf16's, nats a byte", True)
    panel(drawing, 320, sqnr(results, "input rowwise"), "SQNR of inputs, rowwise, dB", False)
    panel(drawing, 580, sqnr(results, "gradient rowwise"), "SQNR of gradients, rowwise, dB", False)
    there = [recipe for recipe in KINDS if any(run["recipe"] == recipe for run in results["runs"])]
    for i, recipe in enumerate(there):
        kind, dashed = KINDS[recipe]
        drawing.line([(30 + 108 * i, 302), (50 + 108 * i, 302)], kind, dashed)
        drawing.text(55 + 108 * i, 306, recipe, "s")
    return drawing
