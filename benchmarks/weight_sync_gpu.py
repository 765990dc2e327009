"""Times sending a sharded model's weights to a server: codes unchanged, or values that are quantized again.

    torchrun --nproc-per-node 2 benchmarks/weight_sync_gpu.py

Rank 0 ends up with every tensor that the server loads, on its GPU, bucket after bucket. Contenders:

    codes        `stream_weights`: codes and scales gathered, nothing else
    codes, sums  the same with a SHA-256 of each tensor on the host, a second and more for 2 GB: timed at most three times
    requantized  each weight's values gathered in bfloat16 and quantized again, as trainers with bfloat16 weights do

Milliseconds are the slowest rank's, bytes are what each GPU sends (its part, to all others), peak is rank 0's beyond the model.
`differing` counts bytes of rank 0's tensors that differ from the trainer's.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from blockfp.torch_backend.quantized_tensor import sharding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import blockfp.torch as bfp

DIGESTED = 3
"""Most repeats of the contender with digests, which the host makes."""


def build(options: argparse.Namespace, device: torch.device, *, quantized: bool) -> nn.ModuleList:
    """Builds a sharded stack of linear layers with values; in bfloat16 if unquantized."""
    like = {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
    width = options.width
    layers = (
        bfp.Linear(width, width, recipe=options.recipe, **like) if quantized else nn.Linear(width, width, **like)
        for _ in range(options.layers)
    )
    model = nn.ModuleList(layers)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    return model


def streamed(model: nn.ModuleList, options: argparse.Namespace, *, sha256: bool) -> int:
    """Takes every bucket and drops it; returns the total bytes."""
    stream = bfp.stream_weights(model, layout=options.layout, bucket_bytes=options.bucket_mib << 20, sha256=sha256)
    return sum(bucket.nbytes for bucket in stream)


def requantized(model: nn.ModuleList, options: argparse.Namespace) -> int:
    """Gathers values, quantizes them on rank 0 and drops them; returns the bytes of the results."""
    total = 0
    for param in model.parameters():
        assert isinstance(param, DTensor)
        whole = param.detach().full_tensor()
        if dist.get_rank() == 0:
            q = bfp.quantize(whole, bfp.recipes.parse(options.recipe).weight.format)
            total += q.codes.nbytes + q.scales.nbytes
    return total


def differing(model: nn.ModuleList, options: argparse.Namespace) -> int:
    """Counts bytes of codes that differ between a rank and the stream, over all ranks."""
    params = dict(model.named_parameters())
    found = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
    for bucket in bfp.stream_weights(model, layout=options.layout, keep_on=None, sha256=False):
        for name, tensor in bucket:
            if name in params:
                own = sharding.local_of(params[name])
                part = tensor.view(torch.uint8)[sharding.region_of(params[name]).slices]
                found += (part != own.codes).sum()
    dist.all_reduce(found)
    return int(found)


def measure(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Returns a contender's row."""
    repeats = min(options.repeats, DIGESTED) if name == "codes, sums" else options.repeats
    ranks.say(f"{name}: making {options.layers} layers")
    model = build(options, device, quantized=name != "requantized")
    if name == "requantized":
        run = lambda: requantized(model, options)  # noqa: E731
    else:
        run = lambda: streamed(model, options, sha256=name == "codes, sums")  # noqa: E731
    ranks.say(f"{name}: {options.layers} layers; a first run, one for the peak, {repeats} that are timed")
    run()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    peak = ranks.peak_bytes(run) - held
    times = [ranks.slowest([ranks.timed(run)], device)[0] for _ in range(repeats)]
    world, element = dist.get_world_size(), 2 if name == "requantized" else 1
    sent = options.layers * options.width**2 * element * (world - 1) / world
    figures = {"ms": statistics.median(times), "sent_MB": sent / 1e6, "peak_MB": peak / 1e6}
    row = {"contender": name, "repeats": repeats, **{key: round(value, 2) for key, value in figures.items()}}
    if name == "requantized":
        return row
    ranks.say(f"{name}: comparing each byte")
    return row | {"differing": differing(model, options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8_block")
    parser.add_argument("--layout", default="fine-grained-fp8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7, help=f"timed runs per contender, at most {DIGESTED} with digests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    options = parser.parse_args()
    device = ranks.start()
    rows = ranks.measured(("codes", "codes, sums", "requantized"), lambda name: measure(name, options, device))
    date, world = datetime.datetime.now(datetime.UTC).date(), dist.get_world_size()
    about = {"recipe": options.recipe, "layout": options.layout, "layers": options.layers, "width": options.width}
    ranks.report(options.out / f"weight-sync-{world}-gpus-{date}.json", rows, **about)
    ranks.finish()


if __name__ == "__main__":
    main()
