"""Sums over ranks inside shard_map: of terms that travel as codes (`blockfp.sharding.reducing`), and in one tree.

rounded         quantizes a rank's whole term with the rank's own random bits
sum_in_order    sends the terms' parts all-to-all, dequantizes them and sums in the order of ranks, in fp32
scatter_codes   combines both to the transpose of a gather
sum_of_pieces   a rank's own pieces, and
sum_over_ranks  the ranks' sums: a tree on any number of ranks (`blockfp.sharding.pieces`), with PyTorch's bits

With `Recipe.exact_order` only a contracted axis is divided into pieces: in the forward of a row-parallel layer, and in dgrad of
a column-parallel one. Their terms are fp32 and are rounded once, after the last sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.layout import packed_columns
from blockfp.definition.rounding import fold_in
from blockfp.formats import Format
from blockfp.sharding.plans import Plan
from blockfp.sharding.steps import Gather

from ..implementations.product import add, finish
from . import storage
from .array import QuantizedArray
from .quantize import quantize
from .sharded import sent_from


def without_inf(x: jax.Array) -> jax.Array:
    """Replaces Inf by NaN: codes saturate Inf, and a loss scaler must notice it."""
    return jnp.where(jnp.isinf(x), jnp.asarray(jnp.nan, x.dtype), x)


def rounded(x: jax.Array, format: Format, key: jax.Array | None, axes: Sequence[str]) -> QuantizedArray:
    """Quantizes a rank's term x [rows, columns]; folds the rank's number on these mesh axes into the key."""
    own = None if key is None else fold_in(key, lax.axis_index(tuple(axes)))
    return quantize(without_inf(x), format, key=own)


def sum_in_order(parts: QuantizedArray, axes: Sequence[str], dtype) -> jax.Array:
    """Sends parts [ranks, rows, columns] to the other ranks and sums the parts received for this rank."""
    send = lambda leaf: lax.all_to_all(leaf, tuple(axes), split_axis=0, concat_axis=0)  # noqa: E731
    received = jax.tree.map(send, parts)
    terms = jax.vmap(lambda q: q.dequantize(jnp.float32))(received)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(dtype)


def scatter_codes(gradient: jax.Array, plan: Plan, format: Format, key: jax.Array | None) -> jax.Array:
    """Like `sharded.scatter_sum`, but sends terms as codes.

    `gradient` [rows, columns] is the cotangent of the result of `plan`, a gather of rows that passed `check_gradient_plan`.
    `format` has blocks of one row; `key` is equal on all ranks.
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
    """Raises ValueError if a gather cuts columns, so that its gradient can't travel as codes."""
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], Gather) or plan.steps[0].dim != len(plan.source.shape) - 2:
        raise ValueError(
            f"gradient_format: columns of {plan.source} are gathered, but gradients travel as codes only along rows; "
            "omit gradient_format, or shard rows over these axes"
        )


def parts_of(x: jax.Array, format: Format, key: jax.Array | None, axis: str) -> QuantizedArray:
    """Quantizes each rank's part of a term x [rows, columns] separately, for formats whose scales span rows."""
    size = lax.axis_size(axis)
    parts = without_inf(x).reshape(size, x.shape[0] // size, x.shape[1])
    if key is None:
        return jax.vmap(lambda part: quantize(part, format))(parts)
    own = fold_in(key, lax.axis_index(axis))
    keys = jnp.stack([jnp.asarray(fold_in(own, i)) for i in range(size)])
    return jax.vmap(lambda part, key: quantize(part, format, key=key))(parts, keys)


# ---- in one tree


def sum_of_pieces(a: Any, b: Any, count: int, multiply: Callable[[Any, Any], jax.Array]) -> jax.Array:
    """Returns a @ b^T, float32 [m, n], as the sum of the products of `count` equal pieces of k.

    Args:
        a, b: matrices [m, k] and [n, k], whose pieces begin and end between blocks (`check_pieces`).
        count: number of pieces, a power of two.
        multiply: returns the float32 product of two pieces.
    """
    length = a.shape[1] // count
    return _tree_sum([multiply(*(_piece(x, i * length, length) for x in (a, b))) for i in range(count)])


def sum_over_ranks(terms: jax.Array, axis: str, bias: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the sum of the ranks' float32 terms [m, n], plus a bias, rounded once to `dtype`; equal on all ranks.

    Each rank sums its share of the elements.
    """
    ranks = lax.axis_size(axis)
    share = -(-terms.size // ranks)
    sent = jnp.pad(terms.reshape(-1), (0, share * ranks - terms.size)).reshape(ranks, share)
    own = _tree_sum(lax.all_to_all(sent, axis, split_axis=0, concat_axis=0))
    total = lax.all_gather(own, axis, tiled=True, to="invarying")[: terms.size].reshape(terms.shape)
    return finish(total, bias, jnp.dtype(dtype).name)


def _tree_sum(terms: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """Adds neighbours, then neighbouring sums, and so on; there are 2^n terms."""
    sums = list(terms)
    while len(sums) > 1:
        sums = [add(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _piece(x: Any, first: int, length: int) -> Any:
    """Returns columns of a matrix, as one that isn't sharded."""
    last = first + length
    if not isinstance(x, QuantizedArray):
        return x[:, first:last]
    width, block, scales = x.format.element.bits, x.format.block, x.scales
    if block is not None and not x.format.per_row:
        scales = scales[:, first // block[1] : last // block[1]]
    codes = x.codes[:, packed_columns(first, width) : packed_columns(last, width)]
    return x.replace(codes=codes, scales=scales, columns=length, sharding=None)
