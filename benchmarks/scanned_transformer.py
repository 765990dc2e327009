"""A small transformer with scanned layers, and the time from `jax.jit` to a compiled step."""

from __future__ import annotations

import time
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from blockfp.jax_backend.implementations import choice

import blockfp.jax as bfp

WIDTH, LAYERS, TOKENS, SEQUENCES, HEADS = 64, 12, 128, 2, 4
SHAPES = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}


class Compiled(NamedTuple):
    """Seconds to trace, lower and compile, and the program's lines of StableHLO."""

    seconds: float
    lines: int


def _normalized(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def step_of(recipe: str):
    """Returns `value_and_grad` of the model's loss, with six products per layer by a recipe or unquantized ("none")."""

    def multiply(x, w, key):
        return x @ w.T if recipe == "none" else bfp.linear(x, w, recipe=recipe, key=key if recipe == "nvfp4" else None)

    def split(x):
        return x.reshape(SEQUENCES, -1, HEADS, WIDTH // HEADS).swapaxes(1, 2)

    def layer(x, scanned):
        w, number = scanned
        key = jnp.stack([jnp.uint32(1), number])
        inner = _normalized(x)
        q, k, v = (split(multiply(inner, w[name], key)) for name in "qkv")
        length = q.shape[-2]
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), q @ k.swapaxes(-1, -2) / 4, -1e9)
        attended = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(TOKENS, WIDTH)
        x = x + multiply(attended, w["o"], key)
        return x + multiply(jax.nn.gelu(multiply(_normalized(x), w["up"], key)), w["down"], key), None

    def loss(params, x):
        return (jax.lax.scan(layer, x, (params, jnp.arange(LAYERS, dtype=jnp.uint32)))[0] ** 2).mean()

    return jax.value_and_grad(loss)


def compiled(recipe: str, *, implementation: str | None, times: int = 3) -> Compiled:
    """Returns the fastest of several compilations without caches; `implementation` "xla" compiles the definition."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal((LAYERS, *shape), np.float32)) for name, shape in SHAPES.items()}
    x, best, lines = jnp.ones((TOKENS, WIDTH)), float("inf"), 0
    bfp.quantize(x, "mxint8")
    missing = choice.missing
    only = (lambda name: missing(name) if name == "xla" else "not wanted") if implementation == "xla" else missing
    with mock.patch.object(choice, "missing", only):
        for _ in range(times):
            jax.clear_caches()
            start = time.perf_counter()
            lowered = jax.jit(step_of(recipe)).lower(params, x)
            lowered.compile()
            best = min(best, time.perf_counter() - start)
            lines = len(lowered.as_text().splitlines())
    return Compiled(best, lines)
