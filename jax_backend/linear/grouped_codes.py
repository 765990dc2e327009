"""Codes and scales of groups of rows as the CUDA library quantizes and multiplies them: one call for all groups, no host.

They lie as `blockfp.definition.groups` says. Tiles of 128 rows, side by side, are the same columns. So what stands in on other
devices goes through tiles, and so do derivatives of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition.groups import UNIT, columns_for
from blockfp.definition.recoding import keeps_codes, value_dtype
from blockfp.definition.rounding import COLUMNWISE, ROWWISE
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.products import HOPPER
from blockfp.kernels.routes import route
from blockfp.recipes import Cast, Recipe

from ..arrays.array import QuantizedArray
from ..implementations import choice, cuda, replication
from .grouped_products import by_columns, by_rows
from .products import capability
from .tiles import Scaling, Tiles, gather_rows, quantize_tiles, turn_tiles


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("format", "dtype", "columnwise"),
)
@dataclass(frozen=True)
class GroupCodes:
    """Rows of groups in FP8, quantized along the rows or along the columns.

    Attributes:
        codes: uint8 [tokens, features]; columnwise [features, columns], each group's filled up with zeros to `UNIT`.
        scales: float32 [groups], one for each; of blocks of 1x128 [features / 128, tokens], columnwise [columns / 128,
            features], the last axis filled up to a multiple of four.
        format: the format.
        dtype: of the rows that were quantized.
        columnwise: True for codes along the columns.
    """

    codes: jax.Array
    scales: jax.Array
    format: Format
    dtype: np.dtype
    columnwise: bool

    @classmethod
    def of_tiles(cls, q: QuantizedArray, tiles: Tiles, *, columnwise: bool) -> GroupCodes:
        """Lays out what `quantize_tiles` made of tiles of `UNIT` rows."""
        count = columns_for(tiles.target.shape[0], tiles.sizes.shape[0]) // UNIT
        if columnwise:
            codes = q.codes[:count].swapaxes(0, 1).reshape(q.shape[1], -1)
        else:
            codes = gather_rows(q.codes.reshape(-1, q.shape[2]), tiles.target)
        if q.format.per_tensor:
            # An empty group has no tile, and nobody asks for its scale.
            first = (jnp.cumsum(tiles.filled) - tiles.filled) // UNIT
            scales = jnp.broadcast_to(q.scales, (tiles.group.shape[0], 1, 1))[first].reshape(-1)
        elif columnwise:
            scales = _in_fours(q.scales[:count, :, 0])
        else:
            scales = _in_fours(gather_rows(q.scales.reshape(-1, q.scales.shape[-1]), tiles.target).T)
        return cls(codes, scales, q.format, q.dtype, columnwise)

    @classmethod
    def of_rows(cls, q: QuantizedArray, tiles: Tiles) -> GroupCodes:
        """Lays out rows that are quantized already, [tokens, features]; groups with a NaN scale have no other."""
        if q.format.per_tensor:
            scales = jnp.broadcast_to(q.scales.reshape(1), tiles.sizes.shape)
            return cls(q.codes, scales, q.format, q.dtype, False)
        finite = jnp.isfinite(q.scales).all(axis=1).astype(jnp.int32)
        group, groups = tiles.group_of_token(), tiles.sizes.shape[0]
        of_groups = jax.ops.segment_min(jnp.where(tiles.target >= 0, finite, 1), group, num_segments=groups)
        scales = jnp.where((of_groups[group] == 1)[:, None], q.scales, jnp.nan)
        return cls(q.codes, _in_fours(scales.T), q.format, q.dtype, False)

    @classmethod
    def turned(cls, q: QuantizedArray, tiles: Tiles, cast: Cast, scaling: Scaling) -> GroupCodes | None:
        """Makes the columnwise form of such rows (`blockfp.definition.recoding`)."""
        if cast.format is not None and keeps_codes(q.format, cast.format, cast.rotate):
            return cls.of_tiles(turn_tiles(q, tiles, cast, scaling), tiles, columnwise=True)
        values = q.dequantize(value_dtype(q.dtype.name))
        return quantize_groups(values, tiles, cast, scaling, rows=False, columns=True)[1]

    def tiles(self, tiles: Tiles) -> QuantizedArray:
        """Undoes `of_tiles`."""
        count = tiles.group.shape[0]
        if self.columnwise:
            codes = _filled(self.codes.reshape(self.codes.shape[0], -1, UNIT).swapaxes(0, 1), count)
        else:
            codes = tiles.split(self.codes)
        if self.format.per_tensor:
            scales = self.scales[tiles.group][:, None, None]
        elif self.columnwise:
            scales = _filled(self.scales[:, : self.codes.shape[0], None], count)
        else:
            scales = tiles.split(self.scales[:, : self.codes.shape[0]].T)
        return QuantizedArray(codes, scales, None, self.format, codes.shape[-1], self.dtype)


def _in_fours(scales: jax.Array) -> jax.Array:
    return jnp.pad(scales, ((0, 0), (0, -scales.shape[1] % 4)))


def _filled(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, max(count - x.shape[0], 0)), (0, 0), (0, 0)))[:count]


def kernels_do(recipe: Recipe) -> bool:
    """Returns True where the CUDA library quantizes and multiplies all groups at once, in all three products of a recipe."""
    if not choice.has_gpu() or choice.would_be_partitioned() or choice.missing("ffi") is not None or capability() != HOPPER:
        return False
    casts = (recipe.input, recipe.input_columnwise, recipe.gradient, recipe.gradient_columnwise)
    x, x_columns, g, g_columns = (cast.format for cast in casts)
    whole_rows = all(format is None or format.block in (None, (1, 128)) for format in (x, g))
    if x is not x_columns or g is not g_columns or not whole_rows or any(cast.rotate or cast.stochastic for cast in casts):
        return False
    if any(format is not None and format.per_row for format in (recipe.weight.format, recipe.weight_columnwise.format)):
        return False
    products = ((x, recipe.weight.format), (g, recipe.weight_columnwise.format), (g, x))
    if any(a is not None and b is not None and a.per_tensor != b.per_tensor for a, b in products):
        # A scale for each group and one for each block don't go together.
        return False
    return all(route(*formats, platform="cuda", capability=HOPPER).mode in ("tensor", "block") for formats in products)


def quantize_groups(
    x: jax.Array, tiles: Tiles, cast: Cast, scaling: Scaling, *, rows: bool, columns: bool
) -> tuple[GroupCodes | None, GroupCodes | None]:
    """Quantizes groups of rows x [tokens, size] along the rows and the columns; None for what isn't asked for."""
    format, multiplier = cast.format, scaling.multiplier
    assert format is not None
    directions = [columnwise for columnwise, wanted in ((False, rows), (True, columns)) if wanted]
    if not directions:
        return None, None

    def kernel(x, tiles, multiplier):
        words = cuda.group_rows(jnp.cumsum(tiles.sizes), x.shape[0])
        options = {"format": format, "count": tiles.sizes.shape[0], "eps": eps_for(format, scaling.eps)}
        made = cuda.quantize_groups(x, words, multiplier, rows=rows, columns=columns, **options)
        return [made[columnwise] for columnwise in directions]

    def definition(x, tiles, multiplier):
        one = scaling._replace(multiplier=multiplier)
        made = []
        for columnwise in directions:
            q = quantize_tiles(x, tiles, cast, one, COLUMNWISE if columnwise else ROWWISE)
            laid = GroupCodes.of_tiles(q, tiles, columnwise=columnwise)
            made.append([laid.codes, laid.scales])
        return made

    made = _on_device(kernel, definition, x, tiles, multiplier)
    found = {
        columnwise: GroupCodes(codes, scales, format, np.dtype(x.dtype), columnwise)
        for columnwise, (codes, scales) in zip(directions, made, strict=True)
    }
    return found.get(False), found.get(True)


