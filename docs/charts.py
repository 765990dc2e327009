"""Charts of measurements, drawn from files of benchmarks/results."""

from __future__ import annotations

import math
import statistics

from svg import Drawing

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


def panel(drawing: Drawing, left: float, curves: dict[str, list[tuple[float, float]]], title: str, zero: bool) -> None:
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


def evidence(results: dict, losses: str = "loss", since: float = 0.0) -> Drawing:
    """Draws losses relative to bf16's, and the SQNR of inputs and gradients over time; arguments as for `differences`."""
    drawing = Drawing("Recipes compared with bf16", 800, 320)
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


def kernels(result: dict) -> Drawing:
    """Draws a result of gpu.py: one bar per kernel, as a share of a copy's speed."""
    directions = {"r": "row", "c": "column", "rc": "row + column", "rp": "row + rotated column"}
    rows = [
        row
        for row in result["rows"]
        if row["shape"] == [16384, 8192]
        and row["directions"] != "t"
        and (row["directions"] != "d" or "bfloat16" in row["kernel"])
    ]
    drawing = Drawing("Share of a copy's speed that each kernel reaches", 800, 80 + 15 * len(rows))
    drawing.text(
        20, 20, f"{result['gpu']}, {result['date'][:10]}: share of a copy's bytes a second, 16384 x 8192 bfloat16", "b"
    )
    drawing.text(20, 38, "The line is the copy. Grey bars are others: compilers and torchao.", "s")
    for i, row in enumerate(rows):
        y = 50 + 15 * i
        parts = (
            row["kernel"].split(" (")[0],
            directions.get(row["directions"]),
            "stochastic" if row["mode"] == "True" else None,
        )
        drawing.text(330, y + 10, ", ".join(part for part in parts if part), "s", "end")
        drawing.box(336, y, 400 * row["of_copy"], 12, "p" if row["source"] == "peer" else "o")
        drawing.text(331 + 400 * row["of_copy"], y + 10, f"{row['of_copy']:.2f}", "s", "end")
    drawing.lines.append(f'<path d="M736 46V{54 + 15 * len(rows)}" class="l"/>')
    return drawing


def step_times(result: dict) -> Drawing:
    """Draws a result of fsdp2_gpu.py: one bar per contender, in milliseconds per step."""
    names = {
        "bf16": "PyTorch, bf16",
        "torchao": "torchao, FP8 per tensor",
        "torchao_fp8_gather": "the same, FP8 all-gather",
        "fp8_current": "blockfp, FP8 per tensor",
        "fp8_delayed": "blockfp, the same, delayed",
        "fp8_block": "blockfp, FP8 in blocks",
        "mxfp8": "blockfp, MXFP8",
    }
    rows = sorted(result["rows"], key=lambda row: list(names).index(row["contender"]))
    longest = max(row["ms"] for row in rows)
    drawing = Drawing("Milliseconds of a training step under FSDP2", 800, 100 + 30 * len(rows))
    drawing.text(20, 22, f"A training step under FSDP2, ms: {result['gpus']} x {result['gpu']}, {result['date'][:10]}", "b")
    model = f"{rows[0]['parameters'] / 1e9:.2f} billion parameters, {result['tokens']} tokens a GPU"
    drawing.text(20, 42, f"{result['layers']} transformer blocks, {model}, torch {result['torch']}", "s")
    drawing.text(690, 62, "gathered", "s", "end")
    drawing.text(780, 62, "peak memory", "s", "end")
    for i, row in enumerate(rows):
        y = 72 + 30 * i
        drawing.text(270, y + 15, names[row["contender"]], anchor="end")
        drawing.box(280, y, 280 * row["ms"] / longest, 21, "o" if names[row["contender"]].startswith("blockfp") else "p")
        drawing.text(288 + 280 * row["ms"] / longest, y + 15, f"{row['ms']:.0f}", "b")
        drawing.text(690, y + 15, f"{row['gathered_mb'] / 1000:.2f} GB", anchor="end")
        drawing.text(780, y + 15, f"{row['peak_gib']:.1f} GiB", anchor="end")
    return drawing


