"""Times a Llama of 1.1 billion parameters in plain JAX on one GPU: recipes beside bf16 and beside XLA's own FP8.

    python benchmarks/llama_gpu_jax.py [--tokens 8192] [--length 4096] [--layers 16] [--recipes NAME ...] [--profile FOLDER]

16 scanned layers (grouped-query attention by cuDNN, SwiGLU), AdamW with fp32 masters and moments for all. Weights and their
gradients are bfloat16, or codes with bfloat16 gradients. "xla_fp8" is current scaling written by hand: an amax, a scale, a cast
and `lax.dot_general` of FP8 for each product, all of which XLA fuses and times as it likes; its sums are fast ones (fewer bits)
in all three products, the recipes' in the forward alone.

A line each: ms a step (median of `--steps`), temporary GiB and GiB of arguments of the compiled program, seconds to compile,
losses of the first and fourth step on one random batch. `--profile` writes the kernels of two steps by time. `--json` writes
the lines. Small sizes also run on a CPU, as a check.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import gc
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import blockfp.jax as bfp
from blockfp import recipes

HEAD = 128
BF16 = jnp.bfloat16


class Sizes(NamedTuple):
    """Lengths of a model and its batch."""

    width: int
    inner: int
    layers: int
    vocabulary: int
    tokens: int
    length: int

    @property
    def heads(self) -> int:
        """Heads of queries; keys and values have half as many."""
        return self.width // HEAD

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's weights."""
        d, f, kv = self.width, self.inner, max(1, self.heads // 2) * HEAD
        return {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}


def init(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    """Returns fp32 parameters; those of layers are stacked."""
    shapes = sizes.matrices()
    keys = dict(zip(("embedding", "head", *shapes), jax.random.split(key, len(shapes) + 2), strict=True))
    normal = lambda name, *shape: 0.02 * jax.random.normal(keys[name], shape)  # noqa: E731
    layers = {name: normal(name, sizes.layers, *shape) for name, shape in shapes.items()}
    layers |= {name: jnp.ones((sizes.layers, sizes.width)) for name in ("before_attention", "before_mlp")}
    outer = {name: normal(name, sizes.vocabulary, sizes.width) for name in ("embedding", "head")}
    return outer | {"norm": jnp.ones(sizes.width), "layers": layers}


def rms_norm(x, weight):
    """Normalizes in fp32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weight).astype(BF16)


def rotary(x):
    """Rotates positions into x [batch, length, heads, HEAD]."""
    angles = jnp.arange(x.shape[1])[:, None] * 10000 ** -(jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = (f(angles)[None, :, None].astype(BF16) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# ---- XLA's own FP8


def _cast(x, dtype):
    limit, amax = float(jnp.finfo(dtype).max), jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(amax > 0, limit / amax, 1.0)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype), 1 / scale


def _dot(a, b, dimensions):
    return jax.lax.dot_general(a[0], b[0], (dimensions, ((), ())), preferred_element_type=BF16) * (a[1] * b[1]).astype(BF16)


@jax.custom_vjp
def xla_fp8(x, weight):
    """x w^T with current scaling, as XLA fuses it."""
    return _xla_forward(x, weight)[0]


def _xla_forward(x, weight):
    operands = _cast(x, jnp.float8_e4m3fn), _cast(weight, jnp.float8_e4m3fn)
    return _dot(*operands, ((1,), (1,))), operands


def _xla_backward(operands, g):
    (x, weight), g = operands, _cast(g, jnp.float8_e5m2)
    return _dot(g, weight, ((1,), (0,))), _dot(g, x, ((0,), (0,)))


xla_fp8.defvjp(_xla_forward, _xla_backward)


# ---- contenders


class Layer:
    """The linear layers of one scanned layer by a contender: "bf16", "xla_fp8" or a recipe."""

    def __init__(self, name: str, weights: dict[str, Any], states: dict[str, Any], key: jax.Array) -> None:
        self.name, self.weights, self.key, self.after = name, weights, key, dict(states)
        self.plain = {"bf16": lambda x, w: x @ w.T, "xla_fp8": xla_fp8}.get(name)

    def __call__(self, which: str, x, **made):
        """Multiplies x, or with up= and activation= what they make of it, by a weight."""
        rows = x.reshape(-1, x.shape[-1])
        if self.plain is not None:
            y = self.plain(rows, self.weights[which])
        else:
            made = {name: one.reshape(rows.shape) if name == "up" else one for name, one in made.items()}
            keyed = recipes.parse(self.name).gradient.stochastic
            key = jax.random.fold_in(self.key, list(self.weights).index(which)) if keyed else None
            # Layers that read one input share its scale, and so a cast of it.
            shared = next((names for names in self.after if which in names.split("_")), None)
            options = {"recipe": self.name, "key": key, "state": None if shared is None else self.after[shared]}
            y = bfp.linear(rows, self.weights[which], **options, **made)
            if shared is not None:
                y, self.after[shared] = y
        return y.reshape(*x.shape[:-1], -1)

    def gated(self, which: str, gate, up):
        """Multiplies silu(gate) * up by a weight."""
        if self.plain is not None:
            return self(which, jax.nn.silu(gate) * up)
        return self(which, gate, up=up, activation="silu")


def loss_of(name: str, sizes: Sizes, params, states, ids, key):
    """Returns the mean cross-entropy of the next tokens, and the states after the forward."""

    def layer(x, scanned):
        weights, states, number = scanned
        multiply = Layer(name, weights, states, jax.random.fold_in(key, number))
        heads = lambda y: y.reshape(*y.shape[:-1], -1, HEAD)  # noqa: E731
        h = rms_norm(x, weights["before_attention"])
        q, k, v = (heads(multiply(which, h)) for which in "qkv")
        kernel = "cudnn" if jax.default_backend() == "gpu" else None
        attended = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True, implementation=kernel)
        x = x + multiply("o", attended.reshape(*x.shape[:-1], -1))
        h = rms_norm(x, weights["before_mlp"])
        return x + multiply.gated("down", multiply("gate", h), multiply("up", h)), multiply.after

    x = params["embedding"].astype(BF16)[ids]
    x, after = jax.lax.scan(layer, x, (params["layers"], states, jnp.arange(sizes.layers)))
    logits = (rms_norm(x, params["norm"]) @ params["head"].astype(BF16).T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.roll(ids, -1, 1)[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean(), after


def program(name: str, sizes: Sizes):
    """Returns (state, step): step(state, ids, key) gives the new state, which it consumes, and the loss."""
    originals = init(sizes, jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(BF16), originals)
    states: dict[str, Any] = {}
    if name not in ("bf16", "xla_fp8"):
        names = tuple(sizes.matrices())
        params = bfp.quantize_params(params, lambda path, *_: name if "layers" in path and path.endswith(names) else None)
        if recipes.parse(name).delayed is not None:
            states = dict.fromkeys(("q_k_v", "o", "gate_up", "down"), bfp.delayed_state(name))
            states = jax.tree.map(lambda x: jnp.broadcast_to(x, (sizes.layers, *x.shape)), states)
    optimizer = bfp.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.0)

    @partial(jax.jit, donate_argnums=0)
    def step(state, ids, key):
        params, moments, states = state
        run = partial(loss_of, name, sizes)
        argnums = (0, 1) if states else 0
        found = bfp.value_and_grad(run, argnums, has_aux=True)(params, states, ids, key)
        (loss, states), gradients = found
        if states:
            gradients, seen = gradients
            states = bfp.update_scales(states, seen, name)
        updates, moments = optimizer.update(gradients, moments, params)
        return (bfp.apply_updates(params, updates), moments, states), loss

    return (params, optimizer.init(params, originals), states), step


def kernels(folder: str) -> list[str]:
    """Returns lines of a trace's GPU kernels: ms, calls and name, of the two steps that it holds."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    (trace,) = Path(folder).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                found[event.name].append(event.duration_ns / 2e6)
    rows = sorted(found.items(), key=lambda row: -sum(row[1]))
    total = f"{sum(map(sum, found.values())):9.3f} ms a step"
    return [total, *(f"{sum(times):9.3f} ms {len(times) / 2:7.1f} calls {name}" for name, times in rows)]


def measure(name: str, sizes: Sizes, steps: int, profile: Path | None) -> dict[str, Any]:
    """Returns a contender's line."""
    ids = jax.random.randint(jax.random.key(1), (max(1, sizes.tokens // sizes.length), sizes.length), 0, sizes.vocabulary)
    key = jax.random.key(2)
    state, step = program(name, sizes)
    began = time.perf_counter()
    compiled = step.lower(state, ids, key).compile()
    seconds, losses, times = time.perf_counter() - began, [], []
    for _ in range(4):
        state, loss = compiled(state, ids, key)
        losses.append(float(loss))
    for _ in range(steps):
        began = time.perf_counter()
        state, loss = compiled(state, ids, key)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - began)
    if profile is not None:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(2):
                    state, loss = compiled(state, ids, key)
                jax.block_until_ready((state, loss))
            (profile / f"{name}.txt").write_text("\n".join(kernels(folder)) + "\n")
        (profile / f"{name}.hlo.txt").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    gib = lambda size: round(size / 2**30, 2)  # noqa: E731
    return {
        "name": name, "ms": round(1e3 * statistics.median(times), 2), "compile_s": round(seconds, 1),
        "temp_gib": gib(memory.temp_size_in_bytes), "args_gib": gib(memory.argument_size_in_bytes),
        "first": round(losses[0], 4), "fourth": round(losses[3], 4), "last": round(float(loss), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("tokens", 8192), ("length", 4096), ("layers", 16), ("width", 2048), ("inner", 8192)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8)
    everything = ["bf16", "xla_fp8", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"]
    parser.add_argument("--recipes", nargs="*", default=everything, metavar="NAME")
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    sizes = Sizes(options.width, options.inner, options.layers, options.vocabulary, options.tokens, options.length)
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    record = {"date": datetime.date.today().isoformat(), "gpu": device.device_kind, "jax": jax.__version__}
    record |= {"tokens": sizes.tokens, "length": sizes.length, "layers": sizes.layers, "rows": []}
    print(record["gpu"], record["jax"], f"{sizes.tokens} tokens", flush=True)
    for name in options.recipes:
        try:
            row = measure(name, sizes, options.steps, options.profile)
        except jax.errors.JaxRuntimeError as error:
            row = {"name": name, "error": str(error)[:200]}
        record["rows"].append(row)
        print(row, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        gc.collect()
        jax.clear_caches()


if __name__ == "__main__":
    main()