def multiply_rows(x: GroupCodes, weight: QuantizedArray, tiles: Tiles, dtype, *, fast: bool) -> jax.Array:
    """[tokens, n]: rows times their group's matrix of weight [groups, n, k], transposed; zeros for rows beyond all groups."""

    def kernel(x, weight, tiles):
        scales = weight.scales.reshape(-1) if weight.format.per_tensor else weight.scales
        formats = x.format, weight.format
        ends, options = jnp.cumsum(tiles.sizes), {"capability": capability(), "fast": fast}
        y = cuda.multiply_groups((x.codes, x.scales), (weight.codes, scales), formats, ends, dtype, **options)
        return jnp.where((jnp.arange(y.shape[0]) < ends[-1])[:, None], y, jnp.zeros((), y.dtype))

    def definition(x, weight, tiles):
        return gather_rows(by_rows(x.tiles(tiles), weight, tiles, dtype, fast=fast, exact=True), tiles.target)

    return _on_device(kernel, definition, x, weight, tiles)


def multiply_columns(a: GroupCodes, b: GroupCodes, tiles: Tiles, dtype, *, fast: bool) -> jax.Array:
    """[groups, m, n]: the products of each group's columns of a [m, columns] and b [n, columns], transposed."""

    def kernel(a, b, tiles):
        # Of an empty group they may be anything, and a sum of nothing is multiplied with them.
        filled = tiles.sizes > 0
        left, right = ((x.codes, jnp.where(filled, x.scales, 1) if x.format.per_tensor else x.scales) for x in (a, b))
        formats = a.format, b.format
        options = {"capability": capability(), "along_k": True, "fast": fast}
        return cuda.multiply_groups(left, right, formats, jnp.cumsum(tiles.sizes), dtype, **options)

    def definition(a, b, tiles):
        return by_columns(a.tiles(tiles), b.tiles(tiles), tiles, dtype, fast=fast, exact=True)

    return _on_device(kernel, definition, a, b, tiles)


def _on_device(kernel: Callable[..., Any], definition: Callable[..., Any], *operands: Any) -> Any:
    """Runs the kernel on CUDA devices and the definition elsewhere; what they give varies as the operands do."""
    over = frozenset().union(*(replication.varying(leaf) for leaf in jax.tree.leaves(operands)))

    def varying(run):
        return lambda *operands: jax.tree.map(lambda part: replication.vary(part, over), run(*operands))

    return lax.platform_dependent(*operands, cuda=varying(kernel), default=varying(definition))
