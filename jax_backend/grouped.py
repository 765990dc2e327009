"""`grouped_linear`: a weight for each of several groups of tokens (mixture of experts), as many tokens each as it happens.

Each group's rows are a tensor of their own: with its own amax, columnwise blocks that begin at its first row, and its own
keys. How many rows a group has is known only at run time, so the rows are moved apart, each group to the beginning of a tile;
no block lies in two tiles, and every tile is quantized with its group's amax and its place in the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp import numerics, recipes
from blockfp.products import exact_in_bfloat16, has_tensor_scale
from blockfp.recipes import Cast, Recipe
from blockfp.rotation import GROUP, rotate
from blockfp.rounding import COLUMNWISE, ROWWISE, Key, gradient_key

from . import implementations, ops
from .array import QuantizedArray, of_parts
from .linear import passing_overflow
from .operands import eps_for
from .params import dequantize_params, quantize_weight
from .settling import settle


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | str,
    key: Key | None = None,
) -> jax.Array:
    """`linear` of group after group of x's rows, each with a weight of its own.

    Products run on dequantized operands through `lax.ragged_dot`, which has no mode for codes.

    Args:
        x: float32, float16 or bfloat16 [tokens, in], the rows of group 0 first, then those of group 1, ..
        weight: [groups, out, in], quantized matrix by matrix (`quantize_params`), or in high precision.
        group_sizes: int32 [groups], rows of each; their sum is at most tokens. Rows beyond give zeros.
        bias: [groups, out], or None.
        recipe: a `Recipe` or its name; not one with delayed scaling.
        key: as for `linear`.

    Raises:
        TypeError, ValueError: as `linear`; group_sizes that aren't one integer for each weight.
    """
    recipe = recipes.parse(recipe)
    if recipe.delayed is not None:
        raise ValueError(f"recipe {recipe}: groups have no state for delayed scaling; fp8_current scales by the current amax")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x [tokens, in] and weight [groups, out, in] must share in, got {x.shape} and {weight.shape}")
    groups, out, _ = weight.shape
    group_sizes = jnp.asarray(group_sizes)
    if group_sizes.shape != (groups,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be {groups} integers, got {group_sizes.dtype} {group_sizes.shape}")
    if bias is not None and bias.shape != (groups, out):
        raise ValueError(f"bias must have shape {(groups, out)}, got {bias.shape}")
    if key is None and (recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic):
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass a key, another one for each layer and step")
    weight, carrier = _stored(weight, recipe)
    words = None if key is None else jnp.asarray(ops.key_array(key))
    how = _How(recipe, np.dtype(x.dtype), np.dtype(weight.dtype), _tile_rows(recipe))
    return _grouped(how, x, weight, carrier, bias, group_sizes.astype(jnp.int32), words)


@dataclass(frozen=True)
class _How:
    recipe: Recipe
    dtype: np.dtype
    weight_dtype: np.dtype
    tile: int


def _stored(weight, recipe: Recipe) -> tuple[Any, jax.Array | None]:
    format = recipe.weight.format
    if isinstance(weight, QuantizedArray):
        if weight.format is not format or weight.sharding is not None:
            raise ValueError(
                f"weight must be whole and in {format or 'high precision'}, as recipe {recipe} wants it, got {weight!r}"
            )
        return weight.replace(tangent=None), weight.carrier
    stopped = lax.stop_gradient(jnp.asarray(weight))
    return (stopped if format is None else quantize_weight(stopped, format, recipe.eps)), weight


def _tile_rows(recipe: Recipe) -> int:
    """Rows of a tile: a multiple of whatever must not lie in two of them."""
    units = [GROUP]
    for cast in (recipe.input, recipe.gradient):
        units.append(cast.format.block[0] if cast.format and cast.format.block else 1)
    for cast in (recipe.input_columnwise, recipe.gradient_columnwise):
        units.append(cast.format.block[1] if cast.format and cast.format.block else 1)
    return int(np.lcm.reduce(units))


class _Tiles(NamedTuple):
    """Where rows go.

    Attributes:
        source: int32 [tiles * rows], the row of x that each row is, -1 for none.
        target: int32 [tokens], the row that each row of x is, -1 for one beyond all groups.
        group: int32 [tiles], the group of each tile.
        first: int32 [tiles], the tile's first row, counted in its group.
        sizes: int32 [groups], rows of each group.
        filled: int32 [groups], rows of each group's tiles.
    """

    source: jax.Array
    target: jax.Array
    group: jax.Array
    first: jax.Array
    sizes: jax.Array
    filled: jax.Array


def _tiles(sizes: jax.Array, tokens: int, rows: int) -> _Tiles:
    groups = sizes.shape[0]
    count = -(-tokens // rows) + groups
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
    return _Tiles(source, target, inside[::rows], local[::rows], sizes, filled)


def _move(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x by index, zeros for -1."""
    return jnp.where((index >= 0)[:, None], x[jnp.maximum(index, 0)], jnp.zeros((), x.dtype))


