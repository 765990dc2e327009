"""Products of `grouped_linear`, group by group: `products.product` multiplies spans of a group's rows.

Group sizes are only known at run time, and XLA on NVIDIA GPUs multiplies ragged groups by masking: all rows with every weight.
Here a loop runs over spans, whose number of tiles only depends on shapes. A group's last span extends beyond the group, into
rows that the next group overwrites, or that are zeroed if they would be summed.

With `Recipe.exact_order` the spans of a sum can't be added to each other. One span then holds the whole group, and is less than
twice as long: `lax.switch` chooses among widths that double.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition import alignment
from blockfp.definition.recipe import Exact
from blockfp.kernels import exact_order

from ..arrays.array import QuantizedArray
from ..implementations import explicit
from ..params.params import shares_scale
from .products import Matrix, format_of, product
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
            rows = _side_by_side(x, span, tiles.spare, axis=0)
            each = product(rows, matrix, dtype, bias=own, fast=fast, exact=exact)
            return vary(lax.dynamic_update_slice_in_dim(y, each, span.first * tiles.rows, 0))

        return lax.fori_loop(0, -(-of_groups.own[group] // tiles.spare), of_span, y)

    y = jnp.zeros((x.shape[0] * tiles.rows, weight.shape[1]), dtype)
    return lax.fori_loop(0, tiles.sizes.shape[0], of_group, vary(y))


def by_columns(a: Matrix, b: Matrix, tiles: Tiles, dtype, *, fast: bool, exact: Exact) -> jax.Array:
    """Returns [groups, m, n]: sums over each group's tiles of a [tiles, m, rows] times b [tiles, n, rows], transposed."""
    vary = _varying(a, b, tiles)
    of_groups = _of_groups(tiles)
    ordered = "order" in exact
    if ordered:
        a, b = _aligned_in_order(a, b, exact)

    def multiplied(span: _Span, width: int, dtype) -> jax.Array:
        left = _side_by_side(a, span, width, axis=1, beyond=-0.0 if ordered else 0.0)
        return vary(product(left, _side_by_side(b, span, width, axis=1), dtype, fast=fast, exact=exact))

    def of_group(_, group):
        # Start with the first span (zeros if the group is empty), which saves an addition to zeros.
        total = multiplied(_span(of_groups, tiles, group, 0), tiles.spare, jnp.float32)
        count = -(-of_groups.own[group] // tiles.spare)

        def add(i, total):
            return total + multiplied(_span(of_groups, tiles, group, i), tiles.spare, jnp.float32)

        return None, lax.fori_loop(1, count, add, total).astype(dtype)

    def of_group_in_order(_, group):
        span, widths = _span(of_groups, tiles, group, 0), _widths(tiles)
        sums = [partial(multiplied, width=width, dtype=dtype) for width in widths]
        return None, lax.switch((span.own > jnp.array(widths[:-1], jnp.int32)).sum(), sums, span)

    return lax.scan(of_group_in_order if ordered else of_group, None, jnp.arange(tiles.sizes.shape[0]))[1]


def _widths(tiles: Tiles) -> list[int]:
    """Returns the numbers of tiles of spans, doubling up to those of the largest possible group."""
    most, widths = tiles.group.shape[0] - tiles.spare, [tiles.spare]
    while widths[-1] < most:
        widths.append(min(2 * widths[-1], most))
    return widths


def _aligned_in_order(a: Matrix, b: Matrix, exact: Exact) -> tuple[Matrix, Matrix]:
    """Aligns the tiles that a product with one order of sums would align; a tile holds whole units of 128."""
    chosen = exact_order.route_in_order(format_of(a), format_of(b), a.dtype.name, b.dtype.name, exact=exact)
    if chosen.mode != "aligned":
        return a, b

    def aligned(x: Matrix) -> QuantizedArray:
        assert isinstance(x, QuantizedArray)
        codes, scales, _ = alignment.align(x.codes, x.scales, x.format, columns=x.columns)
        return x.replace(codes=codes, scales=scales, format=alignment.aligned_format(x.format))

    return aligned(a), aligned(b)


def _varying(*operands: Any):
    """Returns a function that makes an array vary over the mesh axes of all these operands."""
    over = frozenset().union(*(explicit.varying(leaf) for leaf in jax.tree.leaves(operands)))
    return lambda x: explicit.vary(x, over)


def _of_groups(tiles: Tiles) -> _Span:
    """Returns all tiles of each group, [groups]."""
    own = tiles.filled // tiles.rows
    return _Span(jnp.cumsum(own) - own, own)


def _span(of_groups: _Span, tiles: Tiles, group: jax.Array, number: jax.Array | int) -> _Span:
    before = number * tiles.spare
    return _Span(of_groups.first[group] + before, of_groups.own[group] - before)


def _side_by_side(x: Matrix, span: _Span, width: int, axis: int, beyond: float = 0.0) -> Any:
    """Joins `width` tiles of a span to one matrix, along `axis`; zeroes other groups' tiles if their rows would be summed.

    These tiles' float32 scales become `beyond`. A product with one order multiplies their sums, +0, and adds that to the total:
    -0 leaves it as it is, and +0 would change one that is -0.
    """
    codes = x.codes if isinstance(x, QuantizedArray) else x
    # A wide span may reach beyond the last tile: it then begins before the group.
    start = jnp.minimum(span.first, codes.shape[0] - width)
    place = start + jnp.arange(width, dtype=jnp.int32)[:, None, None]
    kept = (place >= span.first) & (place < span.first + span.own)

    def taken(part: jax.Array, other: float = 0.0) -> jax.Array:
        some = lax.dynamic_slice_in_dim(part, start, width)
        return jnp.where(kept, some, jnp.asarray(other, part.dtype)) if axis else some

    def first(part: jax.Array) -> jax.Array:
        return jnp.where(span.own > 0, part[span.first], jnp.zeros((), part.dtype))

    def joined(part: jax.Array, other: float = 0.0) -> jax.Array:
        some = taken(part, other)
        return some.swapaxes(0, 1).reshape(some.shape[1], -1) if axis else some.reshape(-1, some.shape[-1])

    if not isinstance(x, QuantizedArray):
        return joined(x)
    scales, tensor_scale = x.scales, x.tensor_scale
    if not x.format.per_tensor:
        scales = joined(scales, beyond)
    else:
        # One scale for all groups, or one per group, equal in all of its tiles.
        scales = scales[0] if scales.shape[0] == 1 else first(scales)
    if tensor_scale is not None:
        tensor_scale = first(tensor_scale)
    columns = x.columns * (width if axis else 1)
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
