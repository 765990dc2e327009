"""The products of `grouped_linear`: of spans of tiles, one group's rows each, by what multiplies any two operands.

How many rows a group has is known only at run time, and XLA on NVIDIA GPUs multiplies ragged groups by masking: all rows with
every weight. Here a loop goes over spans of so many tiles as the shapes alone say. A group's last span reaches beyond it:
into rows that the next group's span writes again, or, where rows are summed over, that are made zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.array import QuantizedArray
from ..implementations import replication
from ..params.params import shares_scale
from .products import Operand, product
from .tiles import Tiles


class _Span(NamedTuple):
    begin: jax.Array  # its first tile
    tiles: jax.Array  # how many of its tiles are its group's
    group: jax.Array


def by_rows(x: Operand, weight: Operand, tiles: Tiles, dtype, *, fast: bool) -> jax.Array:
    """[tiles * rows, n]: each tile of x [tiles, rows, k] times its group's matrix of weight [groups, n, k], transposed."""
    rows, n = x.shape[1], weight.shape[1]

    def add(y: jax.Array, span: _Span) -> jax.Array:
        each = product(_side_by_side(x, span, tiles, axis=0), _matrix(weight, span.group), dtype, fast=fast)
        return lax.dynamic_update_slice(y, each, (span.begin * rows, jnp.int32(0)))

    return _over_spans(add, jnp.zeros((tiles.group.shape[0] * rows, n), dtype), tiles, (x, weight))


def by_columns(a: Operand, b: Operand, tiles: Tiles, *, fast: bool) -> jax.Array:
    """float32 [groups, m, n]: the sum over each group's tiles of a [tiles, m, rows] times b [tiles, n, rows], transposed."""
    groups = tiles.sizes.shape[0]

    def add(sums: jax.Array, span: _Span) -> jax.Array:
        left, right = (_side_by_side(each, span, tiles, axis=1) for each in (a, b))
        return sums.at[span.group].add(product(left, right, jnp.float32, fast=fast))

    return _over_spans(add, jnp.zeros((groups, a.shape[1], b.shape[1]), jnp.float32), tiles, (a, b))


def _over_spans(add, start: jax.Array, tiles: Tiles, operands: tuple[Operand, ...]) -> jax.Array:
    spans = _spans(tiles)
    over = frozenset().union(*(replication.varying(leaf) for leaf in jax.tree.leaves((operands, spans))))
    step = lambda i, carry: replication.vary(add(carry, jax.tree.map(lambda each: each[i], spans)), over)  # noqa: E731
    return lax.fori_loop(0, spans.begin.shape[0], step, replication.vary(start, over))


def _spans(tiles: Tiles) -> _Span:
    """Spans of all groups in their order, and behind them empty ones, which begin where nothing is kept."""
    groups = tiles.sizes.shape[0]
    most = tiles.group.shape[0] - tiles.spare
    of_group = tiles.filled // tiles.rows
    spans = -(-of_group // tiles.spare)
    ends, tile_starts = jnp.cumsum(spans), jnp.cumsum(of_group) - of_group
    place = jnp.arange(-(-most // tiles.spare) + groups, dtype=jnp.int32)
    group = jnp.searchsorted(ends, place, side="right").astype(jnp.int32)
    inside = jnp.minimum(group, groups - 1)
    before = (place - (ends - spans)[inside]) * tiles.spare
    left = jnp.where(group < groups, jnp.minimum(of_group[inside] - before, tiles.spare), 0)
    return _Span(jnp.where(group < groups, tile_starts[inside] + before, most), left, inside)


def _side_by_side(x: Operand, span: _Span, tiles: Tiles, axis: int) -> Any:
    """The tiles of a span as one matrix, one beside the other along an axis; those of other groups zeros."""
    kept = jnp.arange(tiles.spare, dtype=jnp.int32)[:, None, None] < span.tiles

    def taken(part: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(part, span.begin, tiles.spare)
        return jnp.where(kept, some, jnp.zeros((), part.dtype))

    def joined(part: jax.Array) -> jax.Array:
        some = taken(part)
        some = some if axis == 0 else some.swapaxes(0, 1)
        return some.reshape(-1, some.shape[-1]) if axis == 0 else some.reshape(some.shape[0], -1)

    if not isinstance(x, QuantizedArray):
        return joined(x)
    scales, tensor_scale = x.scales, x.tensor_scale
    if not x.format.per_tensor:
        scales = joined(scales)
    else:
        # One of all groups, or one of each, which all its tiles have.
        scales = scales[0] if scales.shape[0] == 1 else taken(scales)[0]
    if tensor_scale is not None:
        tensor_scale = taken(tensor_scale[:, None, None])[0, 0, 0]
    columns = x.columns * (1 if axis == 0 else tiles.spare)
    return x.replace(codes=joined(x.codes), scales=scales, tensor_scale=tensor_scale, columns=columns)


def _matrix(weight: Operand, group: jax.Array) -> Operand:
    """One matrix of a stack, whose scale per tensor may be that of all."""
    if not isinstance(weight, QuantizedArray):
        return weight[group]
    shared, tensor_scale = shares_scale(weight), weight.tensor_scale
    if tensor_scale is not None and not shared:
        tensor_scale = tensor_scale[group]
    scales = weight.scales[0 if shared and weight.format.per_tensor else group]
    return weight.replace(codes=weight.codes[group], scales=scales, tensor_scale=tensor_scale)
