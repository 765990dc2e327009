"""Products of `grouped_linear`, group by group: `products.product` multiplies spans of a group's rows.

Group sizes are only known at run time, and XLA on NVIDIA GPUs multiplies ragged groups by masking: all rows with every weight.
Here a loop runs over spans, whose number of tiles only depends on shapes. A group's last span extends beyond the group, into
rows that the next group overwrites, or that are zeroed if they would be summed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.recipe import Exact

from ..arrays.array import QuantizedArray
from ..implementations import explicit
from ..params.params import shares_scale
from .products import Matrix, product
from .tiles import Tiles


class _Span(NamedTuple):
    first: jax.Array  # first tile
    own: jax.Array  # number of tiles that belong to the group


def by_rows(
    x: Matrix, weight: Matrix, tiles: Tiles, dtype, *, bias: jax.Array | None = None, fast: bool, exact: Exact
) -> jax.Array:
    """Returns [tiles * rows, n]: each tile of x [tiles, rows, k] times its group's matrix of weight [groups, n, k], transposed.

    Adds each group's row of bias [groups, n], if given, before the product is rounded.
    """
    vary = _varying(x, weight, bias, tiles)
    of_groups = _of_groups(tiles)

    def of_group(group, y: jax.Array) -> jax.Array:
        matrix, own = _matrix(weight, group), None if bias is None else bias[group]

        def of_span(i, y: jax.Array) -> jax.Array:
            span = _span(of_groups, tiles, group, i)
            each = product(_side_by_side(x, span, tiles, axis=0), matrix, dtype, bias=own, fast=fast, exact=exact)
            return vary(lax.dynamic_update_slice_in_dim(y, each, span.first * tiles.rows, 0))

        return lax.fori_loop(0, -(-of_groups.own[group] // tiles.spare), of_span, y)

    y = jnp.zeros((x.shape[0] * tiles.rows, weight.shape[1]), dtype)
    return lax.fori_loop(0, tiles.sizes.shape[0], of_group, vary(y))


def by_columns(a: Matrix, b: Matrix, tiles: Tiles, dtype, *, fast: bool, exact: Exact) -> jax.Array:
    """Returns [groups, m, n]: sums over each group's tiles of a [tiles, m, rows] times b [tiles, n, rows], transposed."""
    vary = _varying(a, b, tiles)
    of_groups = _of_groups(tiles)

    def of_group(_, group):
        def of_span(i) -> jax.Array:
            span = _span(of_groups, tiles, group, i)
            left, right = (_side_by_side(each, span, tiles, axis=1) for each in (a, b))
            return vary(product(left, right, jnp.float32, fast=fast, exact=exact))

        # Start with the first span (zeros if the group is empty), which saves an addition to zeros.
        count = -(-of_groups.own[group] // tiles.spare)
        total = lax.fori_loop(1, count, lambda i, total: total + of_span(i), of_span(0))
        return None, total.astype(dtype)

    return lax.scan(of_group, None, jnp.arange(tiles.sizes.shape[0]))[1]


def _varying(*operands: Any):
    """Returns a function that makes an array vary over the mesh axes of all these operands."""
    over = frozenset().union(*(explicit.varying(leaf) for leaf in jax.tree.leaves(operands)))
    return lambda x: explicit.vary(x, over)


def _of_groups(tiles: Tiles) -> _Span:
    """Returns all tiles of each group, [groups]."""
    own = tiles.filled // tiles.rows
    return _Span(jnp.cumsum(own) - own, own)


def _span(of_groups: _Span, tiles: Tiles, group: jax.Array, number: jax.Array) -> _Span:
    before = number * tiles.spare
    return _Span(of_groups.first[group] + before, of_groups.own[group] - before)


def _side_by_side(x: Matrix, span: _Span, tiles: Tiles, axis: int) -> Any:
    """Joins the tiles of a span to one matrix, along `axis`; zeroes other groups' tiles if their rows would be summed."""
    kept = jnp.arange(tiles.spare, dtype=jnp.int32)[:, None, None] < span.own

    def taken(part: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(part, span.first, tiles.spare)
        return jnp.where(kept, some, jnp.zeros((), part.dtype)) if axis else some

    def joined(part: jax.Array) -> jax.Array:
        some = taken(part)
        return some.swapaxes(0, 1).reshape(some.shape[1], -1) if axis else some.reshape(-1, some.shape[-1])

    if not isinstance(x, QuantizedArray):
        return joined(x)
    scales, tensor_scale = x.scales, x.tensor_scale
    if not x.format.per_tensor:
        scales = joined(scales)
    else:
        # One scale for all groups, or one per group, equal in all of its tiles.
        scales = scales[0] if scales.shape[0] == 1 else taken(scales)[0]
    if tensor_scale is not None:
        tensor_scale = taken(tensor_scale[:, None, None])[0, 0, 0]
    columns = x.columns * (tiles.spare if axis else 1)
    return x.replace(codes=joined(x.codes), scales=scales, tensor_scale=tensor_scale, columns=columns)


def _matrix(weight: Matrix, group: jax.Array) -> Matrix:
    """Returns one matrix of a stack, whose tensor scale may be shared."""
    if not isinstance(weight, QuantizedArray):
        return weight[group]
    shared, tensor_scale = shares_scale(weight), weight.tensor_scale
    if tensor_scale is not None and not shared:
        tensor_scale = tensor_scale[group]
    scales = weight.scales[0 if shared and weight.format.per_tensor else group]
    return weight.replace(codes=weight.codes[group], scales=scales, tensor_scale=tensor_scale)
