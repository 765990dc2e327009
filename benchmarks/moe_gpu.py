"""Times experts on one GPU, forward and backward: each recipe's grouped layer against bf16's `grouped_mm`, and a whole MoE
layer.

    python benchmarks/moe_gpu.py [--recipes fp8_current fp8_block mxfp8] [--rounds 3] [--profile RECIPE] [--json FILE]

Rows per expert are uneven, drawn from a Dirichlet distribution, and stay on the device. Contenders take turns in rounds, each
warmed up by as many steps as are timed; figures are medians. The MoE layer is Qwen3's (128 experts, 8 per token, 2048 features,
768 per expert): routing, permutation, experts and combination, eager and compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import in_turns, kernels, medians, write_record

import blockfp.torch as bfp
from blockfp.kernels import cuda_library

SHAPES = ((8, 16384, 4096, 14336), (64, 65536, 2048, 768), (128, 65536, 4096, 1536))
"""Experts, tokens, in, out."""

GOALS = {SHAPES[0]: 5.8, SHAPES[1]: 0.95, SHAPES[2]: 3.3}
"""Milliseconds of a forward and backward to reach, for every recipe."""


def uneven(experts: int, tokens: int) -> Tensor:
    """Returns the rows of each expert: some have several times as many as others."""
    torch.manual_seed(1)
    shares = torch.distributions.Dirichlet(torch.full((experts,), 4.0)).sample()
    ends = (shares.cumsum(0) / shares.sum() * tokens).round().long()
    ends[-1] = tokens
    return ends.diff(prepend=ends.new_zeros(1)).cuda()


def timed(contenders: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, float]:
    for step in contenders.values():
        step()
    return medians(in_turns(contenders, rounds, steps))


def layer_step(recipe: str | None, counts: Tensor, x: Tensor, gradient: Tensor, out: int) -> Callable[[], None]:
    experts, features = len(counts), x.shape[1]
    if recipe is None:
        weight = (torch.randn(experts, out, features, device="cuda") / features**0.5).bfloat16().requires_grad_()
        offs = counts.cumsum(0, dtype=torch.int32)
        run = lambda x: F.grouped_mm(x, weight.mT, offs=offs)  # noqa: E731
    else:
        layer = bfp.GroupedLinear(
            experts, features, out, bias=False, recipe=recipe, device="cuda", dtype=torch.bfloat16, keep_init=False
        )
        weight, run = layer.weight, lambda x: layer(x, counts)

    def step() -> None:
        x.grad = weight.grad = None
        run(x).backward(gradient)

    return step


class Experts(nn.Module):
    """Qwen3's sparse block: a router, and gated experts of which each token uses a few."""

    def __init__(self, recipe: str | None, features: int = 2048, inner: int = 768, experts: int = 128, chosen: int = 8):
        super().__init__()
        self.recipe, self.experts, self.chosen = recipe, experts, chosen
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.router = nn.Linear(features, experts, bias=False, **options)
        if recipe is None:
            self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, features, **options) / features**0.5)
            self.down = nn.Parameter(torch.randn(experts, features, inner, **options) / inner**0.5)
        else:
            self.gate_up = bfp.GroupedLinear(
                experts, features, 2 * inner, bias=False, recipe=recipe, keep_init=False, **options
            )
            self.down = bfp.GroupedLinear(experts, inner, features, bias=False, recipe=recipe, keep_init=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        shares, picked = self.router(x).float().softmax(-1).topk(self.chosen)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        order = picked.flatten().argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=x.device).scatter_add_(
            0, picked.flatten(), torch.ones_like(picked.flatten())
        )
        tokens = order // self.chosen
        rows = x[tokens]
        if self.recipe is None:
            offs = counts.cumsum(0, dtype=torch.int32)
            multiply = lambda x, weight: F.grouped_mm(x, weight.mT, offs=offs)  # noqa: E731
        else:
            multiply = lambda x, layer: layer(x, counts)  # noqa: E731
        gate, up = multiply(rows, self.gate_up).chunk(2, -1)
        rows = multiply(F.silu(gate) * up, self.down) * shares.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, tokens, rows)


def block_step(recipe: str | None, compiled: bool, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    torch.manual_seed(2)
    block = Experts(recipe)
    if compiled:
        block.compile(fullgraph=True)

    def step() -> None:
        x.grad = None
        for param in block.parameters():
            param.grad = None
        block(x).backward(gradient)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=["fp8_current", "fp8_block", "mxfp8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the MoE layer")
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--no-block", action="store_true", help="skip the MoE layer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    results: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        experts, tokens, features, out = shape
        counts = uneven(experts, tokens)
        x = torch.randn(tokens, features, device="cuda").bfloat16().requires_grad_()
        gradient = torch.randn(tokens, out, device="cuda").bfloat16() / tokens
        names = [None, *options.recipes]
        contenders = {name or "bf16": layer_step(name, counts, x, gradient, out) for name in names}
        found = timed(contenders, options.rounds, options.steps)
        results[" x ".join(map(str, shape))] = found
        spread = f"{int(counts.min())} to {int(counts.max())} rows"
        print(f"{experts} experts, {tokens} x {features} -> {out}, {spread}; goal {GOALS[shape]} ms", flush=True)
        for name, ms in found.items():
            print(f"  {name:12} {ms:8.3f} ms  {found['bf16'] / ms:.2f}x", flush=True)
        for name in options.profile:
            print(kernels(contenders[name]), flush=True)
        del contenders, x, gradient
    if not options.no_block:
        x = torch.randn(options.tokens, 2048, device="cuda").bfloat16().requires_grad_()
        gradient = torch.randn_like(x) / options.tokens
        print(f"MoE layer, {options.tokens} tokens", flush=True)
        for compiled in (False, True):
            names = [None, *options.recipes]
            found = timed(
                {name or "bf16": block_step(name, compiled, x, gradient) for name in names}, options.rounds, options.steps
            )
            kind = "compiled" if compiled else "eager"
            results[f"layer {kind}"] = found
            for name, ms in found.items():
                print(f"  {kind:8} {name:12} {ms:8.3f} ms  {found['bf16'] / ms:.2f}x", flush=True)
    write_record(options.json, results)


if __name__ == "__main__":
    main()
