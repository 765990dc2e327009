"""Measures the cost of reproducible runs: a training step of `bfp.Reproducible` and the usual one, on any number of ranks.

    torchrun --nproc-per-node 1 benchmarks/reproducible.py                       # one GPU, or the CPU (--width 512 --layers 2)
    torchrun --nproc-per-node 4 benchmarks/reproducible.py --tp 2 --splits 2     # FSDP 2 x TP 2

"usual" takes a rank's batch at once; "units" runs one unit after another and reduces gradients once. Both omit splits and sum
as the library does. "reproducible" is the mode. All three are in memory together and take turns, a step each. A row has the
milliseconds of a step (median, slowest rank) and their ratio to the usual ones (median of the turns). "peak_gib" is the most
memory that a rank takes in a step, in addition to the three models.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockfp.torch as bfp

WAYS = ("usual", "units", "reproducible")


def model_of(way: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Builds the blocks, parallelized and sharded for a mode."""
    torch.manual_seed(0)
    how = {"recipe": options.recipe, "norm": "rms_norm", "activation": "swiglu", "bias": False}
    with torch.device(device):
        sizes = (options.width, options.hidden, options.width // 64)
        blocks = [bfp.TransformerLayer(*sizes, **how) for _ in range(options.layers)]
    model = nn.Sequential(*blocks)
    if options.tp > 1 or (way == "reproducible" and options.splits):
        bfp.parallelize(model, mesh["tp"], splits=options.splits if way == "reproducible" else None)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def step_of(way: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """Returns one training step of a mode."""
    model = model_of(way, options, mesh, device)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-4)
    own = options.units // mesh["dp"].size()
    rows = torch.randn(own, options.length, options.width, device=device, dtype=torch.bfloat16)
    run = bfp.Reproducible(model, options.units, mesh["dp"]) if way == "reproducible" else None

    def loss_of(rows: Tensor) -> Tensor:
        return model(rows).float().square().mean()

    def step() -> None:
        if run is not None:
            run.backward(lambda unit: loss_of(rows[unit - run.own[0]][None]))
        elif way == "usual":
            loss_of(rows).backward()
        else:
            for index in range(own):
                model.set_requires_gradient_sync(index == own - 1)
                (loss_of(rows[index][None]) / own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """Returns the wall time of a step on the slowest rank, up to the last kernel."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return ranks.slowest([1e3 * (time.perf_counter() - start)], device)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; FSDP2 has the others")
    parser.add_argument("--splits", type=int, default=0, help="pieces of tensor-parallel layers; 0: none")
    parser.add_argument("--units", type=int, default=8, help="sequences per batch, over all ranks")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    options = parser.parse_args()
    device = ranks.start()
    mesh = init_device_mesh(device.type, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    steps = {way: step_of(way, options, mesh, device) for way in WAYS}
    peaks = {}
    for way, step in steps.items():
        step()
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        peaks[way] = ranks.slowest([(ranks.peak_bytes(step) - held) / 2**30], device)[0]
    turns = [{way: milliseconds(step, device) for way, step in steps.items()} for _ in range(options.steps)]
    rows = [
        {
            "way": way,
            "ms": round(statistics.median(turn[way] for turn in turns), 2),
            "ratio": round(statistics.median(turn[way] / turn["usual"] for turn in turns), 3),
            "peak_gib": round(peaks[way], 3),
        }
        for way in WAYS
    ]
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)
    setting = {name: value for name, value in vars(options).items() if name != "out"}
    date = datetime.datetime.now(datetime.UTC).date()
    ranks.report(options.out / f"reproducible-{options.recipe}-{dist.get_world_size()}-{date}.json", rows, **setting)
    ranks.finish()


if __name__ == "__main__":
    main()
