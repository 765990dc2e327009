"""Times an MLP of two linear layers in JAX on one GPU, forward and backward under jit: each recipe against bf16.

    python benchmarks/linear_gpu_jax.py [--tokens 16384] [--features 4096] [--ffn 16384] [--experts N] [--recipes NAME ...]

Each recipe takes turns with bf16, both warmed up by as many steps as are timed; figures are medians. After each recipe a line
is printed and the file of `--json` is rewritten. NAME:xla multiplies by `lax.dot_general` instead of cuBLASLt. All contenders
are compiled with XLA's defaults; `--no-triton` disables the long search for Triton's matrix products for all of them. Small
sizes also run on the CPU, as a check.

With `--experts` the layers are `grouped_linear` with that many weights, among which the tokens are divided unevenly. bf16 then
has one weight for all tokens, which is the same number of operations; "ragged_dot" is bf16 by `lax.ragged_dot`. NAME:apart
multiplies one expert after another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from blockfp.jax_backend.implementations import choice
from blockfp.jax_backend.linear import grouped
from blockfp.jax_backend.linear.products import least_cublas

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.kernels.products import BLOCK_SCALES

# Share of bf16's speed to reach.
GOALS = {"fp8_current": 1.55}
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "mxfp6", "mxfp4", "fp8_current:xla")


def mlp(x, weights, states, key, sizes, recipe: str):
    """Returns (y, states): two layers with a GELU between them; grouped if there are sizes."""
    layer = bfp.linear if sizes is None else partial(bfp.grouped_linear, group_sizes=sizes)
    out = []
    for i, w in enumerate(weights):
        if recipe == "bf16":
            x = x @ w.T
        elif recipe == "ragged_dot":
            x = jax.lax.ragged_dot(x, w.mT, sizes)
        elif states[i] is None:
            x = layer(x, w, recipe=recipe, key=None if key is None else jax.random.fold_in(key, i))
        else:
            x, state = layer(x, w, recipe=recipe, state=states[i])
            out.append(state)
        x = jax.nn.gelu(x, approximate=True) if i == 0 else x
    return x, out


def step(recipe: str, x, weights, states, g, key, sizes):
    """Returns y, the new states and the gradients of x, the weights and the states (the backward's amaxes)."""

    def loss(x, weights, states):
        y, new = mlp(x, weights, states, key, sizes, recipe)
        return jnp.vdot(y, g, preferred_element_type=jnp.float32), (y, new)

    (_, out), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, states)
    return out, gradients


def arguments(recipe: str, tokens: int, features: int, ffn: int, experts: int) -> tuple[Any, ...]:
    """Returns the arguments of `step` after the recipe."""
    keys = jax.random.split(jax.random.key(0), 4)
    grouped = experts > 0 and recipe != "bf16"
    shapes = [((experts,) if grouped else ()) + shape for shape in ((ffn, features), (features, ffn))]
    weights = [jax.random.normal(k, s, jnp.bfloat16) / s[-1] ** 0.5 for k, s in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[2], (tokens, features), jnp.bfloat16)
    g = jax.random.normal(keys[3], (tokens, features), jnp.bfloat16) / tokens
    states: list[Any] = [None, None]
    if recipe not in ("bf16", "ragged_dot"):
        weights = bfp.quantize_params(weights, recipe)
        if recipes.parse(recipe).delayed:
            states = [bfp.delayed_state(recipe) for _ in weights]
    sizes = None
    if grouped:
        shares = np.random.default_rng(0).dirichlet([4.0] * experts)
        sizes = jnp.asarray(np.diff(np.rint(np.cumsum([0.0, *shares]) * tokens)), jnp.int32)
    return x, weights, states, g, jax.random.key(1), sizes


def compiled(name: str, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> tuple[Callable[[], Any], float]:
    """Returns (a step on its own arguments, the seconds to compile it)."""
    recipe, _, by = name.partition(":")
    operands = arguments(recipe, *sizes)
    by_xla = mock.patch.object(choice, "missing_product", return_value="the benchmark wants XLA's")
    began = time.perf_counter()
    apart = mock.patch.object(grouped, "all_at_once", return_value=False)
    with {"xla": by_xla, "apart": apart}.get(by, nullcontext()):
        lowered = jax.jit(partial(step, recipe)).lower(*operands)
    run = lowered.compile(compiler_options=options)
    return partial(run, *operands), time.perf_counter() - began


def milliseconds(run: Callable[[], Any], steps: int) -> float:
    # The GPU's clock follows its power: what ran before must not help or hinder.
    for _ in range(steps):
        result = run()
    jax.block_until_ready(result)
    start = time.perf_counter()
    for _ in range(steps):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 4096), ("ffn", 16384), ("experts", 0), ("rounds", 5), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = (options.tokens, options.features, options.ffn, options.experts)
    flags = {"xla_gpu_enable_triton_gemm": False} if options.no_triton else {}
    about = {"date": datetime.date.today().isoformat(), "shape": sizes, "device": jax.devices()[0].device_kind,
             "jax": jax.__version__, "compiler_options": flags,
             "the library for products": choice.missing_product(least_cublas(BLOCK_SCALES)) or "yes"}  # fmt: skip
    print(json.dumps(about), flush=True)
    base, seconds = compiled("bf16", sizes, flags)
    print(f"bf16 compiled in {seconds:.1f} s", flush=True)
    results: dict[str, Any] = {}
    for name in options.recipes:
        run, seconds = compiled(name, sizes, flags)
        times: dict[str, list[float]] = {"bf16": [], name: []}
        for _ in range(options.rounds):
            times["bf16"].append(milliseconds(base, options.steps))
            times[name].append(milliseconds(run, options.steps))
        goal = None if options.experts else GOALS.get(name)
        bf16, median = (statistics.median(each) for each in times.values())
        results[name] = {"ms": median, "bf16 ms": bf16, "speedup": bf16 / median, "goal": goal,
                         "compile s": seconds, "rounds": times}  # fmt: skip
        wanted = "" if goal is None else f"(goal {goal})"
        line = f"{name:16} {median:9.3f} ms  bf16 {bf16:9.3f} ms  {bf16 / median:.3f}x {wanted}  compiled in {seconds:.1f} s"
        print(line, flush=True)
        if options.json:
            options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
