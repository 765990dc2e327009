"""Draws the figures of the docs: communication from the plans themselves, measurements from benchmarks/results.

python docs/drawings.py [FOLDER]     writes every .svg, by default into docs/; a test compares the files there
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path

from blockfp.formats import Format
from blockfp.recipes import PRODUCTS, Recipe, parse
from blockfp.sharding.placement import Mesh, Shard, Sharding, StridedShard
from blockfp.sharding.plans import gather_activation, gather_weight, quantize_shards
from blockfp.sharding.steps import Gather, Quantize, grid_span

sys.path.append(str(Path(__file__).parent))
from evidence_charts import evidence

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
COLORS = {"r0": "#3b82f6", "r1": "#f5990b", "r2": "#22c55e", "r3": "#d946ef"}
STYLE = """\
svg{color:#24292f;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){svg{color:#e6edf3}}
text{fill:currentColor}
.b{font-weight:600}.s{font-size:11px}
.l{fill:none;stroke:currentColor}.d{fill:none;stroke:currentColor;stroke-dasharray:4 3}
.r0,.r1,.r2,.r3,.p,.o{stroke:currentColor;stroke-width:.5;fill-opacity:.4}
.r0,.o{fill:#3b82f6}.r1{fill:#f5990b}.r2{fill:#22c55e}.r3{fill:#d946ef}.p{fill:#888}"""


class Drawing:
    """Lines of an SVG file, with text in the page's text colour."""

    def __init__(self, title: str, width: int, height: int):
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "l") -> None:
        """Adds a rectangle; `kind` is a class of `STYLE`: l and d are outlines, r0 .. r3 ranks, p a peer, o blockfp."""
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def text(self, x: float, y: float, words: object, kind: str = "", anchor: str = "start") -> None:
        """Adds a line of text whose baseline is at y."""
        kind = f' class="{kind}"' if kind else ""
        anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.lines.append(f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{escape(str(words))}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Adds a line through the points, with a head at the last."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self.lines.append(f'<path d="M{path}" class="l" marker-end="url(#a)"/>')

    def line(self, points: list[tuple[float, float]], kind: str, dashed: bool = False) -> None:
        """Adds a line through the points in the colour of a class r0 .. r3."""
        path = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
        dashes = ";stroke-dasharray:5 3" if dashed else ""
        self.lines.append(
            f'<path d="M{path}" class="{kind}" style="fill:none;stroke:{COLORS[kind]};stroke-width:1.5{dashes}"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def rows_of(start: int, size: int) -> str:
    """Returns "rows FIRST to LAST"."""
    return f"rows {start} to {start + size - 1}"


def gather() -> Drawing:
    """Draws FSDP2's gather of a weight in 32x32 blocks whose shards split blocks."""
    sharding = Sharding((100, 96), Mesh((3,), ("fsdp",)), (Shard(0),))
    plan = gather_weight("mxfp8_e4m3_32x32", sharding, ("fsdp",))
    (step,) = plan.steps
    assert isinstance(step, Gather)
    assert step.format is not None
    codes, scales = step.elements(0), step.scales(0)
    drawing = Drawing("FSDP2 gathers codes and scales", 800, 430)
    drawing.text(20, 24, f"A weight {list(sharding.shape)} in {step.format} on three ranks", "b")
    drawing.text(20, 56, "stored and sent by each rank")
    drawing.text(470, 56, "on each rank after one all-gather")
    scale, top = 2.4, 76
    for rank, (source, _, size) in enumerate(codes.runs):
        start = sharding.span(0, rank)[0]
        y = top + rank * 112
        drawing.box(20, y, 110, size * scale, f"r{rank}")
        if size < codes.chunk:
            drawing.box(20, y + size * scale, 110, (codes.chunk - size) * scale, "d")
        drawing.text(28, y + 18, f"rank {source}", "b")
        drawing.text(28, y + 36, rows_of(start, size), "s")
        drawing.text(28, y + 52, f"of {codes.chunk} sent", "s")
        first, count = grid_span(step.format, sharding.region(rank), 0)
        kept = next((run[1:] for run in scales.runs if run[0] == rank), (0, 0))
        for entry in range(scales.chunk):
            held = entry < count
            drawing.box(142, y + entry * 24, 124, 22, f"r{rank}" if held else "d")
            words = f"scales, block row {first + entry}" if held else "padding"
            drawing.text(148, y + entry * 24 + 15, words, "s")
            if held and not kept[0] <= entry < kept[1]:
                drawing.text(272, y + entry * 24 + 15, "equal: the first is kept", "s")
        drawing.arrow((398, y + 40), (452, y + 40))
    y = top
    for rank, (_, _, size) in enumerate(codes.runs):
        drawing.box(470, y, 120, size * scale, f"r{rank}")
        drawing.text(478, y + 18, rows_of(sharding.span(0, rank)[0], size), "s")
        y += size * scale
    drawing.text(470, y + 22, "codes: as they came", "s")
    y = top
    for source, start, stop in scales.runs:
        first = grid_span(step.format, sharding.region(source), 0)[0]
        for block in range(first + start, first + stop):
            height = (min(100, 32 * block + 32) - 32 * block) * scale
            drawing.box(610, y, 20, height, f"r{source}")
            drawing.text(638, y + min(height, 18), f"block row {block}, from rank {source}", "s")
            y += height
    drawing.text(610, y + 22, f"scales: entries {', '.join(map(str, scales.index))}", "s")
    drawing.text(610, y + 38, f"of {3 * scales.chunk}, by one index_select", "s")
    return drawing


def straddle() -> Drawing:
    """Draws the reduction of partial amaxes of blocks that shards split."""
    sharding = Sharding((80, 64), Mesh((2,), ("fsdp",)), (Shard(0),))
    (step,) = quantize_shards("mxfp8_e4m3_32x32", sharding).steps
    assert isinstance(step, Quantize)
    (shared,) = step.straddles
    drawing = Drawing("Blocks that straddle ranks share an amax", 800, 340)
    drawing.text(20, 24, f"A weight {list(sharding.shape)} in {step.format}, cut in two", "b")
    scale, top = 2.6, 50
    for rank in range(2):
        start, size = sharding.span(0, rank)
        y = top + start * scale + rank * 24
        for column in range(2):
            block = start // 32
            while block * 32 < start + size:
                low, high = max(start, 32 * block), min(start + size, 32 * block + 32)
                at = y + (low - start) * scale
                drawing.box(110 + column * 90, at, 90, (high - low) * scale, f"r{rank}")
                drawing.text(118 + column * 90, at + 18, f"block ({block}, {column})", "s")
                block += 1
        drawing.text(20, y + 18, f"rank {rank}", "b")
        drawing.text(20, y + 34, rows_of(start, size), "s")
        cut = [block for block in shared.blocks if start < 32 * block + 32 and 32 * block < start + size]
        for block in cut:
            low, high = max(start, 32 * block), min(start + size, 32 * block + 32)
            at = y + ((low + high) / 2 - start) * scale
            drawing.text(305, at + 4, f"partial amax of {high - low} rows")
            drawing.arrow((470, at), (540, top + 36 * scale + 20))
    y = top + 36 * scale + 20
    drawing.box(545, y - 34, 245, 68)
    drawing.text(555, y - 14, f"max-reduced over {', '.join(shared.axes)}", "b")
    drawing.text(555, y + 4, f"block row {', '.join(map(str, shared.blocks))} alone, as integers;", "s")
    drawing.text(555, y + 20, "both ranks encode with the same scale", "s")
    drawing.text(20, 320, "Blocks inside one rank are quantized there, and nothing is sent for them.", "s")
    return drawing


def tensor_parallel() -> Drawing:
    """Draws the blocks of a pair of layers on a mesh of two by two."""
    mesh = Mesh((2, 2), ("dp", "tp"))
    format = Format.parse("fp8_e4m3_128x128")
    assert format.block is not None
    up = Sharding((512, 512), mesh, (StridedShard(0, 2), Shard(0)))
    down = Sharding((512, 512), mesh, (Shard(0), Shard(1)))
    drawing = Drawing("Who holds which blocks of a pair of layers", 800, 350)
    pairs = (("up, column-parallel", up, "hidden", "width"), ("down, row-parallel", down, "width", "hidden"))
    for at, (name, sharding, rows, columns) in zip((90, 470), pairs, strict=True):
        drawing.text(at, 24, f"{name}: ({', '.join(map(str, sharding.placements))})", "b")
        drawing.text(at + 112, 46, columns, anchor="middle")
        drawing.text(at - 10, 170, rows, anchor="end")
        for rank, region in enumerate(sharding.regions):
            high, wide = format.block
            for row in range(region.start[0], region.start[0] + region.shape[0], high):
                for column in range(region.start[1], region.start[1] + region.shape[1], wide):
                    x, y = at + column * 56 / wide, 56 + row * 56 / high
                    drawing.box(x, y, 56, 56, f"r{rank}")
                    drawing.text(x + 28, y + 33, ",".join(map(str, mesh.coordinate(rank))), anchor="middle")
    drawing.text(
        90, 310, f"Each square is a block of {format.block[0]} x {format.block[1]}, with the (dp, tp) rank that stores it."
    )
    drawing.text(90, 330, "tp shards first; dp (FSDP2) shards the parts.", "s")
    return drawing


def sequence_parallel() -> Drawing:
    """Draws the forward of a pair of layers under sequence parallelism, with what is sent in which form."""
    mesh = Mesh((2,), ("tp",))
    tokens = Sharding((4096, 4096), mesh, (Shard(0),))
    plan = gather_activation("mxfp8_e4m3", tokens, ("tp",))
    gathers = [step for step in plan.steps if isinstance(step, Gather)]
    assert [step.payload for step in gathers] == ["codes"]
    assert plan.reason is None
    steps = (
        ("x", "this rank's tokens, all features", ""),
        ("norm", "its parameters are replicated", ""),
        ("quantize, rowwise and columnwise", "one read; the columnwise codes stay for the backward", ""),
        ("ALL-GATHER codes and scales", f"one collective over tp: {gathers[0].elements(0).chunk} tokens a rank", "o"),
        ("up: x wᵀ", "all tokens, this rank's features; the gathered codes are freed", ""),
        ("activation, or attention of this rank's heads", "", ""),
        ("quantize this rank's features", "blocks that straddle ranks share an amax first", ""),
        ("down: x wᵀ", "terms of all tokens and all features", ""),
        ("REDUCE-SCATTER", "this rank's tokens of the sum; then the bias and the residual", "o"),
    )
    drawing = Drawing("What a pair of layers sends under sequence parallelism", 800, 40 + 46 * len(steps))
    for i, (what, note, kind) in enumerate(steps):
        y = 20 + 46 * i
        drawing.box(20, y, 320, 30, kind or "l")
        drawing.text(180, y + 20, what, "b" if kind else "", "middle")
        drawing.text(360, y + 20, note)
        if i + 1 < len(steps):
            drawing.arrow((180, y + 30), (180, y + 45))
    return drawing


def layer(recipe: Recipe) -> Drawing:
    """Draws a linear layer's products, with the format and direction of each operand."""
    drawing = Drawing(f"What a linear layer quantizes with the recipe {recipe}", 800, 300)
    drawing.text(20, 24, f"The recipe {recipe}: three products and their operands", "b")
    sums = {"forward": "y = x wᵀ", "dgrad": "dx = g w", "wgrad": "dw = gᵀ x"}
    along = {"forward": "in", "dgrad": "out", "wgrad": "tokens"}
    for i, (product, operands) in enumerate(PRODUCTS.items()):
        y = 50 + 82 * i
        drawing.box(600, y + 8, 180, 52)
        drawing.text(690, y + 30, sums[product], "b", "middle")
        drawing.text(690, y + 48, f"{product}, summed over {along[product]}", "s", "middle")
        for j, (operand, direction) in enumerate(operands):
            cast = recipe.cast(operand, direction)
            at = y + 36 * j
            drawing.box(20, at, 130, 30, f"r{('input', 'weight', 'gradient').index(operand)}")
            drawing.text(85, at + 20, operand, anchor="middle")
            drawing.arrow((150, at + 15), (180, at + 15))
            drawing.box(184, at, 330, 30)
            derived = operand == "weight" and direction == "columnwise" and cast.format is recipe.weight.format
            drawing.text(194, at + 20, f"{direction}: {cast}" + (", derived exactly" if derived else ""))
            drawing.arrow((514, at + 15), (596, y + 34))
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
        "torchao_fp8_gather": "torchao, FP8 per tensor, FP8 all-gather",
        "fp8_current": "blockfp, FP8 per tensor",
        "fp8_block": "blockfp, FP8 in blocks",
        "mxfp8": "blockfp, MXFP8, products then in bf16",
    }
    rows = result["rows"]
    drawing = Drawing("Milliseconds of a training step under FSDP2", 800, 100 + 30 * len(rows))
    drawing.text(20, 22, f"A training step under FSDP2, ms: {result['gpus']} x {result['gpu']}, {result['date'][:10]}", "b")
    model = f"{rows[0]['parameters'] / 1e9:.2f} billion parameters, {result['tokens']} tokens a GPU"
    drawing.text(20, 42, f"{result['layers']} transformer blocks, {model}, torch {result['torch']}", "s")
    drawing.text(690, 62, "gathered", "s", "end")
    drawing.text(780, 62, "peak memory", "s", "end")
    for i, row in enumerate(rows):
        y = 72 + 30 * i
        drawing.text(270, y + 15, names[row["contender"]], anchor="end")
        drawing.box(280, y, 280 * row["ms"] / 181, 21, "o" if names[row["contender"]].startswith("blockfp") else "p")
        drawing.text(288 + 280 * row["ms"] / 181, y + 15, f"{row['ms']:.0f}", "b")
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


def drawings() -> dict[str, Drawing]:
    """Returns all drawings by file name."""

    def result(name: str) -> dict:
        return json.loads((RESULTS / name).read_text())

    return {
        "gather.svg": gather(),
        "straddle.svg": straddle(),
        "tensor-parallel.svg": tensor_parallel(),
        "sequence-parallel.svg": sequence_parallel(),
        "layer-mxfp8.svg": layer(parse("mxfp8")),
        "layer-nvfp4.svg": layer(parse("nvfp4")),
        "gpu.svg": kernels(result("gpu-2026-11-21.json")),
        "evidence.svg": evidence(Drawing("Recipes compared with bf16", 800, 320), result("evidence-1m-cpu-2026-11-22.json")),
        "evidence-124m.svg": evidence(
            Drawing("Recipes compared with bf16", 800, 320), result("evidence-124m-h200-2026-11-23.json"), "held_out", 3e7
        ),
        "choose.svg": choices(result("evidence-124m-h200-2026-11-23.json")),
        "scale.svg": scale(result("scale-2026-11-22.json")),
        "training-step.svg": step_times(result("fsdp2-transformer-2x16384-2026-11-27.json")),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, drawing in drawings().items():
        (folder / name).write_text(str(drawing))
