"""Trains the byte-level transformer of train_fsdp2.py in JAX under shard_map: the same weights, batches and recipes.

    python examples/train_jax.py                                        # two host devices on the CPU, or all GPUs

Weights are sharded as codes and scales (FSDP) and gathered as such by each layer; AdamW updates fp32 masters and quantizes
them again. With --save and --resume, a run continues from a checkpoint of this program or of train_fsdp2.py, with the same
bits.
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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp
from blockfp.definition.rounding import fold_in

MATRICES = ("qkv", "out", "up", "down")


def stacked(flat: dict, layers: int) -> dict:
    """Returns `byte_text.first_weights`, or an optimizer's state of them, as a tree whose blocks are one stack, for scan.

    Entries missing in `flat` are None.
    """
    blocks = {}
    for name in ("attention_norm", "mlp_norm", *MATRICES):
        each = [flat.get(f"blocks.{i}.{name}") for i in range(layers)]
        blocks[name] = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    others = ("embedding", "positions", "norm", "head")
    return {name: jax.tree.map(jnp.asarray, flat.get(name)) for name in others} | {"blocks": blocks}


def unstacked(tree: dict) -> dict:
    """The inverse of `stacked`, for quantized weights too."""
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


def linear(x, weight, random, scaling, recipe: str):
    """Returns x w^T for a weight sharded over "data", and the state of delayed scaling, if any.

    `random`: `first_random` of one layer.
    """
    if recipe == "bf16":
        return x @ jax.lax.all_gather(weight.astype(x.dtype), "data", axis=0, tiled=True).T, None
    key = None if random is None else fold_in(random["rng_key"], random["rng_step"])
    y = bfp.linear(x, weight, recipe=recipe, key=key, state=scaling, data_axes=("data",))
    return (y, None) if scaling is None else y


def block(x, weights, random, scaling, heads: int, recipe: str):
    """Causal attention and a feed-forward layer, each with a norm before it and a residual; x [batch, length, width]."""
    seen = {}

    def layer(name, x):
        y, seen[name] = linear(x, weights[name], random[name], scaling[name], recipe)
        return y

    qkv = layer("qkv", rms_norm(x, weights["attention_norm"]))
    q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, heads, -1), 2, 0)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + layer("out", attended.reshape(x.shape))
    hidden = jax.nn.gelu(layer("up", rms_norm(x, weights["mlp_norm"])), approximate=True)
    return x + layer("down", hidden), seen


def loss_of(params, scaling, random, rows, heads: int, recipe: str):
    """Returns (mean cross-entropy in nats per byte, `scaling` with the inputs' amaxes); rows: [batch, context + 1]."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    half = lambda name: params[name].astype(jnp.bfloat16)  # noqa: E731
    x = half("embedding")[tokens] + half("positions")[: tokens.shape[1]]

    def body(x, layer):
        return block(x, *layer, heads, recipe)

    x, scaling = jax.lax.scan(body, x, (params["blocks"], random, scaling))
    logits = (rms_norm(x, params["norm"]) @ half("head").T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen.mean(), scaling


def first_scaling(layers: int, recipe: str) -> dict:
    """Returns the delayed-scaling states by matrix, each a stack for scan; None for other recipes."""
    if recipe != "fp8_delayed":
        return dict.fromkeys(MATRICES)
    return {name: jax.vmap(lambda _: bfp.delayed_state(recipe))(jnp.arange(layers)) for name in MATRICES}


def first_random(config: byte_text.Config, recipe: str, seed: int) -> dict:
    """Returns keys of stochastic rounding and their use counts by matrix, each a stack for scan; None for other recipes."""
    if recipe != "nvfp4":
        return dict.fromkeys(MATRICES)
    keys = stacked(byte_text.first_keys(config, seed), config.layers)["blocks"]
    return {name: {"rng_key": keys[name], "rng_step": jnp.zeros(config.layers, jnp.int32)} for name in MATRICES}


def start(config: byte_text.Config, recipe: str, seed: int, optimizer, mesh: jax.sharding.Mesh, resume: Path | None) -> tuple:
    """Returns parameters, optimizer state, delayed-scaling states and keys on the mesh, initial or from a file."""
    first = stacked(byte_text.first_weights(config, seed), config.layers)
    is_matrix = lambda path, leaf: path.split(".")[-1] in MATRICES  # noqa: E731
    specs = {name: P() for name in first} | {
        "blocks": {name: P(None, "data") if name in MATRICES else P() for name in first["blocks"]}
    }
    whole = first if recipe == "bf16" else bfp.quantize_params(first, recipe, filter_fn=is_matrix)
    state = optimizer.init(whole, first)
    scaling, random = first_scaling(config.layers, recipe), first_random(config, recipe, seed)
    if resume is not None:
        whole, state, scaling, random = load(resume, whole, state, scaling, random)
    params = bfp.shard_params(whole, mesh, specs)
    return params, bfp.shard_state(state, params), *jax.device_put((scaling, random), NamedSharding(mesh, P()))


def train(recipe: str, options: argparse.Namespace, progress: Progress) -> dict:
    """Trains once and returns the measurements."""
    config, ranks = byte_text.Config(), options.devices
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    text, held_out = byte_text.read_text()
    rates = jnp.asarray([byte_text.learning_rate(step, options.steps) for step in range(options.steps)])
    optimizer = bfp.adamw(lambda step: rates[step], b2=0.95, weight_decay=0.1)
    resume = None if options.resume is None else byte_text.saved(options.resume, recipe)
    params, state, scaling, random = start(config, recipe, options.seed, optimizer, mesh, resume)
    steps = range(options.steps) if resume is None else byte_text.steps_left(int(state.inner.step), options, resume)
    loss_here = partial(loss_of, heads=config.heads, recipe=recipe)

    def step(params, state, scaling, random, rows):
        def loss_part(params, scaling):
            loss, scaling = loss_here(params, scaling, random, rows)
            return loss / ranks, scaling

        (loss, scaling), (gradients, seen) = bfp.value_and_grad(loss_part, (0, 1), has_aux=True)(params, scaling)
        if jax.tree.leaves(scaling):
            scaling = bfp.update_scales(scaling, seen, recipe, axes=("data",))
        random = {name: r and r | {"rng_step": r["rng_step"] + 1} for name, r in random.items()}
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state, scaling, random, jax.lax.psum(loss, "data")

    where = bfp.partition_specs(params), bfp.partition_specs(state), P(), P()
    run = partial(jax.shard_map, mesh=mesh)
    step = jax.jit(run(step, in_specs=(*where, P("data")), out_specs=(*where, P())), donate_argnums=(0, 1, 2, 3))
    judge = jax.jit(
        run(
            lambda p, scaling, random, rows: jax.lax.pmean(loss_here(p, scaling, random, rows)[0], "data"),
            in_specs=(where[0], P(), P(), P("data")),
            out_specs=P(),
        )
    )

    task = progress.add_task(recipe, total=len(steps), loss=float("nan"))
    losses, began = [], time.perf_counter()
    for i in steps:
        rows = byte_text.batch(text, options.batch, config.context, seed=options.seed, step=i)
        # Each rank takes every so many-th row, as in train_fsdp2.py.
        rows = np.concatenate([rows[rank::ranks] for rank in range(ranks)])
        params, state, scaling, random, loss = step(params, state, scaling, random, rows.astype(np.int32))
        losses.append(float(loss))
        progress.update(task, advance=1, loss=losses[-1])
        if options.save is not None and i + 1 == (options.save_at or options.steps):
            save(byte_text.saved(options.save, recipe), params, state, scaling, random)
    seconds = time.perf_counter() - began

    rows = byte_text.batch(held_out, options.held_out, config.context, seed=0, step=0)
    matrices = sum(bytes_of(params["blocks"][name]) for name in MATRICES)
    return {
        "recipe": recipe,
        "first_step": steps.start,
        "losses": losses,
        "held_out": float(judge(params, scaling, random, rows.astype(np.int32))),
        # Forward and backward gather each once; what a bf16 run keeps in fp32 travels in half of that.
        "gathered_bytes_a_step": 2 * matrices // (2 if recipe == "bf16" else 1),
        "weight_bytes": sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards[:1]),
        "parameters": sum(w.size for w in byte_text.first_weights(config, options.seed).values()),
        "seconds": seconds,
    }


def everything(params: dict, state, scaling: dict, random: dict) -> dict:
    """Returns the state of a run layer by layer, named as in `byte_text`, from unsharded parameters and state."""
    trees = {"master": state.masters, "first": state.inner.first, "second": state.inner.second}
    trees |= {part: {"blocks": {n: s and getattr(s, part) for n, s in scaling.items()}} for part in byte_text.SCALING}
    trees |= {part: {"blocks": {n: r and r[part] for n, r in random.items()}} for part in byte_text.RANDOM}
    return unstacked(params) | {kind: unstacked(tree) for kind, tree in trees.items()} | {"step": state.inner.step}


def save(path: Path, params: dict, state, scaling: dict, random: dict) -> None:
    """Writes the state of a run from sharded parameters and state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bfp.save(path, everything(bfp.unshard_params(params), bfp.unshard_state(state, params), scaling, random))


def load(path: Path, params: dict, state, scaling: dict, random: dict) -> tuple:
    """Returns a file's parameters, both states and keys, in the formats and shapes of the given ones."""
    found = bfp.load(path, like=everything(params, state, scaling, random))
    layers = len(params["blocks"]["mlp_norm"])
    masters, first, second, *parts = (stacked(found[k], layers) for k in ("master", "first", "second", *byte_text.SCALING))
    words, counts = (stacked(found[kind], layers)["blocks"] for kind in byte_text.RANDOM)
    inner = state.inner._replace(step=found["step"], first=first, second=second)
    by_matrix = {n: s and bfp.DelayedState(*(part["blocks"][n] for part in parts)) for n, s in scaling.items()}
    keys = {n: r and {"rng_key": words[n], "rng_step": counts[n]} for n, r in random.items()}
    return stacked(found, layers), state._replace(masters=masters, inner=inner), by_matrix, keys


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="bf16,mxfp8,fp8_block,nvfp4", help="separated by commas")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step, over all devices")
    parser.add_argument("--held-out", type=int, default=64, help="pieces of held-out text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--save", type=Path, help="folder for each run's weights and optimizer state, RECIPE.safetensors")
    parser.add_argument("--save-at", type=int, help="step after which to save; default: the last")
    parser.add_argument(
        "--resume", type=Path, help="folder to resume from, written by --save of this program or train_fsdp2.py"
    )
    parser.add_argument("--out", type=Path, default=Path("train_jax.json"))
    options = byte_text.parsed(parser)
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
