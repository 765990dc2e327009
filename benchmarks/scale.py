"""Computes plans for models of hundreds of billions of parameters on up to 16,384 ranks, by blockfp's pure functions.

    python benchmarks/scale.py [--out scale.json] [--seed 0] [--cut-outs 200]

For each model, mesh and recipe: the bytes a rank holds, and receives in one FSDP gather of all weights; the blocks that several
ranks share, and the cost of their amaxes; the time and memory of planning itself, without cached plans. Then cut-outs, small
weights whose boundaries divide the same blocks, go through `simulate`: every rank's gathered codes and scales must equal the
whole weight's, bit for bit. Any difference ends the program with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass

import numpy as np
from model_shapes import MESHES, MODELS, Parallelism, Weight

from blockfp import recipes
from blockfp.definition import layout, numerics
from blockfp.formats import Format
from blockfp.sharding import plans, simulate
from blockfp.sharding.placement import Mesh, Sharding, StridedShard
from blockfp.sharding.steps import Gather, Quantize, grid_span

RECIPES = ("fp8_current", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
LARGEST_CHUNK = 96


@dataclass
class Row:
    """One model on one mesh in one recipe; bytes are rank 0's, the largest.

    Attributes:
        held: bytes of codes and scales that the rank keeps.
        held_bf16: the same in bfloat16.
        received: bytes that it receives when FSDP gathers every weight once.
        received_bf16: the same in bfloat16.
        blocks: blocks of all weights.
        straddling: blocks that several ranks share.
        reductions: max-reductions after an optimizer step, one per weight and direction; they can be sent together.
        reduced: bytes that the rank contributes to them.
        plan_ms: median milliseconds to plan a weight's quantization and gather for the first time.
        plan_ms_most: the longest.
        plan_mib: peak MiB of making all of these plans.
    """

    model: str
    mesh: str
    ranks: int
    recipe: str
    format: str
    held: int = 0
    held_bf16: int = 0
    received: int = 0
    received_bf16: int = 0
    blocks: int = 0
    straddling: int = 0
    reductions: int = 0
    reduced: int = 0
    plan_ms: float = 0.0
    plan_ms_most: float = 0.0
    plan_mib: float = 0.0


def made(sharding: Sharding, format: Format) -> tuple[Quantize, tuple[Gather, ...]]:
    """Plans a weight's quantization and FSDP gather from scratch, with what a rank asks of the plans."""
    quantize = plans.quantize_shards.__wrapped__(format, sharding).steps[-1]
    gathers = plans.gather_weight.__wrapped__(format, sharding, ("fsdp",)).steps
    for gather in gathers:
        gather.stored(0), gather.scales(0), gather.unpacks
    return quantize, gathers


def planned(weights: list[Weight], mesh: Parallelism, row: Row) -> Row:
    """Returns the completed row."""
    format, times = Format.parse(row.format), []
    tracemalloc.start()
    found = [made(mesh.sharding(weight), format) for weight in weights]
    row.plan_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    for weight in weights:
        sharding = mesh.sharding(weight)
        once = []
        for _ in range(5):
            for kept in (Gather.elements, Gather.stored, Gather.scales):
                kept.cache_clear()
            start = time.perf_counter()
            made(sharding, format)
            once.append(time.perf_counter() - start)
        times.append(min(once) * 1e3)
    for weight, (quantize, gathers) in zip(weights, found, strict=True):
        add(row, weight, quantize, gathers)
    row.plan_ms, row.plan_ms_most = statistics.median(times), max(times)
    return row


def add(row: Row, weight: Weight, quantize: Quantize, gathers: tuple[Gather, ...]) -> None:
    format, lies = quantize.format, quantize.sharding
    region = lies.region(0)
    elements = math.prod(region.shape)
    scales = layout.scales_shape(region.shape, format, region.origin)
    width = 4 if format.scale.dtype == "float32" else 1
    extra = 4 if format.scale.two_level else 0
    row.held += weight.count * (math.prod(layout.codes_shape(region.shape, format)) + math.prod(scales) * width + extra)
    row.held_bf16 += weight.count * elements * 2
    for gather in gathers:
        others = len(gather.group(0)) - 1
        part = gather.sharding.region(0)
        stored, grid = list(layout.codes_shape(part.shape, format)), list(scales)
        stored[gather.dim], grid[gather.dim] = gather.stored(0).chunk, gather.scales(0).chunk
        row.received += weight.count * others * (math.prod(stored) + math.prod(grid) * width + extra)
        plain = list(part.shape)
        plain[gather.dim] = gather.elements(0).chunk
        row.received_bf16 += weight.count * others * math.prod(plain) * 2
    whole = layout.scales_shape(lies.shape, format)
    row.blocks += weight.count * math.prod(whole)
    row.reductions += weight.count * (bool(quantize.amax_axes) + len(quantize.straddles))
    row.reduced += weight.count * 4 * bool(quantize.amax_axes)
    for straddle in quantize.straddles:
        shared, own = list(whole), [grid_span(format, region, dim)[1] for dim in range(len(whole))]
        shared[straddle.dim] = own[straddle.dim] = len(straddle.blocks)
        row.straddling += weight.count * math.prod(shared)
        row.reduced += weight.count * math.prod(own) * 4


