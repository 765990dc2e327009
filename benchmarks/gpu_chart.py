"""Draws a result of gpu.py: one bar a kernel, as a share of the copy.

python benchmarks/gpu_chart.py benchmarks/results/gpu-2026-11-21.json docs/gpu.svg
"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DIRECTIONS = {"r": "row", "c": "column", "rc": "row + column", "rp": "row + rotated column", "": ""}


def label(row: dict) -> str:
    parts = [row["kernel"].split(" (")[0], DIRECTIONS.get(row["directions"], "")]
    parts.append({"True": "stochastic"}.get(row["mode"], ""))
    return ", ".join(part for part in parts if part)


def main(source: str, target: str):
    result = json.loads(pathlib.Path(source).read_text())
    rows = [
        row
        for row in result["rows"]
        if row["shape"] == [16384, 8192]
        and row["directions"] != "t"
        and (row["directions"] != "d" or "bfloat16" in row["kernel"])
    ]
    rows.reverse()
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(rows) + 1))
    colors = ["#999999" if row["source"] == "peer" else "#3b6ea5" for row in rows]
    axes.barh([label(row) for row in rows], [row["of_copy"] for row in rows], color=colors, height=0.75)
    for y, row in enumerate(rows):
        axes.text(row["of_copy"] + 0.01, y, f"{row['of_copy']:.2f}", va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.1)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("share of a copy's bytes a second, 16384 x 8192 bfloat16")
    axes.set_title(f"{result['gpu']}, {result['date'][:10]} (line: the copy; grey: compilers)", fontsize=9)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
