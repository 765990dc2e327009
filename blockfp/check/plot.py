"""The picture of `blockfp check --plot`. Only this module imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from .report import Findings, Summary, product_verdict


def draw(findings: Findings, path: Path) -> None:
    """Writes a PNG: SQNR per format (a bar for all tensors, a dot per tensor), and a histogram of scale exponents."""
    summary = findings.by_format()
    names = [format.name for format in summary]
    lines = np.arange(len(names))
    figure = Figure(figsize=(13, 1.8 + 0.24 * len(names)), layout="constrained")
    if findings.with_products:
        error, products, scales = figure.subplots(1, 3, sharey=True, width_ratios=(10, 1, 10))
        _draw_products(products, list(summary.values()))
    else:
        error, scales = figure.subplots(1, 2, sharey=True)

    totals = [_finite(one.statistics.sqnr_db) for one in summary.values()]
    families = [name.split("_")[0] for name in names]
    colors = {family: f"C{i}" for i, family in enumerate(dict.fromkeys(families))}
    error.barh(lines, totals, color=[colors[family] for family in families], alpha=0.55)
    line_of = {name: line for line, name in enumerate(names)}
    dots = [(_finite(c.statistics.sqnr_db), line_of[c.format.name]) for _, _, c in findings.checks()]
    if dots:
        error.plot(*zip(*dots, strict=True), "k.", markersize=2.5, alpha=0.6)
    error.set_xlabel("SQNR, dB (bar: all tensors; dots: each tensor)")
    error.set_yticks(lines, names, fontsize=8)
    error.invert_yaxis()
    error.grid(axis="x", alpha=0.3)

    exponents = [e for one in summary.values() for e in one.statistics.exponents]
    if exponents:
        low, high = min(exponents), max(exponents)
        share = np.zeros((len(names), high - low + 1))
        for line, one in enumerate(summary.values()):
            for exponent, count in one.statistics.exponents.items():
                share[line, exponent - low] = count / one.statistics.exponents.total()
        image = scales.imshow(
            np.ma.masked_equal(share, 0),
            aspect="auto",
            interpolation="nearest",
            norm=LogNorm(vmin=max(share[share > 0].min(), 1e-6), vmax=1),
            extent=(low - 0.5, high + 0.5, len(names) - 0.5, -0.5),
        )
        figure.colorbar(image, ax=scales, label="share of the format's scales", pad=0.01)
    scales.set_xlabel("binary exponent of the decode scale")
    compared = ", ".join(backend.name for backend in findings.backends)
    verdict = "BITS DIFFER" if not findings.identical else "nothing compared" if findings.empty else "all bits equal"
    figure.suptitle(f"{', '.join(p.name for p in findings.files)} through {compared}: {verdict}")
    figure.savefig(path, format="png", dpi=110)


def _draw_products(axes: Axes, summary: Sequence[Summary]) -> None:
    """Writes each format's cell of the table: yes, NO with a number, or - without products."""
    axes.set_title("products", fontsize=9)
    axes.set_xticks([])
    axes.tick_params(left=False)
    for line, one in enumerate(summary):
        color = "C3" if one.differing_products else "C2" if one.products else "0.5"
        axes.text(0.5, line, product_verdict(one), color=color, ha="center", va="center", fontsize=8)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
