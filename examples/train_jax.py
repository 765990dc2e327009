"""Train the byte-level transformer of train_fsdp2.py in JAX, under shard_map: the same weights, batches and recipes.

    python examples/train_jax.py                                        # two host devices on the CPU, or all GPUs

Weights live sharded as codes and scales (FSDP), each layer gathers those, AdamW updates fp32 masters and quantizes them again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import byte_text
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp

MATRICES = ("qkv", "out", "up", "down")


def stacked(weights: dict[str, np.ndarray], layers: int) -> dict:
    """`byte_text.first_weights` as a tree whose blocks are one stack, for scan."""
    blocks = {}
    for name in ("attention_norm", "mlp_norm", *MATRICES):
        blocks[name] = jnp.stack([weights[f"blocks.{i}.{name}"] for i in range(layers)])
    return {name: jnp.asarray(w) for name, w in weights.items() if not name.startswith("blocks.")} | {"blocks": blocks}


def unstacked(tree: dict) -> dict:
    """The inverse of `stacked`, of parameters or of what an optimizer keeps for each; quantized ones included."""
    flat = {name: leaf for name, leaf in tree.items() if name != "blocks" and leaf is not None}
    for name, leaf in tree["blocks"].items():
        if leaf is not None:
            for i in range(jax.tree.leaves(leaf)[0].shape[0]):
                flat[f"blocks.{i}.{name}"] = jax.tree.map(lambda part, i=i: part[i], leaf)
    return flat


def rms_norm(x, weight):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.finfo(jnp.float32).eps)
    return (y * weight).astype(x.dtype)


def linear(x, weight, key, recipe: str):
    """x w^T, of a weight that is cut over "data"."""
    if recipe == "bf16":
        return x @ jax.lax.all_gather(weight.astype(x.dtype), "data", axis=0, tiled=True).T
    return bfp.linear(x, weight, recipe=recipe, key=key, data_axes=("data",))


def block(x, weights, key, heads: int, recipe: str):
    """Causal attention and a feed-forward layer, each behind a norm and beside a residual; x [batch, length, width]."""
    layer = {name: partial(linear, weight=weights[name], recipe=recipe) for name in MATRICES}
    keys = jax.random.split(key, len(MATRICES))
    qkv = layer["qkv"](rms_norm(x, weights["attention_norm"]), key=keys[0])
    q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, heads, -1), 2, 0)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + layer["out"](attended.reshape(x.shape), key=keys[1])
    hidden = jax.nn.gelu(layer["up"](rms_norm(x, weights["mlp_norm"]), key=keys[2]), approximate=True)
    return x + layer["down"](hidden, key=keys[3])


def loss_of(params, rows, key, heads: int, recipe: str):
    """Mean cross-entropy in nats a byte; rows: [batch, context + 1]."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    half = lambda name: params[name].astype(jnp.bfloat16)  # noqa: E731
    x = half("embedding")[tokens] + half("positions")[: tokens.shape[1]]

    def body(x, layer):
        weights, key = layer
        return block(x, weights, key, heads, recipe), None

    keys = jax.random.split(key, params["blocks"]["qkv"].shape[0])
    x, _ = jax.lax.scan(body, x, (params["blocks"], keys))
    logits = (rms_norm(x, params["norm"]) @ half("head").T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen.mean()


def train(recipe: str, options: argparse.Namespace, progress: Progress) -> dict:
    """One run; what it measured."""
    config, ranks = byte_text.Config(), options.devices
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    text, held_out = byte_text.read_text()
    first = stacked(byte_text.first_weights(config, options.seed), config.layers)
    is_matrix = lambda path, leaf: path.split(".")[-1] in MATRICES  # noqa: E731
    specs = {name: P() for name in first} | {
        "blocks": {name: P(None, "data") if name in MATRICES else P() for name in first["blocks"]}
    }
    rates = jnp.asarray([byte_text.learning_rate(step, options.steps) for step in range(options.steps)])
    optimizer = bfp.adamw(lambda step: rates[step], (0.9, 0.95), weight_decay=0.1)

    whole = first if recipe == "bf16" else bfp.quantize_params(first, recipe, filter=is_matrix)
    params = bfp.shard_params(whole, mesh, specs)
    state = bfp.shard_state(optimizer.init(whole, first), params)
    loss_here = partial(loss_of, heads=config.heads, recipe=recipe)

    def step(params, state, rows, key):
        loss, gradients = bfp.value_and_grad(lambda p: loss_here(p, rows, key) / ranks)(params)
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state, jax.lax.psum(loss, "data")

    where = bfp.partition_specs(params), bfp.partition_specs(state)
    run = partial(jax.shard_map, mesh=mesh)
    step = jax.jit(run(step, in_specs=(*where, P("data"), P()), out_specs=(*where, P())), donate_argnums=(0, 1))
    judge = jax.jit(
        run(
            lambda p, rows: jax.lax.pmean(loss_here(p, rows, jax.random.key(0)), "data"),
            in_specs=(where[0], P("data")),
            out_specs=P(),
        )
    )

    task = progress.add_task(recipe, total=options.steps, loss=float("nan"))
    losses, began = [], time.perf_counter()
    for i in range(options.steps):
        rows = byte_text.batch(text, options.batch, config.context, seed=options.seed, step=i)
        # Each rank takes every so many-th row, as in train_fsdp2.py.
        rows = np.concatenate([rows[rank::ranks] for rank in range(ranks)])
        params, state, loss = step(params, state, rows.astype(np.int32), jax.random.fold_in(jax.random.key(options.seed), i))
        losses.append(float(loss))
        progress.update(task, advance=1, loss=losses[-1])
    seconds = time.perf_counter() - began

    rows = byte_text.batch(held_out, options.held_out, config.context, seed=0, step=0)
    if options.save is not None:
        save(options.save / f"{recipe}.safetensors", bfp.unshard_params(params), bfp.unshard_state(state, params))
    matrices = sum(bytes_of(params["blocks"][name]) for name in MATRICES)
    return {
        "recipe": recipe,
        "losses": losses,
        "held_out": float(judge(params, rows.astype(np.int32))),
        # Forward and backward gather each once; what a bf16 run keeps in fp32 travels in half of that.
        "gathered_bytes_a_step": 2 * matrices // (2 if recipe == "bf16" else 1),
        "weight_bytes": sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards[:1]),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(first)),
        "seconds": seconds,
    }


def save(path: Path, params: dict, state) -> None:
    """Everything that a run goes on from, layer by layer, under the names of `byte_text.first_weights`."""
    trees = {"master": state.masters, "first": state.inner.first, "second": state.inner.second}
    names = {f"{kind}.{name}": leaf for kind, tree in trees.items() for name, leaf in unstacked(tree).items()}
    bfp.save(path, unstacked(params) | names | {"step": state.inner.step})


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="bf16,mxfp8,fp8_block,nvfp4", help="separated by commas")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text in a step, over all devices")
    parser.add_argument("--held-out", type=int, default=64, help="pieces of text that the trained model is judged on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--save", type=Path, help="folder for each run's weights and optimizer, RECIPE.safetensors")
    parser.add_argument("--out", type=Path, default=Path("train_jax.json"))
    options = parser.parse_args()
    columns = ("{task.description:>10}", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.3f}", TimeElapsedColumn())
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns)) as progress:
        results = [train(recipe, options, progress) for recipe in options.recipes.split(",")]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"framework": f"JAX {jax.__version__}", "ranks": options.devices, "runs": results}
    options.out.write_text(json.dumps(found, indent=1))

    import training_report

    training_report.show([options.out])


if __name__ == "__main__":
    main()
