"""Draws what scale.py found: bytes beside bfloat16's, blocks that lie on several ranks, and the time of planning, by ranks."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = {
    "fp8_current": "#4477aa",
    "fp8_block": "#66ccee",
    "mxfp8": "#228833",
    "mxfp6": "#ccbb44",
    "mxfp4": "#ee6677",
    "nvfp4": "#aa3377",
}
STYLES = {"FSDP": "-", "FSDP x TP x EP": "--"}


def draw(rows: list[Any], path: str) -> None:
    """Writes the chart: a column for each model, a line for each recipe and kind of mesh."""
    plt.rcParams |= {"svg.hashsalt": "blockfp", "svg.fonttype": "none", "font.size": 8}
    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(3, len(models), figsize=(10, 7), sharex=True, sharey="row", layout="constrained")
    for column, model in enumerate(models):
        for recipe, color in COLORS.items():
            for kind, style in STYLES.items():
                found = [r for r in rows if (r.model, r.recipe) == (model, recipe) and _kind(r.mesh) == kind]
                ranks = [row.ranks for row in found]
                values = (
                    [row.received / row.received_bf16 for row in found],
                    [row.straddling / row.blocks * 100 for row in found],
                    [row.plan_ms_most for row in found],
                )
                for panel, line in zip(panels[:, column], values, strict=True):
                    panel.plot(ranks, line, style, color=color, linewidth=1, marker=".", markersize=3)
        panels[0, column].set_title(model)
        panels[-1, column].set_xlabel("ranks")
        panels[-1, column].set_xscale("log", base=2)
    titles = ("bytes of FSDP's gather\nbeside bfloat16's", "blocks on several ranks, %", "longest planning of a weight, ms")
    for row, title in enumerate(titles):
        panels[row, 0].set_ylabel(title)
        panels[row, 0].set_ylim(bottom=0)
    handles = [plt.Line2D([], [], color=color, label=recipe) for recipe, color in COLORS.items()]
    handles += [plt.Line2D([], [], color="gray", linestyle=style, label=kind) for kind, style in STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, metadata={"Date": None})


def _kind(mesh: str) -> str:
    if "HSDP" in mesh:
        return "HSDP"
    return "FSDP x TP x EP" if "TP" in mesh else "FSDP"
