"""Counts the host's time and Python frames per call: quantizing, layers, FSDP2's hooks and optimizer steps, for each recipe.

    python benchmarks/host.py [--recipes fp8_current nvfp4] [--cases layer adamw] [--out benchmarks/results]

Shapes are small, so that the host dominates. On a GPU these are users' calls; without one, the CUDA path's Python runs on CPU
tensors, and launches do nothing (`standin`). The NumPy and JAX faces run the CPU's kernels. Microseconds are the minimum of
many short windows in which all cases take turns; on a CPU those of torch's own layers and optimizer include their arithmetic.
Frames are Python functions entered, torch's included; calls are C functions called from Python, except those that plans hold
ready with their arguments. tests/torch/test_host_cost.py checks the frames.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_fsdp
import standin
import torch
from torch import Tensor, nn

import blockfp
import blockfp.torch as bfp

RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
CASES = ("quantize", "faces", "layer", "modules", "fsdp", "adamw")
FORWARD_GOAL, BOTH_GOAL = 20, 55
"""A layer's forward, and its forward and backward, in times of `torch.add`."""
TOKENS, FEATURES, PARAMETERS, EXPERTS = 32, 128, 50, 4

Call = Callable[[], Any]


@dataclass
class Case:
    """A case to time.

    Attributes:
        kind: what the call does.
        name: the recipe or the peer.
        call: the function to time.
        count: units per call, such as the parameters of an optimizer step.
        goal: the most times of `torch.add` that it may take, or None.
    """

    kind: str
    name: str
    call: Call
    count: int = 1
    goal: float | None = None


def frames_of(call: Call, warm: int = 3) -> tuple[int, int]:
    """Returns how many Python functions a call enters, and how many C functions they call, without the stand-in's own."""
    for _ in range(warm):
        call()
    # The least of three: what is freed meanwhile may call something, too.
    return min(_counted(call) for _ in range(3))


def _counted(call: Call) -> tuple[int, int]:
    frames = calls = 0
    left_out = {standin.__file__, __file__}

    def count(frame, event, _):
        nonlocal frames, calls
        inside = frame.f_code.co_filename in left_out
        frames += event == "call" and not inside
        calls += event == "c_call" and not inside

    # A backward of CUDA tensors runs in a thread of its own, which the profile wouldn't see.
    with torch.autograd.set_multithreading_enabled(False):
        # What is collected calls whoever holds a weak reference to it.
        gc.disable()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
            gc.enable()
    return frames, calls


def base_cases(device: str) -> list[Case]:
    a, b = (torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16) for _ in range(2))
    return [Case("torch.add", "", lambda: torch.add(a, b))]


def _input(device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.ones_like(x).detach()


def _forward_and_backward(module: nn.Module, x: Tensor, gradient: Tensor, *arguments: Any) -> Call:
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]

    def call():
        for each in inputs:
            each.grad = None
        module(x, *arguments).backward(gradient)

    return call


def _converted(module: nn.Module, recipe: str | None, device: str) -> nn.Module:
    module = nn.Sequential(module.to(device, torch.bfloat16))
    if recipe is not None:
        bfp.convert(module, recipe, keep_init=False)
    return module[0]


def quantize_cases(recipes: list[str], device: str) -> list[Case]:
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16)
    formats = dict.fromkeys(blockfp.recipes.parse(recipe).input.format for recipe in recipes)
    return [
        Case("torch.quantize", str(format), lambda f=format: bfp.quantize(x, f)) for format in formats if format is not None
    ]


