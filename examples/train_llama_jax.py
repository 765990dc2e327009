"""Trains a Llama in plain JAX, sharded over all devices (FSDP), on the standard library's bytes.

    python examples/train_llama_jax.py [--attention mxfp8] [--mlp fp8_delayed] [--steps 60]
    python examples/train_llama_jax.py --save run --steps 30; python examples/train_llama_jax.py --resume run --steps 60

A model to start from: stacked layers under `lax.scan`, grouped-query attention by `jax.nn.dot_product_attention` beside
quantized projections, SwiGLU whose product is quantized without being stored. `init_state` alone names recipes: attention and
the MLP have one each, the embedding and the head stay in high precision. Checkpoints are Orbax's, and `--profile FOLDER` writes
a trace of the last step for TensorBoard or Perfetto.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import byte_text
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp

HEAD = 32


class Sizes(NamedTuple):
    """Lengths of the model and its batch; a head has `HEAD` features, and two query heads share keys and values."""

    width: int = 128
    inner: int = 384
    layers: int = 4
    vocabulary: int = byte_text.VOCABULARY
    batch: int = 16
    length: int = 128


def init(sizes: Sizes, key: jax.Array) -> dict:
    """Returns fp32 parameters; those of layers are stacked, matrices [layers, out, in]."""
    d, f, kv = sizes.width, sizes.inner, sizes.width // 2
    shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
    keys = dict(zip(("embedding", "head", *shapes), jax.random.split(key, len(shapes) + 2), strict=True))
    normal = lambda name, *shape: 0.02 * jax.random.normal(keys[name], shape)  # noqa: E731
    layers = {name: normal(name, sizes.layers, *shape) for name, shape in shapes.items()}
    layers |= {name: jnp.ones((sizes.layers, d)) for name in ("before_attention", "before_mlp")}
    outer = {name: normal(name, sizes.vocabulary, d) for name in ("embedding", "head")}
    return outer | {"norm": jnp.ones(d), "layers": layers}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotates positions into x [batch, length, heads, HEAD]."""
    angles = jnp.arange(x.shape[1])[:, None] * 10000 ** -(jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(x: jax.Array, weights: dict, states: dict) -> tuple[jax.Array, dict]:
    """Computes a layer of x [batch, length, width]; returns its states after the call, too."""
    after = dict(states)

    def linear(name, x, **made):
        y, after[name] = bfp.linear(x, weights[name], state=states[name], data_axes=("data",), **made)
        return y

    h = rms_norm(x, weights["before_attention"])
    q, k, v = (linear(name, h).reshape(*x.shape[:2], -1, HEAD) for name in "qkv")
    attended = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    x = x + linear("o", attended.reshape(x.shape))
    h = rms_norm(x, weights["before_mlp"])
    return x + linear("down", linear("gate", h), up=linear("up", h), activation="silu"), after


def loss_of(params: dict, states: dict, rows: jax.Array) -> tuple[jax.Array, dict]:
    """Returns (mean cross-entropy in nats per byte, states); rows [batch, length + 1]."""
    x = params["embedding"].astype(jnp.bfloat16)[rows[:, :-1]]
    step = jax.checkpoint(lambda x, layer: block(x, *layer))
    x, layers = jax.lax.scan(step, x, (params["layers"], states["layers"]))
    logits = (rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype).T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)
    return -chosen.mean(), {**states, "layers": layers}


def train(options: argparse.Namespace) -> list[float]:
    sizes, ranks = Sizes(), jax.device_count()
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
    recipe = {r"layers\.[qkvo]$": options.attention, r"layers\.(gate|up|down)$": options.mlp}
    optimizer = bfp.adamw(1e-3, b2=0.95, weight_decay=0.1)

    first = init(sizes, jax.random.key(options.seed))
    params = bfp.quantize_params(first, recipe)
    in_fsdp = lambda leaf: P(*[None] * (leaf.ndim - 2), "data") if leaf.ndim == 3 else P()  # noqa: E731
    specs = jax.tree.map(in_fsdp, first)
    states = jax.device_put(bfp.init_state(recipe, params, key=options.seed), NamedSharding(mesh, P()))
    moments = optimizer.init(params, first)
    params = bfp.shard_params(params, mesh, specs)
    moments = bfp.shard_state(moments, params)
    where = bfp.partition_specs(params), P(), bfp.partition_specs(moments)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    @partial(jax.shard_map, mesh=mesh, in_specs=(*where, P("data")), out_specs=(*where, P()))
    def step(params, states, moments, rows):
        def mean(params, states):
            loss, states = loss_of(params, states, rows)
            return loss / ranks, states

        (loss, states), (gradients, seen) = bfp.value_and_grad(mean, (0, 1), has_aux=True)(params, states)
        states = bfp.update_scales(states, seen, axes=("data",))
        updates, moments = optimizer.update(gradients, moments, params)
        return bfp.apply_updates(params, updates), states, moments, jax.lax.psum(loss, "data")

    arrays, begun, losses = (params, states, moments), 0, []
    text, _ = byte_text.read_text()
    with ocp.StandardCheckpointer() as checkpointer:
        if options.resume is not None:
            arrays, begun = checkpointer.restore(options.resume.absolute(), (arrays, begun))
        for i in range(begun, options.steps):
            rows = byte_text.batch(text, sizes.batch, sizes.length, seed=options.seed, step=i).astype(np.int32)
            last = i + 1 == options.steps
            with jax.profiler.trace(options.profile) if last and options.profile else nullcontext():
                *arrays, loss = step(*arrays, rows)
                losses.append(float(loss))
            if i % 10 == 0 or last:
                print(f"step {i + 1:4d}  loss {losses[-1]:.4f} nats a byte")
        if options.save is not None:
            checkpointer.save(options.save.absolute(), (tuple(arrays), options.steps))
    return losses


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="mxfp8", help="recipe of q, k, v and o")
    parser.add_argument("--mlp", default="fp8_delayed", help="recipe of gate, up and down")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    for name, what in (("save", "write a checkpoint"), ("resume", "go on from a checkpoint"), ("profile", "write a trace")):
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=what)
    return parser.parse_args()


if __name__ == "__main__":
    train(parsed())
