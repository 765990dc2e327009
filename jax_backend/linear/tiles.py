"""Operands of `grouped_linear`: rows of several groups, moved to tiles and quantized.

Each group's rows are quantized as their own tensor, with their own amax and keys, and columnwise blocks that begin at the first
row. Group sizes are only known at run time, so each group is moved to the start of a tile. No block spans two tiles, and every
tile is quantized with its group's amax and its offset in the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition import numerics
from blockfp.definition.bits import INFINITY
from blockfp.definition.groups import UNIT
from blockfp.definition.recoding import keeps_codes, value_dtype
from blockfp.definition.rotation import GROUP, rotate
from blockfp.definition.rounding import COLUMNWISE, gradient_key
from blockfp.definition.scaling import eps_for
from blockfp.formats import FP8_E4M3
from blockfp.recipes import Cast, Recipe

from ..arrays.array import QuantizedArray, wrap_parts
from ..implementations import explicit, ops
from ..implementations.xla import materialize
from . import operands


def tile_rows(recipe: Recipe) -> int:
    """Returns the rows per tile: a multiple of all units that must not span two tiles, and of those that sums with one order
    promote at once.

    Raises ValueError if the recipe has one scale per column of a group, because a tile has only part of a column.
    """
    units = [GROUP, UNIT if recipe.exact_order else 1]
    for cast in (recipe.input, recipe.gradient):
        units.append(cast.format.block[0] if cast.format and cast.format.block else 1)
    for name in ("input_columnwise", "gradient_columnwise"):
        cast = getattr(recipe, name)
        if cast.format and cast.format.per_row:
            raise ValueError(
                f"recipe {recipe}: {name} {cast} has a scale for each column of a group, whose rows are quantized in tiles: "
                f"use recipe.replace({name}=Cast(None)), or a format in blocks"
            )
        units.append(cast.format.block[1] if cast.format and cast.format.block else 1)
    return int(np.lcm.reduce(units))


_FEWEST = 512
"""Minimum number of rows that a product multiplies at once."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("source", "target", "group", "first", "sizes", "filled"),
    meta_fields=("rows", "spare"),
)
@dataclass(frozen=True)
class Tiles:
    """The assignment of rows to tiles.

    Attributes:
        source: int32 [tiles * rows], the row of x at each position, -1 for none.
        target: int32 [tokens], the position of each row of x, -1 for rows beyond all groups.
        group: int32 [tiles], the group of each tile.
        first: int32 [tiles], the tile's first row within its group.
        sizes: int32 [groups], rows per group.
        filled: int32 [groups], rows per group, padded to whole tiles.
        rows: rows per tile.
        spare: additional tiles at the end, so that a product can take this many tiles from any start.
    """

    source: jax.Array
    target: jax.Array
    group: jax.Array
    first: jax.Array
    sizes: jax.Array
    filled: jax.Array
    rows: int
    spare: int

    @classmethod
    def of(cls, sizes: jax.Array, tokens: int, rows: int) -> Tiles:
        """Assigns `tokens` rows in groups of these sizes to tiles of `rows` rows."""
        groups = sizes.shape[0]
        own = -(-tokens // rows) + groups
        # Half of an average group, to waste little work, but enough rows for full speed.
        spare = min(own, max(-(-own // (2 * groups)), -(-_FEWEST // rows)))
        count = own + spare
        filled = -(-sizes // rows) * rows
        ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(filled)
        starts, tile_starts = ends - sizes, tile_ends - filled
        place = jnp.arange(count * rows, dtype=jnp.int32)
        group = jnp.searchsorted(tile_ends, place, side="right").astype(jnp.int32)
        inside = jnp.minimum(group, groups - 1)
        local = place - tile_starts[inside]
        source = jnp.where((group < groups) & (local < sizes[inside]), starts[inside] + local, -1)
        token = jnp.arange(tokens, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
        within = jnp.minimum(owner, groups - 1)
        target = jnp.where(owner < groups, tile_starts[within] + token - starts[within], -1)
        return cls(source, target, inside[::rows], local[::rows], sizes, filled, rows, spare)

    def group_of_token(self) -> jax.Array:
        """Returns each row's group, int32 [tokens]; arbitrary for rows beyond all groups."""
        return self.group[jnp.maximum(self.target, 0) // self.rows]

    def split(self, x: jax.Array) -> jax.Array:
        """Splits x [tokens, size] into tiles [tiles, rows, size], padded with zeros."""
        return gather_rows(x, self.source).reshape(self.group.shape[0], -1, x.shape[1])

    def only(self, x: jax.Array, group: jax.Array | int) -> jax.Array:
        """Zeroes the rows of other groups in x [tokens, size]."""
        mine = (self.target >= 0) & (self.group_of_token() == group)
        return jnp.where(mine[:, None], x, 0)

    def rotated(self, rows: int) -> jax.Array:
        """Returns bool [tiles, 1, rows]: which columns of transposed tiles are rotated; a group's tail of fewer than 16
        is not."""
        end = (self.first[:, None] + jnp.arange(rows)[None] // GROUP * GROUP + GROUP)[:, None, :]
        return end <= self.sizes[self.group][:, None, None]

    def largest(self, x: jax.Array) -> jax.Array:
        """Returns the maximum of each group, [groups, ..], of integers [tiles, ..]; the smallest integer for a group without
        rows."""
        return jax.ops.segment_max(x, self.group, num_segments=self.sizes.shape[0], indices_are_sorted=True)


class Scaling(NamedTuple):
    """Options for quantizing tiles, except the format.

    Attributes:
        eps: see `numerics.quantize`.
        multiplier: delayed scaling's, shared by all groups; or None.
        key: the words from which the groups' keys are derived, or None.
        coordinate: this rank's position on the data-parallel axes, or None.
        first_group: number of the first local group among all ranks' groups.
        cut: the mesh axis that cuts the features, evenly and between blocks, or None.
    """

    eps: float
    multiplier: jax.Array | None = None
    key: jax.Array | None = None
    coordinate: jax.Array | None = None
    first_group: jax.Array | int = 0
    cut: str | None = None

    def key_of(self, group: jax.Array, direction: int) -> jax.Array:
        """Returns the key of a group's cast, [2]."""
        assert self.key is not None
        return jnp.asarray(gradient_key(self.key, direction, self.coordinate, self.first_group + group))

    def of_features(self, features: int) -> tuple[jax.Array | int, int]:
        """Returns (the number of the first local feature, the number of features on all ranks)."""
        if self.cut is None:
            return 0, features
        return explicit.axis_index(self.cut) * features, lax.axis_size(self.cut) * features


def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes rows of x by index, zeros for -1."""
    if x.shape[0] == 0:
        return jnp.zeros((index.shape[0], *x.shape[1:]), x.dtype)
    return jnp.where((index >= 0)[:, None], x[jnp.maximum(index, 0)], jnp.zeros((), x.dtype))


def largest_amax(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Returns float32 (): the largest amax of the groups of x [tokens, size]; a non-finite one counts as 0
    (`scaling.record`)."""
    # The amax is the same in every format.
    each = jax.vmap(lambda tile: numerics.amax(tile, FP8_E4M3).blocks.reshape(()))(tiles.split(x))
    of_groups = jnp.maximum(tiles.largest(each), 0)
    return jnp.max(jnp.where(of_groups >= INFINITY, 0, of_groups)).view(jnp.float32)


def quantize_tiles(x: jax.Array, tiles: Tiles, cast: Cast, scaling: Scaling, direction: int) -> Any:
    """Quantizes tiles of x [tokens, size] to [rows, size], or [size, rows] if `direction` is COLUMNWISE.

    A cast without format moves values only. A stochastic cast is a gradient's. `direction` is `rounding.ROWWISE` or
    `COLUMNWISE`.
    """
    x = tiles.split(x)
    q = _quantized(x, tiles, cast, scaling, direction)
    return q if cast.format is None else _showing_overflow(q, jnp.isfinite(x), tiles)


def move_tiles(x: QuantizedArray, tiles: Tiles) -> QuantizedArray:
    """Moves quantized rows [tokens, size] to tiles [tiles, rows, size]."""
    codes = tiles.split(x.codes)
    if x.format.per_tensor:
        return x.replace(codes=codes, scales=x.scales[None])
    q = x.replace(codes=codes, scales=tiles.split(x.scales))
    if x.tensor_scale is not None:
        return q.replace(tensor_scale=jnp.broadcast_to(x.tensor_scale, codes.shape[:1]))
    return _showing_overflow(q, jnp.isfinite(q.dequantize()), tiles)


def turn_tiles(x: QuantizedArray, tiles: Tiles, cast: Cast, scaling: Scaling) -> Any:
    """Quantizes the columnwise form of quantized rows (`blockfp.definition.recoding`), [tiles, size, rows]."""
    if cast.format is not None and keeps_codes(x.format, cast.format, cast.rotate):
        codes = tiles.split(x.codes).swapaxes(1, 2)
        return x.replace(codes=codes, scales=x.scales[None], columns=codes.shape[-1])
    return quantize_tiles(x.dequantize(value_dtype(x.dtype.name)), tiles, cast, scaling, COLUMNWISE)


def _showing_overflow(q: QuantizedArray, finite: jax.Array, tiles: Tiles) -> QuantizedArray:
    """Makes all tiles of a group NaN if any element isn't `finite`, bool [tiles, .., ..]."""
    of_tiles = finite.all(axis=(1, 2)).astype(jnp.int32)
    of_groups = jax.ops.segment_min(of_tiles, tiles.group, num_segments=tiles.sizes.shape[0], indices_are_sorted=True)
    return operands.propagate(q, of_groups[tiles.group] == 1)


def _quantized(x: jax.Array, tiles: Tiles, cast: Cast, scaling: Scaling, direction: int) -> Any:
    columnwise, format = direction == COLUMNWISE, cast.format
    rows = x.shape[1]
    if columnwise and not (cast.rotate or cast.stochastic or format is None or format.has_tensor_scale):
        # Kernels read tiles without transposing them.
        eps = eps_for(format, scaling.eps)
        return wrap_parts(ops.quantize_columnwise(x, format=format, eps=eps), format, x, columnwise=True)
    x = x.mT if columnwise else x
    if cast.rotate:
        x = jnp.where(tiles.rotated(rows), rotate(x), x)
    if format is None:
        return x
    multiplier = scaling.multiplier
    eps = eps_for(format, scaling.eps)
    key = scaling.key if cast.stochastic else None
    if multiplier is not None:
        # All tiles share the scale.
        parts = ops.quantize(x.reshape(-1, x.shape[-1]), None, multiplier, format=format)
        return wrap_parts(parts._replace(codes=parts.codes.reshape(x.shape), scales=parts.scales[None]), format, x)
    if key is None and not format.has_tensor_scale:
        return wrap_parts(ops.quantize(x, format=format, eps=eps), format, x)
    amax = jax.vmap(lambda tile: numerics.amax(tile, format))(x)
    if format.has_tensor_scale:
        field = "tensor" if format.scale.two_level else "blocks"
        largest = tiles.largest(getattr(amax, field))
        largest = largest if scaling.cut is None else explicit.max_over(largest, (scaling.cut,))
        # Empty groups have no tile; their amax is unused.
        amax = amax._replace(**{field: largest[tiles.group]})

    def one(tile, amax, group, first):
        place: dict[str, Any] = {}
        if key is not None:
            begin, features = scaling.of_features(tile.shape[0 if columnwise else 1])
            place = {"key": scaling.key_of(group, direction), "origin": (begin, first) if columnwise else (first, begin)}
            place["shape"] = (features, tiles.sizes[group]) if columnwise else (tiles.sizes[group], features)
        return numerics.quantize(tile, format, eps=eps, amax=amax, materialize=materialize, **place)

    return wrap_parts(jax.vmap(one)(x, amax, tiles.group, tiles.first), format, x)
