"""`grouped_linear`: a weight for each of several groups of tokens (mixture of experts), as many tokens each as it happens.

`tiles` makes the operands. The weights' matrices may be cut by FSDP's axes, and the groups divided over another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from blockfp import recipes
from blockfp.definition.rounding import COLUMNWISE, ROWWISE, Key
from blockfp.recipes import Recipe

from ..arrays.array import QuantizedArray
from ..implementations import ops, replication
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, either, linear_map
from .delayed import DelayedState
from .grouped_products import by_columns, by_rows
from .layer_placement import LayerPlacement
from .linear import across, check_state, check_tensors, stored_weight
from .products import Operand
from .straight_through import (
    DGRAD,
    FORWARD,
    WGRAD,
    Points,
    by_group,
    carriers_of,
    check_forward,
    check_second,
    of_each_group,
    same_values,
    tokens,
    total,
    values,
)
from .tiles import Scaling, Tiles, largest_amax, move, quantize_tiles, tile_rows


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | str,
    key: Key | None = None,
    state: DelayedState | None = None,
    data_axes: Sequence[str] = (),
    expert_axis: str | None = None,
) -> Any:
    """`linear` of group after group of x's rows, each with a weight of its own.

    Each group's rows are a tensor of their own: they have their own amaxes, and columnwise blocks begin at their first row.
    With delayed scaling all groups share one state, whose amaxes are the largest of any group's.

    Products run as those of `linear`, in spans of rows (`grouped_products`).

    Inside shard_map a weight of `shard_params` whose matrices are cut over axes among `data_axes` (FSDP) is gathered, codes
    and scales, and its gradient is summed over all of `data_axes` and scattered like it. `expert_axis` divides the groups:
    each rank has whole matrices of some (of the spec P(expert_axis, ..)), and x holds the tokens of these.

    Args:
        x: float32, float16 or bfloat16 [tokens, in], the rows of group 0 first, then those of group 1, ..
        weight: [groups, out, in], quantized matrix by matrix (`quantize_params`), or with scales that all groups share (as
            `quantize` of all of it gives, and PyTorch's `GroupedLinear` has); or in high precision.
        group_sizes: int32 [groups], rows of each; their sum is at most tokens (checked unless traced). Rows beyond give zeros.
        bias: [groups, out], or None.
        recipe: a `Recipe` or its name.
        key: as for `linear`.
        state: for recipes with delayed scaling, see `DelayedState`.
        data_axes: inside shard_map, the mesh axes that divide each group's tokens, in the mesh's order.
        expert_axis: inside shard_map, the mesh axis that divides the groups; none of `data_axes`.

    Returns:
        y [tokens, out] in x's dtype; (y, state) where a state is given.

    Raises:
        TypeError, ValueError: as `linear`; group_sizes that aren't one integer for each weight; a weight that a
            tensor-parallel axis cuts.
    """
    recipe = recipes.for_linear(recipe)
    check_tensors(x, weight, bias, grouped=True)
    check_state(recipe, state, key)
    placement = LayerPlacement.of(weight, data_axes, False)
    _check_axes(placement, expert_axis)
    out, features = placement.gathered_shape(weight)
    groups = weight.shape[0]
    given, group_sizes = group_sizes, jnp.asarray(group_sizes)
    if x.ndim != 2 or x.shape[1] != features:
        raise ValueError(
            f"x [tokens, in] and weight [groups, out, in] must share in, got {x.shape} and {(groups, out, features)}"
        )
    if group_sizes.shape != (groups,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be {groups} integers, got {group_sizes.dtype} {group_sizes.shape}")
    if not isinstance(given, Tracer):
        # In NumPy: under a trace JAX's own sums are traced, of concrete arrays too.
        counts = np.asarray(given)
        if counts.min(initial=0) < 0 or counts.sum() > x.shape[0]:
            raise ValueError(f"group_sizes must be 0 or more, and in sum at most the {x.shape[0]} rows of x, got {counts}")
    if bias is not None and bias.shape != (groups, out):
        raise ValueError(f"bias must have shape {(groups, out)}, got {bias.shape}")
    weight, carrier = stored_weight(weight, recipe)
    words = None if key is None else jnp.asarray(ops.key_array(key))
    how = _How(recipe, placement, expert_axis, np.dtype(x.dtype), np.dtype(weight.dtype), tile_rows(recipe))
    sizes = group_sizes.astype(jnp.int32)
    y, state_out = either(partial(_plain, how), partial(_differentiable, how), x, weight, carrier, bias, sizes, words, state)
    return y if state is None else (y, state_out)


@dataclass(frozen=True)
class _How:
    """What is static about a call."""

    recipe: Recipe
    placement: LayerPlacement
    expert_axis: str | None
    dtype: np.dtype
    weight_dtype: np.dtype
    tile: int

    def scaling(self, multiplier: jax.Array | None, groups: int, key: jax.Array | None = None) -> Scaling:
        """How an operand is quantized; `groups` are this rank's."""
        # Groups are numbered over all ranks, so that dividing them changes no random bit.
        first = 0 if self.expert_axis is None else replication.axis_index(self.expert_axis) * groups
        return Scaling(self.recipe.eps, multiplier, key, self.placement.coordinate(), first)

    def input_scaling(self, state: DelayedState | None, tiles: Tiles) -> Scaling:
        """How x is quantized."""
        return self.scaling(None if state is None else state.input_scale, tiles.sizes.shape[0])


def _check_axes(placement: LayerPlacement, expert_axis: str | None) -> None:
    if placement.tensor is not None:
        raise ValueError(
            f"the weight lies {placement.weight}, and {placement.tensor!r} is none of data_axes = "
            f"{placement.data_axes}: FSDP's axes alone "
            "cut the matrices of groups, and belong to data_axes; an axis of its own may divide the groups (expert_axis)"
        )
    if expert_axis is None:
        return
    replication.axis_index(expert_axis)
    if expert_axis in placement.data_axes:
        raise ValueError(
            f"expert_axis = {expert_axis!r} is one of data_axes = {placement.data_axes} too: a rank on it has groups "
            "that no other has, so it divides no group's tokens"
        )


class _Kept(NamedTuple):
    """What a forward keeps for derivatives: as `linear`'s does, and where rows go."""

    row: Operand | None
    column: Operand | None
    weight: Operand
    tiles: Tiles
    key: jax.Array | None
    state: DelayedState | None
    types: replication.Types


def _plain(how: _How, x, weight, carrier, bias, sizes, key, state):
    tiles = Tiles.of(sizes, x.shape[0], how.tile)
    row = quantize_tiles(x, tiles, how.recipe.input, how.input_scaling(state, tiles), ROWWISE)
    return _output(how, row, weight, bias, tiles), _seen(x, tiles, state)


def _output(how: _How, row: Operand, weight: Operand, bias, tiles: Tiles) -> jax.Array:
    y = by_rows(row, how.placement.gathered(weight), tiles, how.dtype, fast="forward" in how.recipe.fast_accum)
    y = move(y, tiles.target)
    if bias is not None:
        added = bias[tiles.group_of_token()]
        y = y + jnp.where((tiles.target >= 0)[:, None], added, 0).astype(y.dtype)
    return y


def _seen(x: jax.Array, tiles: Tiles, state: DelayedState | None) -> DelayedState | None:
    return None if state is None else state.after_forward(largest_amax(x, tiles))


def _differentiable(how: _How, x, weight, carrier, bias, sizes, key, state):
    carriers, types = carriers_of(Points(x, carrier, bias, state)), replication.Types.of(x, carrier, bias, state)
    x, weight, bias, state = lax.stop_gradient((x, weight, bias, state))
    tiles, column = Tiles.of(sizes, x.shape[0], how.tile), None
    scaling = how.input_scaling(state, tiles)
    if carriers.weight is not None:
        column = quantize_tiles(x, tiles, how.recipe.input_columnwise, scaling, COLUMNWISE)
    row = quantize_tiles(x, tiles, how.recipe.input, scaling, ROWWISE)
    results = _output(how, row, weight, bias, tiles), _seen(x, tiles, state)
    row = None if column is None or how.placement.weight is not None or same_values(how.recipe) else row
    kept = _Kept(row, column, weight, tiles, key, state, types)
    like = [jax.typeof(leaf) for leaf in jax.tree.leaves(results)]

    def rule(kept, carriers, tangents):
        return linear_map(partial(_forward, how, like[0]), partial(_backward, how), (kept, carriers), tangents, like)

    return attach(results, kept, carriers, rule)


def _forward(how: _How, like, known: tuple[_Kept, Points], tangents: Points) -> list[Any]:
    kept, carriers = known
    check_forward(how.placement)
    tiles = kept.tiles
    weight, x = values(kept.weight, carriers.weight), None
    if tangents.weight is not None:
        assert kept.column is not None
        cast, transposed = (how.recipe.input_columnwise, True) if kept.row is None else (how.recipe.input, False)
        x = tokens(kept.column if kept.row is None else kept.row, tiles, carriers.x, cast, transposed=transposed)
    forward = by_group(FORWARD, tiles)
    y = total((forward, tangents.x, weight), (forward, x, tangents.weight))
    y = jnp.zeros(like.shape, jnp.float32) if y is None else y
    if tangents.bias is not None:
        y = y + jnp.where((tiles.target >= 0)[:, None], tangents.bias[tiles.group_of_token()], 0).astype(y.dtype)
    return [y.astype(how.dtype), *jax.tree.leaves(jax.tree.map(jnp.zeros_like, kept.state))]


def _backward(how: _How, known: tuple[_Kept, Points], wanted: Points, cotangents) -> Points:
    kept, carriers = known
    g, *later = cotangents
    g_carrier = carrier_of(g) if isinstance(g, Tracer) else None
    kept, g = lax.stop_gradient((kept, g))
    recipe, placement, tiles, types, state = how.recipe, how.placement, kept.tiles, kept.types, kept.state
    scaling = how.scaling(None if state is None else state.gradient_scale, tiles.sizes.shape[0], kept.key)
    row = column = dx = dw = db = ds = None
    if wanted.x is not None:
        row = quantize_tiles(g, tiles, recipe.gradient, scaling, ROWWISE)
        weight = across(placement.gathered(kept.weight), recipe)
        dx = move(by_rows(row, weight, tiles, how.dtype, fast="dgrad" in recipe.fast_accum), tiles.target)
        dx = replication.sum_like(dx, types.x, ())
    if wanted.weight is not None:
        assert kept.column is not None
        column = quantize_tiles(g, tiles, recipe.gradient_columnwise, scaling, COLUMNWISE)
        dw = by_columns(column, kept.column, tiles, how.weight_dtype, fast="wgrad" in recipe.fast_accum)
        dw = _sum_weight(how, types, dw)
    if wanted.bias is not None:
        db = _sum_bias(how, kept, g, wanted.bias.dtype)
    if state is not None:
        ds = state.cotangent(wanted.state, lambda: largest_amax(g, tiles), later, types.state)
    made = Points(dx, dw, db, ds)
    types_made = jax.tree.map(jax.typeof, made)
    return attach(made, (row, column, kept), (carriers, g_carrier), partial(_second, how, types_made))


def _second(how: _How, made: Points, kept: tuple, carriers: tuple[Points, Any], tangents: tuple[Points, Any]) -> list[Any]:
    check_second(how.placement)
    recipe = how.recipe
    (row, column, forward), (points, g_carrier), (dots, g_dot) = kept, carriers, tangents
    tiles, types = forward.tiles, forward.types
    dx = dw = db = None
    if made.x is not None:
        weight = values(across(forward.weight, recipe), points.weight, transposed=True)
        g = tokens(row, tiles, g_carrier, recipe.gradient)
        dgrad = by_group(DGRAD, tiles)
        dx = total((dgrad, g_dot, weight), (dgrad, g, dots.weight))
        dx = None if dx is None else replication.sum_like(dx.astype(how.dtype), types.x, ())
    if made.weight is not None:
        x = tokens(forward.column, tiles, points.x, recipe.input_columnwise, transposed=True)
        g = tokens(column, tiles, g_carrier, recipe.gradient_columnwise, transposed=True)
        wgrad = of_each_group(WGRAD, tiles)
        dw = total((wgrad, g_dot, x), (wgrad, g, dots.x))
        dw = None if dw is None else _sum_weight(how, types, dw.astype(how.weight_dtype))
    if made.bias is not None and g_dot is not None:
        db = _sum_bias(how, forward, g_dot, made.bias.dtype)
    there = [dot for dot, result in ((dx, made.x), (dw, made.weight), (db, made.bias)) if result is not None]
    return [*there, *(None for _ in jax.tree.leaves(made.state))]


def _sum_weight(how: _How, types: replication.Types, dw: jax.Array) -> jax.Array:
    placement = how.placement
    rest = [name for name in placement.data_axes if name not in placement.fsdp]
    return replication.sum_like(placement.scatter_weight(dw, how.recipe.weight.format), types.carrier, rest)


def _sum_bias(how: _How, kept: _Kept, g: jax.Array, dtype) -> jax.Array:
    tiles = kept.tiles
    mine = jnp.where((tiles.target >= 0)[:, None], g.astype(jnp.float32), 0)
    db = jax.ops.segment_sum(mine, tiles.group_of_token(), num_segments=tiles.sizes.shape[0]).astype(dtype)
    return replication.sum_like(db, kept.types.bias, how.placement.data_axes)
