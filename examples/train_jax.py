"""Train the byte-level transformer of train_fsdp2.py in JAX, under shard_map: the same weights, batches and recipes.

    python examples/train_jax.py                                        # two host devices on the CPU, or all GPUs

Weights live sharded as codes and scales (FSDP), each layer gathers those, AdamW updates fp32 masters and quantizes them again.
With --save and --resume a run goes on where this program or train_fsdp2.py left it, with the same bits.
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


def stacked(flat: dict, layers: int) -> dict:
    """`byte_text.first_weights`, or what an optimizer keeps for each, as a tree whose blocks are one stack, for scan.

    What `flat` lacks is None.
    """
    blocks = {}
    for name in ("attention_norm", "mlp_norm", *MATRICES):
        each = [flat.get(f"blocks.{i}.{name}") for i in range(layers)]
        blocks[name] = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    others = ("embedding", "positions", "norm", "head")
    return {name: jax.tree.map(jnp.asarray, flat.get(name)) for name in others} | {"blocks": blocks}


def unstacked(tree: dict) -> dict:
    """The inverse of `stacked`; quantized weights included."""
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


def start(config: byte_text.Config, recipe: str, seed: int, optimizer, mesh: jax.sharding.Mesh, resume: Path | None) -> tuple:
    """Parameters and the optimizer's state on the mesh: the first ones, or those of a file."""
    first = stacked(byte_text.first_weights(config, seed), config.layers)
    is_matrix = lambda path, leaf: path.split(".")[-1] in MATRICES  # noqa: E731
    specs = {name: P() for name in first} | {
        "blocks": {name: P(None, "data") if name in MATRICES else P() for name in first["blocks"]}
    }
    whole = first if recipe == "bf16" else bfp.quantize_params(first, recipe, filter=is_matrix)
    state = optimizer.init(whole, first)
    if resume is not None:
        whole, state = load(resume, whole, state)
    params = bfp.shard_params(whole, mesh, specs)
    return params, bfp.shard_state(state, params)


def train(recipe: str, options: argparse.Namespace, progress: Progress) -> dict:
    """One run; what it measured."""
    config, ranks = byte_text.Config(), options.devices
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    text, held_out = byte_text.read_text()
    rates = jnp.asarray([byte_text.learning_rate(step, options.steps) for step in range(options.steps)])
    optimizer = bfp.adamw(lambda step: rates[step], (0.9, 0.95), weight_decay=0.1)
    resume = None if options.resume is None else byte_text.saved(options.resume, recipe)
    params, state = start(config, recipe, options.seed, optimizer, mesh, resume)
    steps = range(options.steps) if resume is None else byte_text.steps_left(int(state.inner.step), options.steps, resume)
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

    task = progress.add_task(recipe, total=len(steps), loss=float("nan"))
    losses, began = [], time.perf_counter()
    for i in steps:
        rows = byte_text.batch(text, options.batch, config.context, seed=options.seed, step=i)
        # Each rank takes every so many-th row, as in train_fsdp2.py.
        rows = np.concatenate([rows[rank::ranks] for rank in range(ranks)])
        params, state, loss = step(params, state, rows.astype(np.int32), jax.random.fold_in(jax.random.key(options.seed), i))
        losses.append(float(loss))
        progress.update(task, advance=1, loss=losses[-1])
        if options.save is not None and i + 1 == (options.save_at or options.steps):
            save(byte_text.saved(options.save, recipe), params, state)
    seconds = time.perf_counter() - began

    rows = byte_text.batch(held_out, options.held_out, config.context, seed=0, step=0)
    matrices = sum(bytes_of(params["blocks"][name]) for name in MATRICES)
    return {
        "recipe": recipe,
        "first_step": steps.start,
        "losses": losses,
        "held_out": float(judge(params, rows.astype(np.int32))),
        # Forward and backward gather each once; what a bf16 run keeps in fp32 travels in half of that.
        "gathered_bytes_a_step": 2 * matrices // (2 if recipe == "bf16" else 1),
        "weight_bytes": sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards[:1]),
        "parameters": sum(w.size for w in byte_text.first_weights(config, options.seed).values()),
        "seconds": seconds,
    }


def everything(params: dict, state) -> dict:
    """What a run goes on from, layer by layer, as `byte_text` says; of whole parameters and state."""
    trees = {"master": state.masters, "first": state.inner.first, "second": state.inner.second}
    return unstacked(params) | {kind: unstacked(tree) for kind, tree in trees.items()} | {"step": state.inner.step}


def save(path: Path, params: dict, state) -> None:
    """Writes everything that a run goes on from, of sharded parameters and state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bfp.save(path, everything(bfp.unshard_params(params), bfp.unshard_state(state, params)))


def load(path: Path, params: dict, state) -> tuple:
    """Parameters and state of a file, of the formats and shapes of these."""
    found = bfp.load(path, like=everything(params, state))
    layers = len(params["blocks"]["mlp_norm"])
    masters, first, second = (stacked(found[kind], layers) for kind in ("master", "first", "second"))
    inner = state.inner._replace(step=found["step"], first=first, second=second)
    return stacked(found, layers), state._replace(masters=masters, inner=inner)


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
    parser.add_argument("--save-at", type=int, help="the step after which --save does so; by default the last")
    parser.add_argument("--resume", type=Path, help="folder to go on from: what --save of this program or train_fsdp2.py wrote")
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