def cut_out(sharding: Sharding, rng: np.random.Generator) -> Sharding:
    """Returns a small weight on few ranks: parts congruent to the original's modulo 128, and a random end."""
    counts = [int(min(size, rng.integers(2, 5))) for size in sharding.mesh.shape]
    mesh, shape = Mesh(counts, sharding.mesh.names), []
    for dim, size in enumerate(sharding.shape):
        order = sharding.order(dim)
        chunk = int(sharding.chunks(dim)[1].max())
        chunk = chunk if chunk <= LARGEST_CHUNK else 128 * int(rng.integers(0, 2)) + chunk % 128 or 128
        ranks = math.prod(mesh.axis_size(name) for name in order)
        small = chunk * ranks - int(rng.integers(0, chunk)) if ranks > 1 else min(size, int(rng.integers(1, 200)))
        shape.append(small if dim >= len(sharding.shape) - 2 else min(small, 4))
    placements = [
        StridedShard(p.dim, mesh.axis_size(sharding.order(p.dim)[0])) if isinstance(p, StridedShard) else p
        for p in sharding.placements
    ]
    return Sharding(tuple(shape), mesh, tuple(placements))


def differing_bits(sharding: Sharding, format: Format, rng: np.random.Generator) -> int:
    """Counts the bits in which the ranks' quantized and gathered weight differs from the quantization of the whole."""
    x = (rng.standard_normal(sharding.shape) * np.exp2(rng.integers(-8, 9, sharding.shape))).astype(np.float32)
    shards = simulate.run(plans.quantize_shards(format, sharding), simulate.shards(x, sharding))
    shards = [numerics.Quantized(local.codes, local.scales, local.tensor_scale) for local in shards]
    gather = plans.gather_weight(format, sharding, ("fsdp",))
    whole, bits = numerics.quantize(x, format), 0
    for rank, local in enumerate(simulate.run(gather, shards)):
        region = gather.target.region(rank)
        if region.empty:
            continue
        values = numerics.dequantize(*whole, format, "float32", columns=x.shape[-1])[region.slices]
        own = numerics.dequantize(
            local.codes, local.scales, local.tensor_scale, format, "float32", columns=region.shape[-1], origin=region.origin
        )
        bits += different(values, own)
        rows, columns = (grid_span(format, region, dim) for dim in (-2 + x.ndim, -1 + x.ndim))
        grid = [*region.slices[:-2], slice(rows[0], sum(rows)), slice(columns[0], sum(columns))]
        scales = whole.scales if format.block is None else whole.scales[tuple(grid)]
        bits += different(np.ascontiguousarray(scales), local.scales)
        codes = layout.unpack(whole.codes, format.element.bits, x.shape[-1])[region.slices]
        bits += different(codes, layout.unpack(local.codes, format.element.bits, region.shape[-1]))
        if whole.tensor_scale is not None:
            bits += different(np.asarray(whole.tensor_scale), np.asarray(local.tensor_scale))
    return bits


def different(a: np.ndarray, b: np.ndarray) -> int:
    if a.shape != b.shape:
        raise SystemExit(f"shapes differ: {a.shape} and {b.shape}")
    kind = f"u{a.dtype.itemsize}"
    return int(np.bitwise_count(np.ascontiguousarray(a).view(kind) ^ np.ascontiguousarray(b).view(kind)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut-outs", type=int, default=200)
    options = parser.parse_args()

    rows = []
    for model, weights in MODELS.items():
        for mesh in MESHES:
            if mesh.expert > 1 and all(weight.kind != "experts" for weight in weights):
                mesh = Parallelism(mesh.shard, mesh.replicate, mesh.tensor)
            for recipe in RECIPES:
                format = recipes.parse(recipe).weight.format
                assert format is not None
                row = planned(weights, mesh, Row(model, str(mesh), mesh.ranks, recipe, format.name))
                rows.append(row)
                print(
                    f"{model:16} {row.mesh:24} {recipe:12} holds {row.held / 2**20:9.1f} MiB ({row.held / row.held_bf16:.3f}), "
                    f"receives {row.received / 2**30:6.1f} GiB ({row.received / row.received_bf16:.3f}), "
                    f"{row.straddling / row.blocks:6.1%} of blocks shared, {row.reductions} reductions of "
                    f"{row.reduced / 2**20:.2f} MiB, plans {row.plan_ms:.2f} ms (at most {row.plan_ms_most:.2f}), "
                    f"{row.plan_mib:.1f} MiB",
                    flush=True,
                )

    rng, bits = np.random.default_rng(options.seed), 0
    for _ in range(options.cut_outs):
        model = str(rng.choice(list(MODELS)))
        weight, mesh = MODELS[model][rng.integers(len(MODELS[model]))], MESHES[rng.integers(len(MESHES))]
        format = recipes.parse(str(rng.choice(RECIPES))).weight.format
        assert format is not None
        small = cut_out(mesh.sharding(weight), rng)
        found = differing_bits(small, format, rng)
        if found:
            print(f"{model} {weight.name} on {mesh} in {format}: {found} bits differ in {small}")
        bits += found
    print(f"{options.cut_outs} cut-outs through simulate: {bits} differing bits")

    if options.out:
        told = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        told |= {"cut_outs": options.cut_outs, "seed": options.seed, "differing_bits": bits}
        with open(options.out, "w") as file:
            rounded = [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows]
            lines = ",\n  ".join(json.dumps(row) for row in rounded)
            file.write(f'{{"versions": {json.dumps(told)},\n "rows": [\n  {lines}\n]}}\n')
    sys.exit(bits > 0)


if __name__ == "__main__":
    main()
