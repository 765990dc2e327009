"""Times an MLP of two linear layers on one GPU, forward and backward, compiled: each recipe against bf16, quantization
included.

    python benchmarks/linear_gpu.py [--tokens 16384] [--features 4096] [--ffn 16384] [--profile RECIPE] [--json FILE]

`RECIPE_exact` multiplies exact operands (`exact_products`), `RECIPE_ordered` adds in one order (`exact_order`), and
`RECIPE+weights` quantizes high-precision weights at every use.
Contenders take turns in rounds, each warmed up by as many steps as are timed; figures are medians.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import in_turns, kernels, medians, write_record

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.kernels import cuda_library

# Share of bf16's speed to reach.
GOALS = {"fp8_current": 1.55, "fp8_delayed": 1.6, "fp8_block": 1.38, "mxfp8": 1.45}

SUFFIXES = {"exact_products": "_exact", "exact_order": "_ordered"}


class MLP(nn.Module):
    """Two linear layers, of any class, with gelu between them."""

    def __init__(self, up: nn.Module, down: nn.Module):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Contender:
    """One recipe's model and its step."""

    def __init__(self, name: str, tokens: int, features: int, ffn: int):
        torch.manual_seed(0)
        lengths, where = (features, ffn), {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.model = MLP(nn.Linear(*lengths, **where), nn.Linear(*lengths[::-1], **where))
        if name != "bf16":
            recipe, _, weights = name.partition("+")
            asked = {option: recipe.endswith(suffix) for option, suffix in SUFFIXES.items()}
            for suffix in SUFFIXES.values():
                recipe = recipe.removesuffix(suffix)
            chosen = recipes.parse(recipe).replace(**asked)
            bfp.convert(self.model, chosen, weights="high_precision" if weights else "quantized", keep_init=False)
        # Without updates the histories stay empty, and every cast measures.
        self.delayed = "delayed" in name
        self.x = torch.randn(tokens, features, device="cuda").bfloat16().requires_grad_()
        self.gradient = torch.randn(tokens, features, device="cuda").bfloat16() / tokens
        self.model.compile(fullgraph=True)

    def step(self) -> None:
        self.x.grad = None
        for param in self.model.parameters():
            param.grad = None
        self.model(self.x).backward(self.gradient)
        if self.delayed:
            bfp.update_scales(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 4096), ("ffn", 16384), ("rounds", 5), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", nargs="*", default=["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    shape = (options.tokens, options.features, options.ffn)
    contenders = {}
    for name in ("bf16", *options.recipes):
        contenders[name] = Contender(name, *shape).step
        for _ in range(3):
            contenders[name]()
        print(f"{name}: compiled", flush=True)
    rounds = in_turns(contenders, options.rounds, options.steps)
    found = medians(rounds)
    results = {}
    for name, ms in found.items():
        speedup = found["bf16"] / ms
        results[name] = {"ms": ms, "speedup": speedup, "goal": GOALS.get(name), "rounds": rounds[name]}
        goal = f"(goal {GOALS[name]})" if name in GOALS else ""
        print(f"{name:30} {ms:8.3f} ms  {speedup:.3f}x {goal}", flush=True)
    write_record(options.json, results, shape=shape)
    for name in options.profile:
        print(f"\n{name}\n{kernels(contenders[name])}", flush=True)


if __name__ == "__main__":
    main()