def face_cases(recipes: list[str]) -> list[Case]:
    """Returns the cases of NumPy's face, and of JAX's with its layer: eager, with the CPU's kernels."""
    import numpy as np

    formats = [f for f in dict.fromkeys(blockfp.recipes.parse(recipe).input.format for recipe in recipes) if f is not None]
    x = np.ones((TOKENS, FEATURES), np.float32)
    cases = [Case("numpy.add", "", lambda: np.add(x, x))]
    cases += [Case("numpy quantize", str(f), lambda f=f: blockfp.quantize(x, f)) for f in formats]
    try:
        import jax
        import jax.numpy as jnp

        import blockfp.jax as bfj
    except ImportError:
        return cases
    if jax.default_backend() != "cpu":
        return cases
    y, w, bias = jnp.asarray(x), jnp.ones((FEATURES, FEATURES), jnp.float32), jnp.ones(FEATURES, jnp.float32)
    cases += [
        Case("jax.numpy.add", "", lambda: jnp.add(y, y)),
        Case("jax.numpy.matmul", "", lambda: jnp.matmul(y, w)),
        Case("jax.numpy.matmul, value_and_grad", "", _jax_step(jax, lambda y, w: jnp.matmul(y, w).sum(), y, w)),
    ]
    cases += [Case("jax quantize", str(f), lambda f=f: bfj.quantize(y, f)) for f in formats]
    for recipe in recipes:
        if recipe == "fp8_delayed":  # its state makes another function of it
            continue
        layer = functools.partial(bfj.linear, recipe=recipe, key=jnp.zeros(2, jnp.uint32) if recipe == "nvfp4" else None)
        step = _jax_step(jax, lambda y, w, layer=layer: layer(y, w).sum(), y, w)
        biased = _jax_step(jax, lambda y, w, bias, layer=layer: layer(y, w, bias).sum(), y, w, bias)
        cases += [
            Case("jax linear", recipe, lambda layer=layer: layer(y, w)),
            Case("jax linear, value_and_grad", recipe, step),
            Case("jax linear with bias, value_and_grad", recipe, biased),
        ]
    return cases


def _jax_step(jax: Any, loss: Callable[..., Any], *arguments: Any) -> Call:
    step = jax.value_and_grad(loss, tuple(range(len(arguments))))
    return lambda: step(*arguments)


def layer_cases(recipes: list[str], device: str) -> list[Case]:
    cases = []
    for recipe in (None, *recipes):
        layer = _converted(nn.Linear(FEATURES, FEATURES, bias=False), recipe, device)
        x, gradient = _input(device)
        if recipe == "fp8_delayed":
            # Before a first update casts look for a scale.
            layer(x).backward(gradient)
            layer.weight.grad = x.grad = None
            bfp.update_scales(layer)
        name, goals = recipe or "nn.Linear", (None, None) if recipe is None else (FORWARD_GOAL, BOTH_GOAL)
        cases.append(Case("layer forward", name, lambda layer=layer, x=x: layer(x), goal=goals[0]))
        cases.append(Case("layer forward + backward", name, _forward_and_backward(layer, x, gradient), goal=goals[1]))
        batch = x.detach()[None].clone().requires_grad_()
        cases.append(Case("layer forward + backward, 3 axes", name, _forward_and_backward(layer, batch, gradient[None])))
    return cases


