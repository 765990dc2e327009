"""Measures activation checkpointing on one GPU: memory that a forward leaves and a step's time, by what a boundary keeps.

    python benchmarks/boundary_codes_gpu.py [--layers 32] [--hidden 4096] [--tokens 8192] [--recipe fp8_current] [--json FILE]

Rows: nothing recomputed ("all"), every block recomputed from its bfloat16 input ("bf16"), and from codes of it (`keep_codes`,
by format). A block is an MLP with a norm and a residual in bfloat16; with the recipe "plain" its layers are torch's. `kept` is
the memory that stays allocated after the forward, besides the model and the input. Each row also gives both as shares of
"bf16". Figures are medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from turns import write_record

import blockfp.torch as bfp

FORMATS = ("mxfp8_e4m3", "fp8_e4m3_1x128", "mxfp4_e2m1")


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


def rows() -> dict[str, Callable[[nn.Module, Tensor], Tensor]]:
    """Returns how a block is called, by the row's name."""
    contexts = {name: bfp.keep_codes(name) for name in FORMATS}
    codes = {
        name: lambda block, x, context=context: checkpoint(block, x, use_reentrant=False, context_fn=context)
        for name, context in contexts.items()
    }
    return {
        "all": lambda block, x: block(x),
        "bf16": lambda block, x: checkpoint(block, x, use_reentrant=False),
        **codes,
    }


def measure(blocks: nn.ModuleList, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor], device: str) -> tuple[float, float]:
    """Returns (bytes kept after the forward, milliseconds of a forward and backward); zeros on a CPU."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = torch.cuda.memory_allocated()
        start.record()
    y = x
    for block in blocks:
        y = call(block, y)
    kept = torch.cuda.memory_allocated() - before if cuda else 0
    y.backward(torch.ones_like(y))
    taken = 0.0
    if cuda:
        end.record()
        torch.cuda.synchronize()
        taken = start.elapsed_time(end)
    for param in blocks.parameters():
        param.grad = None
    x.grad = None
    return float(kept), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 32), ("hidden", 4096), ("tokens", 8192), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="fp8_current")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a CPU only shows that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.device(options.device):
        blocks = nn.ModuleList(Block(options.hidden).bfloat16() for _ in range(options.layers))
        x = torch.randn(options.tokens, options.hidden).bfloat16().requires_grad_()
    if options.recipe != "plain":
        bfp.convert(blocks, options.recipe, keep_init=False)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows()}
    for turn in range(options.rounds + 1):
        for name, call in rows().items():
            one = measure(blocks, x, call, options.device)
            if turn:  # the first warms up
                found[name].append(one)
    medians = {name: [statistics.median(column) for column in zip(*taken, strict=True)] for name, taken in found.items()}
    results = {}
    for name, (kept, taken) in medians.items():
        of_kept, of_taken = (value / max(base, 1e-9) for value, base in zip((kept, taken), medians["bf16"], strict=True))
        results[name] = {"kept MiB": kept / 2**20, "ms": taken, "kept of bf16": of_kept, "time of bf16": of_taken}
        print(f"{name:16} kept {kept / 2**20:9.1f} MiB ({of_kept:.3f} of bf16), {taken:8.2f} ms ({of_taken:.3f})", flush=True)
    if options.device == "cuda":
        write_record(options.json, results, shape=[options.layers, options.tokens, options.hidden])


if __name__ == "__main__":
    main()
