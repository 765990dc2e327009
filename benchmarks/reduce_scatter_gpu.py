"""Measures FSDP2's reduce-scatter of gradients in bf16 and as codes: bytes, milliseconds, and a training curve.

    torchrun --nproc-per-node 2 benchmarks/reduce_scatter_gpu.py
    torchrun --nproc-per-node 2 benchmarks/reduce_scatter_gpu.py --width 64 --hidden 256 --layers 2 --train 20    # on a CPU

For every contender: the bytes that a rank sends in a step's reduce-scatters; milliseconds of one block's reduction alone
(including the copy into FSDP2's buffer), and of a step of a stack of MLPs (both medians, slowest rank; zero on a CPU); and the
losses of a byte-level transformer in bf16, from the same weights on the same bytes, with the largest distance from the first
contender's curve. (There, sums are rounded to fp32, in "bf16" too.)
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp2_gpu
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from blockfp.experimental.torch import quantize_reduce_scatter

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import byte_text
import train_fsdp2

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
GOAL = 0.52
"""Bytes of a contender, of bf16's."""


class _Given(torch.autograd.Function):
    """A sum with a given gradient; it computes nothing."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


class Gradients(nn.Module):
    """The parameters of a block, with existing gradients."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.values = nn.ParameterList(torch.zeros_like(p) for p in block.parameters())

    def forward(self, gradients):
        return sum(_Given.apply(p, gradient) for p, gradient in zip(self.values, gradients, strict=True))


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[float]]:
    """Collects the bytes that this rank sends to others in reduce-scatters and all-to-alls."""
    sizes: list[float] = []
    # What FSDP2 calls: the first from torch 2.13 on.
    names = [n for n in ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single") if hasattr(dist, n)]
    real = {name: getattr(dist, name) for name in names}
    inside: list[str] = []

    def counting(name: str):
        def call(output, input, *args, **kwargs):
            if not inside:
                sizes.append(input.nbytes * (1 - 1 / dist.get_world_size()))
            inside.append(name)
            try:
                return real[name](output, input, *args, **kwargs)
            finally:
                inside.pop()

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sizes
    finally:
        for name in names:
            setattr(dist, name, real[name])


def applied(model: nn.Module, contender: str) -> nn.Module:
    """Makes a sharded model reduce its gradients as a contender does."""
    if contender != "bf16":
        quantize_reduce_scatter(model, contender)
    return model


def reduction(contender: str, options: argparse.Namespace, device: torch.device) -> float:
    """Returns the milliseconds of reducing a block's gradients."""
    with torch.device(device):
        model = Gradients(fsdp2_gpu.MLPBlock(options.width, options.hidden))
        gradients = [torch.randn(p.shape, dtype=torch.bfloat16) for p in model.parameters()]
    model = fully_shard(model, mp_policy=POLICY, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    applied(model, contender)

    def step():
        model(gradients).backward()
        model.zero_grad()

    for _ in range(3):
        step()
    return statistics.median([ranks.timed(step) for _ in range(options.steps)])


def stack(contender: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Returns the bytes and milliseconds of a step of a stack of MLPs, and its peak memory."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.Sequential(*(fsdp2_gpu.MLPBlock(options.width, options.hidden) for _ in range(options.layers)))
    for block in blocks:
        if device.type == "cuda":
            block.compile(fullgraph=True)
        fully_shard(block, mp_policy=POLICY)
    model = applied(fully_shard(blocks, mp_policy=POLICY), contender)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(options.tokens, options.width, device=device, dtype=torch.bfloat16)
    gradient = torch.randn_like(x)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with sent_bytes() as sent:
        step()
    times: list[float] = []
    peak = ranks.peak_bytes(lambda: times.extend(ranks.timed(step) for _ in range(options.steps)))
    return {"sent_mb": round(sum(sent) / 1e6, 3), "step_ms": statistics.median(times), "peak_gib": peak / 2**30}


def curve(contender: str, options: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the mean loss of all ranks at each step of training."""
    config, (text, _) = byte_text.Config(), byte_text.read_text()
    model = applied(train_fsdp2.build(config, "bf16", 0, device), contender)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    losses = []
    for step in range(options.train):
        for group in optimizer.param_groups:
            group["lr"] = byte_text.learning_rate(step, options.train)
        pieces = byte_text.batch(text, 16 * dist.get_world_size(), config.context, seed=1, step=step)
        own = torch.from_numpy(pieces[dist.get_rank() :: dist.get_world_size()].astype("int64")).to(device)
        loss = F.cross_entropy(model(own[:, :-1]).float().flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def measure(contender: str, options: argparse.Namespace, device: torch.device, first: dict[str, Any]) -> dict[str, Any]:
    row = {"contender": contender, **stack(contender, options, device)}
    ranks.forget()
    row["reduction_ms"] = reduction(contender, options, device)
    ranks.forget()
    names = ("step_ms", "reduction_ms", "peak_gib")
    row |= dict(zip(names, (round(v, 3) for v in ranks.slowest([row[name] for name in names], device)), strict=True))
    losses = curve(contender, options, device)
    first = first or {"sent_mb": row["sent_mb"], "losses": losses}
    row["bytes_of_bf16"], row["goal"] = round(row["sent_mb"] / first["sent_mb"], 4), GOAL
    row["curve_distance"] = round(max(abs(a - b) / b for a, b in zip(losses, first["losses"], strict=True)), 4)
    row["last_loss"] = round(statistics.mean(losses[-10:]), 4)
    return {**row, "losses": [round(loss, 4) for loss in losses]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contenders", default="bf16,mxfp8_e5m2,mxfp8_e4m3,fp8_e4m3_1x128", help="the others are compared with the first"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per GPU")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--train", type=int, default=500, help="steps of the training run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    options = parser.parse_args()
    device = ranks.start()
    first: dict[str, Any] = {}

    def row(contender: str) -> dict[str, Any]:
        made = measure(contender, options, device, first)
        first.update({} if first else made)
        return made

    rows = ranks.measured(options.contenders.split(","), row)
    sizes = {key: getattr(options, key) for key in ("tokens", "width", "hidden", "layers", "train")}
    path = options.out / f"reduce-scatter-{dist.get_world_size()}-{datetime.datetime.now(datetime.UTC).date()}.json"
    ranks.report(path, rows, **sizes)
    ranks.finish()


if __name__ == "__main__":
    main()
