"""An MLP of two linear layers on one GPU, forward and backward, compiled: each recipe against bf16, quantization included.

    python benchmarks/linear_gpu.py [--tokens 16384] [--features 4096] [--ffn 16384] [--profile RECIPE] [--json FILE]

`RECIPE_exact` multiplies exact operands (`exact_products`), `RECIPE+weights` quantizes weights of high precision at every use.
Rounds of all contenders take turns, each warmed up by as many steps as are timed; the figure is the median.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.kernels import cuda_library

# Share of bf16's speed to reach.
GOALS = {"fp8_current": 1.55, "fp8_delayed": 1.6, "fp8_block": 1.38, "mxfp8": 1.45}


class MLP(nn.Module):
    def __init__(self, features: int, ffn: int):
        super().__init__()
        self.up = nn.Linear(features, ffn, bias=False, device="cuda", dtype=torch.bfloat16)
        self.down = nn.Linear(ffn, features, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Contender:
    """One recipe's model and what a step of it is."""

    def __init__(self, name: str, tokens: int, features: int, ffn: int):
        torch.manual_seed(0)
        self.name = name
        self.model = MLP(features, ffn)
        if name != "bf16":
            recipe, _, weights = name.partition("+")
            chosen = recipes.parse(recipe.removesuffix("_exact")).replace(exact_products=recipe.endswith("_exact"))
            bfp.convert(self.model, chosen, weights="high_precision" if weights else "quantized", keep_init=False)
        self.x = torch.randn(tokens, features, device="cuda").bfloat16().requires_grad_()
        self.gradient = torch.randn(tokens, features, device="cuda").bfloat16() / tokens
        self.model.compile(fullgraph=True)

    def step(self) -> None:
        self.x.grad = None
        for param in self.model.parameters():
            param.grad = None
        self.model(self.x).backward(self.gradient)

    def milliseconds(self, steps: int) -> float:
        # The GPU's clock follows its power: what ran before must not help or hinder.
        for _ in range(steps):
            self.step()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            self.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps


def profile(contender: Contender) -> str:
    """A table of the kernels of three steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            contender.step()
        torch.cuda.synchronize()
    lines = []
    for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:24]:
        lines.append(f"{event.self_device_time_total / 3000:8.3f} ms {event.count / 3:6.1f} x  {event.key[:110]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 4096), ("ffn", 16384), ("rounds", 5), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", nargs="*", default=["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    contenders = []
    for name in ("bf16", *options.recipes):
        one = Contender(name, options.tokens, options.features, options.ffn)
        for _ in range(3):
            one.step()
        contenders.append(one)
        print(f"{name}: compiled", flush=True)
    rounds: dict[str, list[float]] = {one.name: [] for one in contenders}
    for _ in range(options.rounds):
        for one in contenders:
            rounds[one.name].append(one.milliseconds(options.steps))
    base = statistics.median(rounds["bf16"])
    results = {}
    for name, times in rounds.items():
        median = statistics.median(times)
        results[name] = {"ms": median, "speedup": base / median, "goal": GOALS.get(name), "rounds": times}
        goal = f"(goal {GOALS[name]})" if name in GOALS else ""
        print(f"{name:30} {median:8.3f} ms  {base / median:.3f}x {goal}", flush=True)
    for one in contenders:
        if one.name in options.profile:
            print(f"\n{one.name}\n{profile(one)}", flush=True)
    if options.json:
        about = {
            "shape": [options.tokens, options.features, options.ffn],
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
