"""Sums of a tensor-parallel layer's terms in one tree on any number of ranks (`sharding.pieces`), with PyTorch's bits.

With `Recipe.exact_order` only a contracted axis is divided: in the forward of a row-parallel layer, and in dgrad of a
column-parallel one. Terms are fp32 and are rounded once, after the last sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.layout import packed_columns

from ..implementations.product import add, finish
from .array import QuantizedArray


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