def choices(result: dict) -> Drawing:
    """Draws speed against held-out loss of each recipe of a result of evidence.py, both relative to bf16's."""
    runs = {run["recipe"]: run for run in result["runs"]}
    bf16 = runs.pop("bf16")
    drawing = Drawing("Speed and held-out loss of each recipe against bf16", 800, 330)
    drawing.text(20, 22, f"{result['common']['size'][:-1]} million parameters, one run each, relative to bf16", "b")
    left, top, width, height, slowest, fastest, most = 90, 50, 640, 210, 0.5, 1.2, 0.02
    drawing.box(left, top, width, height)

    def across(speed: float) -> float:
        return left + width * (speed - slowest) / (fastest - slowest)

    def down(loss: float) -> float:
        return top + height * (1 - (loss + 0.003) / (most + 0.003))

    for speed in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1):
        drawing.text(across(speed), top + height + 18, f"{speed:.1f}", "s", "middle")
    for loss in (0.0, 0.005, 0.01, 0.015, 0.02):
        drawing.text(left - 8, down(loss) + 4, f"{loss:+.3f}", "s", "end")
    drawing.lines.append(f'<path d="M{left} {down(0):g}h{width}M{across(1):g} {top}v{height}" class="d"/>')
    drawing.text(left + width / 2, top + height + 42, "tokens a second, times bf16's: right is faster", "s", "middle")
    drawing.text(left, top - 8, "held-out loss above bf16's: low is better", "s")
    for recipe, run in runs.items():
        x = across(run["tokens_per_second"] / bf16["tokens_per_second"])
        y = down(run["held_out_loss"] - bf16["held_out_loss"])
        drawing.lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="o"/>')
        drawing.text(round(x + 9), round(y + 4), recipe, "s")
    return drawing


def scale(result: dict) -> Drawing:
    """Draws a result of scale.py per model: bytes of FSDP's gather relative to bfloat16, and blocks shared by ranks."""
    kinds = {"fp8_block": "r0", "mxfp8": "r1", "mxfp4": "r2", "nvfp4": "r3"}
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    drawing = Drawing("Bytes of FSDP's gather, and blocks that several ranks share", 800, 470)
    for column, model in enumerate(models):
        left = 60 + 250 * column
        drawing.text(left, 22, model, "b")
        panels = ("gather's bytes relative to bfloat16's", 0.6, 40), ("blocks shared by ranks", 1.0, 240)
        for (what, most, top), measure in zip(panels, (_gathered, _shared), strict=True):
            drawing.text(left, top + 12, what, "s")
            drawing.box(left, top + 20, 210, 150)
            for share in (0, most / 2, most):
                y = top + 170 - 150 * share / most
                drawing.text(left - 6, y + 4, f"{share:.0%}", "s", "end")
            for dashed in (False, True):
                rows = [r for r in result["rows"] if r["model"] == model and "HSDP" not in r["mesh"]]
                rows = [row for row in rows if ("TP" in row["mesh"]) == dashed]
                for recipe, kind in kinds.items():
                    points = [
                        (left + 210 * (math.log2(row["ranks"]) - 3) / 11, top + 170 - 150 * measure(row) / most)
                        for row in rows
                        if row["recipe"] == recipe
                    ]
                    drawing.line(points, kind, dashed)
            for ranks in (8, 512, 16384):
                x = left + 210 * (math.log2(ranks) - 3) / 11
                drawing.text(x, top + 186, f"{ranks:,}", "s", "middle")
    for i, (recipe, kind) in enumerate(kinds.items()):
        drawing.line([(60 + 110 * i, 451), (84 + 110 * i, 451)], kind)
        drawing.text(90 + 110 * i, 455, recipe, "s")
    drawing.text(510, 455, "by ranks; solid: FSDP, dashed: FSDP x TP 8 x EP", "s")
    return drawing


def _gathered(row: dict) -> float:
    return row["received"] / row["received_bf16"]


def _shared(row: dict) -> float:
    return row["straddling"] / row["blocks"]
