"""Sums over ranks whose terms travel as codes, inside shard_map: what `blockfp.sharding.reducing` says.

rounded        a rank's term: codes of the whole that it is, with random bits of the rank's own
sum_in_order   all-to-all of the terms' parts, dequantized and added in the order of the ranks, in fp32
scatter_codes  the transpose of a gather, with both
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.rounding import fold_in
from blockfp.formats import Format
from blockfp.sharding.plans import Plan
from blockfp.sharding.steps import Gather

from . import storage
from .array import QuantizedArray
from .quantize import quantize
from .sharded import sent_from


def without_inf(x: jax.Array) -> jax.Array:
    """Makes an Inf NaN: codes saturate it, which a loss scaler is to see."""
    return jnp.where(jnp.isinf(x), jnp.asarray(jnp.nan, x.dtype), x)


def rounded(x: jax.Array, format: Format, key: jax.Array | None, axes: Sequence[str]) -> QuantizedArray:
    """Quantizes a rank's term x [rows, columns]; the rank's number on these mesh axes is folded into the key."""
    own = None if key is None else fold_in(key, lax.axis_index(tuple(axes)))
    return quantize(without_inf(x), format, key=own)


def sum_in_order(parts: QuantizedArray, axes: Sequence[str], dtype) -> jax.Array:
    """Sums what all ranks have for this one: of parts [ranks, rows, columns] each sends every other its own."""
    send = lambda leaf: lax.all_to_all(leaf, tuple(axes), split_axis=0, concat_axis=0)  # noqa: E731
    received = jax.tree.map(send, parts)
    terms = jax.vmap(lambda q: q.dequantize(jnp.float32))(received)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(dtype)


def scatter_codes(gradient: jax.Array, plan: Plan, format: Format, key: jax.Array | None) -> jax.Array:
    """`sharded.scatter_sum` with terms that travel as codes.

    Args:
        gradient: the cotangent of what `plan` makes [rows, columns].
        plan: of a gather of rows, see `check_gradient_format`.
        format: in blocks of one row.
        key: for stochastic rounding, equal on all ranks.
    """
    (step,) = plan.steps
    assert isinstance(step, Gather)
    q = rounded(gradient, format, key, step.axes)
    places = storage.of_rank(step.sharding.mesh, sent_from(step))
    ranks, stored = len(step.group(0)), storage.length(step.sharding, 0)

    def cut(leaf: jax.Array) -> jax.Array:
        return storage.take(leaf, places, -2).reshape(ranks, stored, leaf.shape[-1])

    return sum_in_order(jax.tree.map(cut, q), step.axes, gradient.dtype)


def check_gradient_plan(plan: Plan) -> None:
    """Raises ValueError where the gradient of a gather can't travel as codes: its columns are cut."""
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], Gather) or plan.steps[0].dim != len(plan.source.shape) - 2:
        raise ValueError(
            f"gradient_format: columns of {plan.source} are gathered, and gradients travel as codes along rows alone; leave "
            "gradient_format out, or shard rows over these axes"
        )


def parts_of(x: jax.Array, format: Format, key: jax.Array | None, axis: str) -> QuantizedArray:
    """Each rank's part of a term x [rows, columns] in a format whose scales go beyond a row: an array of its own."""
    size = lax.axis_size(axis)
    parts = without_inf(x).reshape(size, x.shape[0] // size, x.shape[1])
    if key is None:
        return jax.vmap(lambda part: quantize(part, format))(parts)
    own = fold_in(key, lax.axis_index(axis))
    keys = jnp.stack([jnp.asarray(fold_in(own, i)) for i in range(size)])
    return jax.vmap(lambda part, key: quantize(part, format, key=key))(parts, keys)
