"""Draws the figures of the docs: communication from the plans themselves, measurements from benchmarks/results.

python docs/drawings.py [FOLDER]     writes every .svg, by default into docs/; a test compares the files there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blockfp.formats import Format
from blockfp.recipes import PRODUCTS, Recipe, parse
from blockfp.sharding.placement import Mesh, Shard, Sharding, StridedShard
from blockfp.sharding.plans import gather_activation, gather_weight, quantize_shards
from blockfp.sharding.steps import Gather, Quantize, grid_span

sys.path.append(str(Path(__file__).parent))
from charts import choices, evidence, kernels, scale, step_times
from svg import Drawing

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


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
        "evidence.svg": evidence(result("evidence-1m-cpu-2026-11-22.json")),
        "evidence-124m.svg": evidence(result("evidence-124m-h200-2026-11-23.json"), "held_out", 3e7),
        "choose.svg": choices(result("evidence-124m-h200-2026-11-23.json")),
        "scale.svg": scale(result("scale-2026-11-22.json")),
        "training-step.svg": step_times(result("fsdp2-transformer-2x16384-2026-11-27.json")),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, drawing in drawings().items():
        (folder / name).write_text(str(drawing))
