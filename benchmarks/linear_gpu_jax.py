"""An MLP of two linear layers in JAX on one GPU, forward and backward under jit: each recipe against bf16.

    python benchmarks/linear_gpu_jax.py [--tokens 16384] [--features 4096] [--ffn 16384] [--json FILE]

Rounds of all contenders take turns, each warmed up by as many steps as are timed; the figure is the median. With sizes small
enough it runs on the CPU too, to see that it does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import blockfp.jax as bfp
from blockfp import recipes

# Share of bf16's speed to reach.
GOALS = {"fp8_current": 1.55}


def mlp(x, weights, states, key, recipe: str):
    """(y, states): two layers with a GELU between them."""
    out = []
    for i, w in enumerate(weights):
        if recipe == "bf16":
            x = x @ w.T
        elif states[i] is None:
            x = bfp.linear(x, w, recipe=recipe, key=None if key is None else jax.random.fold_in(key, i))
        else:
            x, state = bfp.linear(x, w, recipe=recipe, state=states[i])
            out.append(state)
        x = jax.nn.gelu(x, approximate=True) if i == 0 else x
    return x, out


def contender(recipe: str, tokens: int, features: int, ffn: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted step, from x and the cotangent of y to the gradients, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((ffn, features), (features, ffn))
    weights = [jax.random.normal(k, s, jnp.bfloat16) / s[1] ** 0.5 for k, s in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[2], (tokens, features), jnp.bfloat16)
    g = jax.random.normal(keys[3], (tokens, features), jnp.bfloat16) / tokens
    states: list[Any] = [None, None]
    if recipe != "bf16":
        weights = bfp.quantize_params(weights, recipe)
        if recipes.parse(recipe).delayed:
            states = [bfp.delayed_state(recipe) for _ in weights]

    @jax.jit
    def step(x, weights, states, g, key):
        def loss(x, weights, states):
            y, _ = mlp(x, weights, states, key, recipe)
            return (y.astype(jnp.float32) * g).sum()

        # Gradients of the states are the amaxes of the backward, part of a step.
        return bfp.grad(loss, (0, 1, 2))(x, weights, states)

    return step, (x, weights, states, g, jax.random.key(1))


def milliseconds(step: Callable[[], Any], steps: int) -> float:
    # The GPU's clock follows its power: what ran before must not help or hinder.
    for _ in range(steps):
        result = step()
    jax.block_until_ready(result)
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 4096), ("ffn", 16384), ("rounds", 5), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", nargs="*", default=list(recipes.RECIPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contenders: dict[str, Callable[[], Any]] = {}
    for name in ("bf16", *options.recipes):
        step, arguments = contender(name, options.tokens, options.features, options.ffn)
        began = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        contenders[name] = partial(step, *arguments)
        print(f"{name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, step in contenders.items():
            rounds[name].append(milliseconds(step, options.steps))
    base = statistics.median(rounds["bf16"])
    results = {}
    for name, times in rounds.items():
        median = statistics.median(times)
        results[name] = {"ms": median, "speedup": base / median, "goal": GOALS.get(name), "rounds": times}
        goal = f"(goal {GOALS[name]})" if name in GOALS else ""
        print(f"{name:14} {median:9.3f} ms  {base / median:.3f}x {goal}", flush=True)
    if options.json:
        shape = [options.tokens, options.features, options.ffn]
        about = {"shape": shape, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