class _PlainMLP(nn.Module):
    """A `LayerNormMLP` made of torch's parts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def module_cases(recipes: list[str], device: str) -> list[Case]:
    """Returns the cases of `LayerNormMLP`, the same of torch's own layers, `MultiheadAttention` and `GroupedLinear`."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "keep_init": False}
    cases = []
    for recipe in (None, *recipes):
        mlp = (
            _PlainMLP().to(device, torch.bfloat16)
            if recipe is None
            else bfp.LayerNormMLP(FEATURES, 2 * FEATURES, recipe=recipe, norm="rms_norm", activation="gelu", **options)
        )
        x, gradient = _input(device)
        cases.append(Case("LayerNormMLP forward + backward", recipe or "torch", _forward_and_backward(mlp, x, gradient)))
        if recipe is not None:
            experts = bfp.GroupedLinear(EXPERTS, FEATURES, FEATURES, bias=False, recipe=recipe, **options)
            counts = [TOKENS // EXPERTS] * EXPERTS
            forward_and_backward = _forward_and_backward(experts, x.detach().requires_grad_(), gradient, counts)
            cases.append(Case("GroupedLinear forward + backward", recipe, forward_and_backward))
            attention = bfp.MultiheadAttention(FEATURES, 4, recipe=recipe, **options)
            cases.append(
                Case(
                    "MultiheadAttention forward + backward",
                    recipe,
                    _forward_and_backward(attention, x.detach()[None].requires_grad_(), gradient[None]),
                )
            )
    return cases


def adamw_cases(recipes: list[str], device: str) -> list[Case]:
    """Returns a step of many parameters, counted per parameter."""
    cases = []
    for recipe in (None, *recipes):
        layers = [nn.Linear(FEATURES, 32, bias=False) for _ in range(PARAMETERS)]
        params = [_converted(layer, recipe, device).weight for layer in layers]
        for p in params:
            p.grad = torch.zeros(p.shape, device=device, dtype=torch.bfloat16)
        if recipe is None:
            fused = torch.optim.AdamW(params, fused=True)
            cases.append(Case("AdamW, a parameter", "torch, fused", fused.step, PARAMETERS))
        ours = bfp.AdamW(params)
        ours.make_state()
        cases.append(Case("AdamW, a parameter", recipe or "bfloat16", ours.step, PARAMETERS))
    return cases


def cases(kinds: list[str], recipes: list[str], device: str) -> list[Case]:
    """Returns all cases of these kinds."""
    found = base_cases(device)
    makers = {
        "quantize": lambda: quantize_cases(recipes, device),
        "layer": lambda: layer_cases(recipes, device),
        "modules": lambda: module_cases(recipes, device),
        "fsdp": lambda: [Case(*case) for case in host_fsdp.cases(recipes, FEATURES, device)],
        "adamw": lambda: adamw_cases(recipes, device),
    }
    for kind in kinds:
        if kind in makers:
            found += makers[kind]()
    return found


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Runs the CUDA path: on a GPU, or with the stand-in on a CPU."""
    if device == "cuda":
        yield
        return
    with standin.launches():
        yield


def least_seconds(found: list[Case], rounds: int, window: float = 2e-3) -> list[float]:
    """Returns the minimum time of each call over windows in turn: other work on the machine can only add time."""
    repeats = []
    for case in found:
        for _ in range(3):
            case.call()
        begin = time.perf_counter()
        case.call()
        repeats.append(max(1, int(window / (time.perf_counter() - begin))))
    best = [float("inf")] * len(found)
    for _ in range(rounds):
        for i, (case, count) in enumerate(zip(found, repeats, strict=True)):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                case.call()
            best[i] = min(best[i], (time.perf_counter() - begin) / count)
    return best


def measured(found: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each case."""
    seconds = least_seconds(found, rounds)
    rows = []
    for case, best in zip(found, seconds, strict=True):
        frames, calls = frames_of(case.call)
        row = {"case": case.kind, "name": case.name, "us": round(best * 1e6 / case.count, 2)}
        row |= {"of_add": round(best / seconds[0] / case.count, 1), "goal": case.goal}
        row |= {"frames": round(frames / case.count, 2), "calls": round(calls / case.count, 2)}
        rows.append(row)
        goal = "" if case.goal is None else f"  goal {case.goal:.0f} {'ok' if row['of_add'] <= case.goal else 'SHORT'}"
        print(
            f"{case.kind:40} {case.name:28} {row['us']:9.1f} us {row['of_add']:7.1f} x add {row['frames']:7g} frames{goal}",
            flush=True,
        )
    return rows


def environment() -> dict[str, Any]:
    packages = ("blockfp", "apache-tvm-ffi", "numpy", "torch", "torchao", "jax")
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        machine = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, launches replaced"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # More than one runs at a time on a busy machine, whose figures are too large.
    load = round(os.getloadavg()[0], 1)
    return {"date": date, "machine": machine, "load": load, "python": platform.python_version(), "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=40, help="windows of 2 ms for each case")
    parser.add_argument("--out", type=Path, help="folder of a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = cases(options.cases, options.recipes, device)
    with on(device):
        rows = measured(found, options.rounds)
    if "faces" in options.cases:
        rows += measured(base_cases("cpu") + face_cases(options.recipes), options.rounds)[1:]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        about = environment()
        path = options.out / f"host-{'gpu' if device == 'cuda' else 'cpu'}-{about['date'][:10]}.json"
        sizes = {"tokens": TOKENS, "features": FEATURES, "parameters": PARAMETERS}
        path.write_text(json.dumps({**about, **sizes, "rows": rows}, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
