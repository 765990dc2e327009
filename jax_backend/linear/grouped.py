"""`grouped_linear`: a weight for each of several groups of tokens (mixture of experts), as many tokens each as it happens.

`tiles` makes the operands. The weights' matrices may be cut by FSDP's axes, and the groups divided over another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp import recipes
from blockfp.recipes import Recipe
from blockfp.rounding import COLUMNWISE, ROWWISE, Key

from ..arrays.array import QuantizedArray
from ..implementations import ops, replication
from .delayed import DelayedState
from .grouped_products import by_columns, by_rows
from .layer_placement import LayerPlacement
from .linear import across, check_state, check_tensors, passing_overflow, stored_weight
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
    y, state_out = cast(Any, _grouped(how, x, weight, carrier, bias, group_sizes.astype(jnp.int32), words, state))
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(how: _How, x, weight, carrier, bias, sizes, key, state):
    tiles = Tiles.of(sizes, x.shape[0], how.tile)
    scaling = how.scaling(None if state is None else state.input_scale, sizes.shape[0])
    row = quantize_tiles(x, tiles, how.recipe.input, scaling, ROWWISE)
    y = by_rows(row, how.placement.gathered(weight), tiles, how.dtype, fast="forward" in how.recipe.fast_accum)
    y = move(y, tiles.target)
    if bias is not None:
        added = bias[tiles.group_of_token()]
        y = y + jnp.where((tiles.target >= 0)[:, None], added, 0).astype(y.dtype)
    return y, None if state is None else state.after_forward(largest_amax(x, tiles))


def _forward(how: _How, x, weight, carrier, bias, sizes, key, state):
    tiles = Tiles.of(sizes, x.shape[0], how.tile)
    scaling = how.scaling(None if state is None else state.input_scale, sizes.shape[0])
    column = quantize_tiles(x, tiles, how.recipe.input_columnwise, scaling, COLUMNWISE)
    out = _grouped(how, x, weight, carrier, bias, sizes, key, state)
    types = replication.Types.of(x, carrier, bias, state)
    return out, (column, weight, None if bias is None else bias[:0], tiles, key, state, types)


def _backward(how: _How, kept, cotangents):
    column, weight, bias, tiles, key, state, types = kept
    g, later = cotangents
    recipe, placement = how.recipe, how.placement
    groups = tiles.sizes.shape[0]
    scaling = how.scaling(None if state is None else state.gradient_scale, groups, key)
    row = quantize_tiles(g, tiles, recipe.gradient, scaling, ROWWISE)
    dx = by_rows(row, across(placement.gathered(weight), recipe), tiles, how.dtype, fast="dgrad" in recipe.fast_accum)
    dx = move(dx, tiles.target)
    dx = replication.sum_like(passing_overflow(dx, g), types.x, ())
    dw = db = ds = None
    if types.carrier is not None:
        gradient = quantize_tiles(g, tiles, recipe.gradient_columnwise, scaling, COLUMNWISE)
        dw = by_columns(gradient, column, tiles, how.weight_dtype, fast="wgrad" in recipe.fast_accum)
        dw = passing_overflow(dw, g)
        rest = [name for name in placement.data_axes if name not in placement.fsdp]
        dw = replication.sum_like(placement.scatter_weight(dw, recipe.weight.format), types.carrier, rest)
    if bias is not None:
        mine = jnp.where((tiles.target >= 0)[:, None], g.astype(jnp.float32), 0)
        db = jax.ops.segment_sum(mine, tiles.group_of_token(), num_segments=groups).astype(bias.dtype)
        db = replication.sum_like(db, types.bias, placement.data_axes)
    if state is not None:
        ds = state.after_backward(largest_amax(g, tiles), later, types.state)
    return dx, None, dw, db, None, None, ds


_grouped.defvjp(_forward, _backward)