def _quantized(x, tiles: _Tiles, cast: Cast, eps: float, *, columnwise: bool, key=None) -> Any:
    """Tiles of x [tokens, size] as codes and scales (or as values), each [rows, size], or [size, rows] columnwise."""
    count = tiles.group.shape[0]
    x = _move(x, tiles.source).reshape(count, -1, x.shape[1])
    rows = x.shape[1]
    x = x.mT if columnwise else x
    if cast.rotate:
        # A group's last columns, if fewer than 16, stay as they are.
        end = (tiles.first[:, None] + jnp.arange(rows) // GROUP * GROUP + GROUP)[:, None, :]
        x = jnp.where(end <= tiles.sizes[tiles.group][:, None, None], rotate(x), x)
    format = cast.format
    if format is None:
        return x
    eps = eps_for(format, eps)
    if key is None and not has_tensor_scale(format):
        choice = implementations.choose(None, "quantize", format, eps=eps)
        return of_parts(ops.quantize(x, None, format=format, choice=choice, eps=eps), format, x)
    amax = jax.vmap(lambda tile: numerics.amax(tile, format))(x)
    if has_tensor_scale(format):
        field = "tensor" if format.scale.two_level else "blocks"
        own = getattr(amax, field)
        # Empty groups have no tile, and nobody asks for theirs.
        largest = jax.ops.segment_max(own, tiles.group, num_segments=tiles.sizes.shape[0], indices_are_sorted=True)
        amax = amax._replace(**{field: largest[tiles.group]})
    keys = None if key is None else jax.vmap(lambda group: _group_key(key, group))(tiles.group)

    def one(tile, amax, key, first, size):
        place: dict[str, Any] = {}
        if key is not None:
            place = {"origin": (0, first), "shape": (tile.shape[0], size)} if columnwise else {"origin": (first, 0)}
        return numerics.quantize(tile, format, key=key, eps=eps, amax=amax, settle=settle, **place)

    return of_parts(jax.vmap(one)(x, amax, keys, tiles.first, tiles.sizes[tiles.group]), format, x)


def _group_key(key: tuple[jax.Array, int], group: jax.Array) -> jax.Array:
    words, direction = key
    return jnp.asarray(gradient_key(words, direction, group=group))


def _dtype_of(*operands) -> str:
    """What a product's operands are dequantized to: a dtype that holds all their values."""
    if not implementations._has_gpu():
        return "float32"
    exact = all(
        exact_in_bfloat16(x.format) and not has_tensor_scale(x.format)
        if isinstance(x, QuantizedArray)
        else x.dtype == jnp.bfloat16
        for x in operands
    )
    return "bfloat16" if exact else "float32"


def _values(x, dtype: str) -> jax.Array:
    return dequantize_params(x, dtype) if isinstance(x, QuantizedArray) else x.astype(dtype)


def _rows(x: jax.Array) -> jax.Array:
    """Tiles [count, rows, size] one below the other."""
    return x.reshape(-1, x.shape[-1])


def _ragged(x, weight, tiles: _Tiles, dtype, *, across: bool) -> jax.Array:
    """x @ w^T (x @ w, `across`) of each tile with its group's weight, then each token's row."""
    working = _dtype_of(x, weight)
    precision = lax.Precision.HIGHEST if working == "float32" else None
    w = _values(weight, working)
    y = lax.ragged_dot(
        _rows(_values(x, working)),
        w if across else w.mT,
        tiles.filled,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return _move(y.astype(dtype), tiles.target)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(how: _How, x, weight, carrier, bias, sizes, key):
    tiles = _tiles(sizes, x.shape[0], how.tile)
    row = _quantized(x, tiles, how.recipe.input, how.recipe.eps, columnwise=False)
    y = _ragged(row, weight, tiles, how.dtype, across=False)
    if bias is not None:
        y = y + jnp.where((tiles.target >= 0)[:, None], bias[_group_of_token(tiles, how)], 0).astype(y.dtype)
    return y


def _group_of_token(tiles: _Tiles, how: _How) -> jax.Array:
    return tiles.group[jnp.maximum(tiles.target, 0) // how.tile]


def _forward(how: _How, x, weight, carrier, bias, sizes, key):
    tiles = _tiles(sizes, x.shape[0], how.tile)
    column = _quantized(x, tiles, how.recipe.input_columnwise, how.recipe.eps, columnwise=True)
    y = _grouped(how, x, weight, carrier, bias, sizes, key)
    return y, (column, weight, None if bias is None else bias[:0], tiles, key, None if carrier is None else carrier[:0])


def _backward(how: _How, kept, g):
    column, weight, bias, tiles, key, carrier = kept
    recipe = how.recipe

    def quantized(cast: Cast, direction: int):
        own = (key, direction) if cast.stochastic else None
        return _quantized(g, tiles, cast, recipe.eps, columnwise=direction == COLUMNWISE, key=own)

    dx = passing_overflow(_ragged(quantized(recipe.gradient, ROWWISE), weight, tiles, how.dtype, across=True), g)
    dw = db = None
    if carrier is not None:
        operands = quantized(recipe.gradient_columnwise, COLUMNWISE), column
        working = _dtype_of(*operands)
        # [tiles, size, rows] to [tiles * rows, size].
        a, b = (_rows(_values(operand, working).mT) for operand in operands)
        dimensions = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        precision = lax.Precision.HIGHEST if working == "float32" else None
        dw = lax.ragged_dot_general(a, b, tiles.filled, dimensions, precision=precision, preferred_element_type=jnp.float32)
        dw = passing_overflow(dw.astype(how.weight_dtype), g)
    if bias is not None:
        mine = jnp.where((tiles.target >= 0)[:, None], g.astype(jnp.float32), 0)
        groups = tiles.sizes.shape[0]
        db = jax.ops.segment_sum(mine, _group_of_token(tiles, how), num_segments=groups).astype(bias.dtype)
    return dx, None, dw, db, None, None


_grouped.defvjp(_forward, _backward)
