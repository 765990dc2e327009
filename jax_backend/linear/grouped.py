"""`grouped_linear`: a separate weight for each group of tokens (mixture of experts), with any number of tokens per group.

`tiles` makes the operands. FSDP axes may cut the weights' matrices, and another axis may divide the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp import recipes
from blockfp.definition.groups import UNIT
from blockfp.definition.rotation import GROUP
from blockfp.definition.rounding import COLUMNWISE, ROWWISE, Key
from blockfp.recipes import Cast, Recipe, RecipeName

from ..arrays.array import QuantizedArray
from ..implementations import explicit, ops
from .arguments import check_order, check_quantized_input, check_state, check_tensors, stored_weight
from .delayed import DelayedState, given_back
from .grouped_codes import GroupCodes, quantize_groups
from .grouped_products import all_at_once, multiply_columns, multiply_rows
from .grouped_spans import by_columns, by_rows
from .layer import Layer
from .layer_placement import LayerPlacement
from .layer_state import LayerState, takes_layer_state
from .operands import Operands
from .straight_through import DGRAD, FORWARD, WGRAD, Product, by_group, of_each_group, token_values
from .tiles import Scaling, Tiles, gather_rows, largest_amax, move_tiles, quantize_tiles, tile_rows, turn_tiles


@overload
def grouped_linear(
    x: jax.Array | QuantizedArray,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: None = None,
    data_axes: Sequence[str] = (),
    expert_axis: str | None = None,
) -> jax.Array: ...
@overload
def grouped_linear(
    x: jax.Array | QuantizedArray,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState,
    data_axes: Sequence[str] = (),
    expert_axis: str | None = None,
) -> tuple[jax.Array, DelayedState]: ...
@overload
def grouped_linear(
    x: jax.Array | QuantizedArray,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: None = None,
    state: LayerState,
    data_axes: Sequence[str] = (),
    expert_axis: str | None = None,
) -> tuple[jax.Array, LayerState]: ...
@takes_layer_state
def grouped_linear(
    x: jax.Array | QuantizedArray,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState | None = None,
    data_axes: Sequence[str] = (),
    expert_axis: str | None = None,
) -> Any:
    """Computes `linear` for consecutive groups of x's rows, each with its own weight.

    Each group is quantized as its own tensor: it has its own amaxes, and columnwise blocks begin at its first row. With delayed
    scaling all groups share one state, with the largest amax of any group.

    Products run like those of `linear`, for all groups at once (`grouped_products`) or in spans of rows (`grouped_spans`).

    Inside shard_map, a weight from `shard_params` whose matrices are cut over axes in `data_axes` (FSDP) is gathered as codes
    and scales; its gradient is summed over all `data_axes` and scattered in the same way. `expert_axis` divides the groups:
    each rank has whole matrices of some groups (spec P(expert_axis, ..)), and x holds their tokens. A further axis is tensor
    parallelism, as in `linear`: it cuts out (then y is cut) or in (then x must be cut, and y is summed), evenly and between
    blocks.

    Args:
        x: float32, float16 or bfloat16 [tokens, in], sorted by group; or quantized by `dispatch`: then these codes are
            multiplied, and wgrad's operand is quantized from their values.
        weight: [groups, out, in], quantized matrix by matrix (`quantize_params`), quantized as a whole with shared scales
            (`quantize`, PyTorch's `GroupedLinear`), or in high precision.
        group_sizes: int32 [groups], rows per group; their sum is at most tokens (checked unless traced). Rows beyond give
            zeros.
        bias: [groups, out], or None.
        recipe: a `Recipe` or its name.
        key, state: as for `linear`.
        data_axes: inside shard_map, the mesh axes that divide each group's tokens, in the mesh's order.
        expert_axis: inside shard_map, the mesh axis that divides the groups; not in `data_axes`.

    Returns:
        y [tokens, out] in x's dtype, or (y, state) if a state is given.

    Raises:
        TypeError, ValueError: as `linear`; group_sizes are not one integer per weight; a tensor-parallel axis cuts a weight
            unevenly or inside blocks; or an operand is cut over Explicit axes outside shard_map.
    """
    recipe = recipes.for_linear(recipe)
    check_tensors(x, weight, bias, grouped=True)
    check_state(recipe, state, key)
    if isinstance(x, QuantizedArray):
        check_quantized_input(x, recipe)
        x = x if x.carrier is None else x.with_carrier()
    placement = LayerPlacement.of(weight, data_axes, False)
    _check_axes(placement, expert_axis)
    _check_cut(placement, recipe)
    if recipe.exact_order:
        check_order(recipe, x, weight, placement)
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
        # In NumPy, because under a trace JAX traces sums even of concrete arrays.
        counts = np.asarray(given)
        if counts.min(initial=0) < 0 or counts.sum() > x.shape[0]:
            raise ValueError(f"group_sizes must be 0 or more, and in sum at most the {x.shape[0]} rows of x, got {counts}")
    if bias is not None and bias.shape != (groups, out):
        raise ValueError(f"bias must have shape {(groups, out)}, got {bias.shape}")
    explicit.check_not_cut("grouped_linear", x=x, weight=weight, bias=bias, group_sizes=group_sizes)
    weight, carrier = stored_weight(weight, recipe)
    words = None if key is None else jnp.asarray(ops.key_array(key))
    dtype, weight_dtype = np.dtype(x.dtype), np.dtype(weight.dtype)
    at_once = all_at_once(recipe, dtype, weight_dtype)
    tile = UNIT if at_once else tile_rows(recipe)
    layer = _GroupedLinear(recipe, placement, dtype, weight_dtype, dtype, expert_axis, tile, at_once)
    sizes = group_sizes.astype(jnp.int32)
    y, state_out = layer(x, weight, carrier, bias, sizes, words, None if state is None else state.shared())
    return y if state is None or state_out is None else (y, given_back(state_out, state))


@dataclass(frozen=True)
class _GroupedLinear(Layer):
    """A layer with one matrix per group.

    Attributes:
        expert_axis: the mesh axis that divides the groups, or None.
        tile: rows per tile.
        at_once: whether the CUDA library multiplies all groups at once (`grouped_products`).
    """

    expert_axis: str | None
    tile: int
    at_once: bool

    def _scaling(self, multiplier, tiles: Tiles, key: jax.Array | None = None, *, gradient: bool = False) -> Scaling:
        # Groups are numbered over all ranks, so dividing them doesn't change random bits.
        groups = tiles.sizes.shape[0]
        first = 0 if self.expert_axis is None else explicit.axis_index(self.expert_axis) * groups
        cut = self.placement.tensor if self.placement.kind == ("column" if gradient else "row") else None
        return Scaling(self.recipe.eps, multiplier, key, self.placement.coordinate(), first, cut)

    def tiles(self, x, sizes) -> Tiles:
        return Tiles.of(sizes, x.shape[0], self.tile)

    def input_operands(self, x, tiles, state, *, rowwise=True, columnwise=True) -> Operands:
        multiplier = None if state is None else self.multiplier(x, tiles, state.input_scale, "input")
        scaling = self._scaling(multiplier, tiles)
        casts = self.recipe.input, self.recipe.input_columnwise
        if not isinstance(x, QuantizedArray):
            return self._quantized(x, tiles, casts, scaling, rowwise, columnwise)
        x = x.without_carrier()
        if self.at_once:
            row = GroupCodes.of_rows(x, tiles) if rowwise else None
            return Operands(row, GroupCodes.turned(x, tiles, casts[1], scaling) if columnwise else None)
        row = move_tiles(x, tiles) if rowwise else None
        return Operands(row, turn_tiles(x, tiles, casts[1], scaling) if columnwise else None)

    def _quantized(self, x, tiles, casts: tuple[Cast, Cast], scaling, rowwise: bool, columnwise: bool) -> Operands:
        if self.at_once:
            return Operands(
                *quantize_groups(x, tiles, (casts[0] if rowwise else None, casts[1] if columnwise else None), scaling)
            )
        row = quantize_tiles(x, tiles, casts[0], scaling, ROWWISE) if rowwise else None
        return Operands(row, quantize_tiles(x, tiles, casts[1], scaling, COLUMNWISE) if columnwise else None)

    def gradient_operands(self, g, kept, *, rowwise, columnwise) -> Operands:
        multiplier = None if kept.state is None else self.multiplier(g, kept.tiles, kept.state.gradient_scale, "gradient")
        scaling = self._scaling(multiplier, kept.tiles, kept.key, gradient=True)
        casts = self.recipe.gradient, self.recipe.gradient_columnwise
        return self._quantized(g, kept.tiles, casts, scaling, rowwise, columnwise)

    def multiply_rows(self, operand: Any, weight: Any, tiles, dtype, *, bias=None, fast) -> jax.Array:
        exact = self.recipe.exactness
        if self.at_once:
            return multiply_rows(operand, weight, tiles, dtype, bias=bias, fast=fast, exact=exact)
        y = by_rows(operand, weight, tiles, dtype, bias=bias, fast=fast, exact=exact)
        return gather_rows(y, tiles.target)

    def multiply_rows_back(self, gradient: Any, weight: Any, tiles, *, fast) -> jax.Array:
        if not self.at_once or not isinstance(weight, QuantizedArray) or not weight.format.square:
            return super().multiply_rows_back(gradient, weight, tiles, fast=fast)
        exact = self.recipe.exactness
        return multiply_rows(gradient, weight, tiles, self.dtype, turned=True, fast=fast, exact=exact)

    def multiply_columns(self, gradient: Any, x: Any, tiles, *, fast) -> jax.Array:
        multiply = multiply_columns if self.at_once else by_columns
        return multiply(gradient, x, tiles, self.weight_dtype, fast=fast, exact=self.recipe.exactness)

    def bias_rows(self, bias, tiles) -> jax.Array:
        return jnp.where((tiles.target >= 0)[:, None], bias[tiles.group_of_token()], 0)

    def sum_rows(self, g, tiles) -> jax.Array:
        mine = jnp.where((tiles.target >= 0)[:, None], g.astype(jnp.float32), 0)
        return jax.ops.segment_sum(mine, tiles.group_of_token(), num_segments=tiles.sizes.shape[0])

    def shares_amax(self) -> tuple[str, ...]:
        return super().shares_amax() + (() if self.expert_axis is None else (self.expert_axis,))

    def largest_amax(self, x, tiles) -> jax.Array:
        return largest_amax(x, tiles)

    def values(self, operand, tiles, carrier, cast, *, transposed=False) -> jax.Array:
        operand = operand.tiles(tiles) if isinstance(operand, GroupCodes) else operand
        return token_values(operand, tiles, carrier, cast, transposed=transposed)

    def products(self, tiles) -> tuple[Product, Product, Product]:
        return by_group(FORWARD, tiles), by_group(DGRAD, tiles), of_each_group(WGRAD, tiles)


def _check_axes(placement: LayerPlacement, expert_axis: str | None) -> None:
    if expert_axis is None:
        return
    explicit.axis_index(expert_axis)
    if expert_axis in placement.data_axes:
        raise ValueError(
            f"expert_axis = {expert_axis!r} is one of data_axes = {placement.data_axes} too: a rank on it has groups "
            "that no other has, so it divides no group's tokens"
        )


def _check_cut(placement: LayerPlacement, recipe: Recipe) -> None:
    """Raises ValueError if tensor parallelism cuts features unevenly or inside blocks."""
    if placement.tensor is None or placement.weight is None:
        return
    column = placement.kind == "column"
    whole, ranks = placement.weight.shape[0 if column else 1], placement.weight.mesh.axis_size(placement.tensor)
    casts = (recipe.gradient, recipe.gradient_columnwise) if column else (recipe.input, recipe.input_columnwise)
    formats = [cast.format for cast in casts]
    lengths = [f.block[1 if f is formats[0] else 0] for f in formats if f is not None and f.block is not None]
    unit = int(np.lcm.reduce([GROUP, *lengths]))
    if whole % (ranks * unit):
        raise ValueError(
            f"{placement.tensor!r} cuts the {whole} features of {'out' if column else 'in'} over {ranks} ranks: tensor "
            f"parallelism inside a group wants a multiple of {ranks * unit}, so that it cuts between blocks of {unit}"
        )
