"""Times a mixture of experts over several ranks, forward and backward: tokens dispatched as codes, bf16 and grouped_mm.

    torchrun --nproc-per-node 2 benchmarks/moe_ep_gpu.py [--recipes mxfp8 fp8_block fp8_current] [--tokens 8192] [--json FILE]

The layer is Qwen3's: 128 experts, 8 per token, 2048 features, 768 per expert. Each rank has its own tokens. Bytes are what a
rank sends in one step, including to itself. Contenders take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import blockfp.torch as bfp
from blockfp import recipes

EXPERTS, CHOICES, FEATURES, INNER = 128, 8, 2048, 768


class Layer(nn.Module):
    """A router, and this rank's gated experts."""

    def __init__(self, recipe: str | None, device: torch.device):
        super().__init__()
        own = EXPERTS // dist.get_world_size()
        options = {"device": device, "dtype": torch.bfloat16}
        self.recipe = recipe
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False, **options)
        if recipe is None:
            self.up = nn.Parameter(torch.randn(own, 2 * INNER, FEATURES, **options) / FEATURES**0.5)
            self.down = nn.Parameter(torch.randn(own, FEATURES, INNER, **options) / INNER**0.5)
        else:
            shared = {"bias": False, "recipe": recipe, "keep_init": False, **options}
            self.up = bfp.GroupedLinear(own, FEATURES, 2 * INNER, **shared)
            self.down = bfp.GroupedLinear(own, INNER, FEATURES, **shared)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).float().softmax(-1).topk(CHOICES)
        shares = shares / shares.sum(-1, keepdim=True)
        if self.recipe is None:
            return self.in_bf16(x, shares, chosen)
        received = bfp.dispatch(x, chosen, EXPERTS, recipe=self.recipe, group=dist.group.WORLD)
        gate, value = self.up(received.tokens, received).chunk(2, 1)
        return bfp.combine(self.down(F.silu(gate) * value, received), received, shares)

    def in_bf16(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        world, own = dist.get_world_size(), EXPERTS // dist.get_world_size()
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add_(0, experts, torch.ones_like(experts))
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        sizes = torch.stack([counts.view(world, own).sum(1), came.view(world, own).sum(1)]).tolist()
        numbers = torch.arange(own, device=x.device).repeat(world).repeat_interleave(came, output_size=sum(sizes[1]))
        arrival, offs = numbers.argsort(stable=True), came.view(world, own).sum(0).cumsum(0, dtype=torch.int32)
        rows = all_to_all_single_autograd(x[order // CHOICES], sizes[1], sizes[0], dist.group.WORLD)[arrival]
        gate, value = F.grouped_mm(rows, self.up.mT, offs=offs).chunk(2, 1)
        rows = F.grouped_mm(F.silu(gate) * value, self.down.mT, offs=offs)
        back = torch.empty_like(rows).index_copy(0, arrival, rows)
        back = all_to_all_single_autograd(back, sizes[0], sizes[1], dist.group.WORLD)
        slots = torch.empty_like(back).index_copy(0, order, back).view(len(x), CHOICES, FEATURES)
        return (slots * shares[..., None]).sum(1).to(x.dtype)


def bytes_sent(recipe: str | None, tokens: int) -> float:
    """Returns the bytes that a rank sends in one step: rows there and back, forward and backward."""
    rows = 2.0 * tokens * CHOICES * FEATURES
    if recipe is None:
        return 4 * rows
    casts = recipes.for_linear(recipe)
    there = sum(cast.format.bytes_per_element / 2 if cast.format else 1.0 for cast in (casts.input, casts.gradient))
    return (2 + there) * rows


def step_of(recipe: str | None, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    torch.manual_seed(2)
    layer = Layer(recipe, x.device)

    def step() -> None:
        x.grad = None
        for param in layer.parameters():
            param.grad = None
        layer(x).backward(gradient)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=["mxfp8", "fp8_block", "fp8_current"])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = ranks.start()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(options.tokens, FEATURES, device=device).bfloat16().requires_grad_()
    gradient = torch.randn_like(x) / options.tokens
    steps = {name or "bf16": step_of(name, x, gradient) for name in (None, *options.recipes)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            dist.barrier()
            times[name].append(ranks.timed(step))
    medians = ranks.slowest((statistics.median(own) for own in times.values()), device)
    rows = []
    for name, ms in zip(times, medians, strict=True):
        sent = bytes_sent(None if name == "bf16" else name, options.tokens) / 2**20
        rows.append({"contender": name, "ms": ms, "MiB": sent})
        ranks.say(f"{name:12} {ms:8.3f} ms  {sent:8.1f} MiB sent by a rank")
    if options.json:
        ranks.report(options.json, rows, tokens=options.tokens, experts=EXPERTS)
    ranks.finish()


if __name__ == "__main__":
    main()
