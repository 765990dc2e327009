"""A quantized layer and its derivatives, with one matrix (`linear`) or one per group of tokens (`grouped_linear`).

A `Layer` defines how operands are made and multiplied. The rules here are common to both: the forward and its tangents, the
gradients and their tangents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from blockfp.definition import scaling
from blockfp.recipes import Cast, Operand, Recipe

from ..arrays.array import QuantizedArray
from ..arrays.reducing import sum_of_pieces
from ..implementations import explicit
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, either, linear_map
from ..implementations.jax_internals import evaluating, runs_at_once, without_tangents
from .arguments import transposed_weight
from .delayed import DelayedState, cotangent
from .layer_placement import LayerPlacement
from .operands import Operands
from .products import Matrix, Side, computed_once
from .prologue import values_of
from .straight_through import (
    LayerInputs,
    Product,
    carriers_of,
    check_forward,
    check_second,
    same_values,
    sum_of_products,
    values,
)


@dataclass(frozen=True)
class Layer(ABC):
    """The static part of a call: how operands are made and multiplied.

    Attributes:
        recipe: the recipe.
        placement: placement of the layer inside shard_map.
        dtype: dtype of x and its gradient.
        weight_dtype: dtype of the weight's gradient.
        result: dtype of y.
    """

    recipe: Recipe
    placement: LayerPlacement
    dtype: np.dtype
    weight_dtype: np.dtype
    result: np.dtype

    def __call__(self, x, weight, carrier, bias, sizes, key, state) -> tuple[jax.Array, DelayedState | None]:
        """Computes (y, state after the forward) with derivatives; `carrier` carries the weight's."""
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((x, weight, carrier, bias, sizes, key, state)))
        if traced and runs_at_once():
            return _differentiable(self, x, weight, carrier, bias, sizes, key, state)
        return either(_plain, _differentiable, self, x, weight, carrier, bias, sizes, key, state)

    @abstractmethod
    def tiles(self, x: Matrix, sizes: Any) -> Any:
        """Divides rows into tiles by group sizes; None for a layer of one matrix."""

    @abstractmethod
    def input_operands(
        self, x: Matrix, tiles: Any, state: DelayedState | None, *, rowwise: bool = True, columnwise: bool = True
    ) -> Operands:
        """Quantizes x for the forward and for wgrad; None for a direction that isn't needed."""

    @abstractmethod
    def gradient_operands(self, g: jax.Array, kept: Residuals, *, rowwise: bool, columnwise: bool) -> Operands:
        """Quantizes the gradient for dgrad and for wgrad; None for a direction that isn't needed."""

    def gathered(self, weight: Matrix) -> Matrix:
        """Gathers the weight for a product, as codes and scales."""
        return self.placement.gathered(weight)

    @abstractmethod
    def multiply_rows(
        self, operand: Side, weight: Matrix, tiles: Any, dtype: np.dtype, *, bias: jax.Array | None = None, fast: bool
    ) -> jax.Array:
        """Multiplies a rowwise operand by the transposed weight and adds a bias before rounding: y of x."""

    def multiply_rows_back(self, gradient: Side, weight: Matrix, tiles: Any, *, fast: bool) -> jax.Array:
        """Multiplies the rowwise gradient by the weight: dx."""
        return self.multiply_in_pieces("column", gradient, transposed_weight(weight, self.recipe), tiles, self.dtype, fast=fast)

    def multiply_in_pieces(
        self,
        contracted: Literal["column", "row"],
        operand: Any,
        weight: Matrix,
        tiles: Any,
        dtype: np.dtype,
        *,
        bias: jax.Array | None = None,
        fast: bool,
    ) -> jax.Array:
        """Computes `multiply_rows`; the float32 sum of pieces instead if `LayerPlacement.splits` divide what it contracts."""
        count = self.placement.piece_count(contracted)
        if count is None:
            return self.multiply_rows(operand, weight, tiles, dtype, bias=bias, fast=fast)
        multiply = partial(self.multiply_rows, tiles=tiles, dtype=np.dtype("float32"), fast=fast)
        return sum_of_pieces(operand, weight, count, multiply)

    @abstractmethod
    def multiply_columns(self, gradient: Side, x: Side, tiles: Any, *, fast: bool) -> jax.Array:
        """Multiplies two columnwise operands: the gradient of the weight."""

    @abstractmethod
    def bias_rows(self, bias: jax.Array, tiles: Any) -> jax.Array:
        """Returns the bias in the shape that is added to rows of y."""

    @abstractmethod
    def sum_rows(self, g: jax.Array, tiles: Any) -> jax.Array:
        """Sums the gradient [tokens, out] in fp32 to the bias's gradient."""

    @abstractmethod
    def largest_amax(self, x: jax.Array, tiles: Any) -> jax.Array:
        """Returns the largest amax of x, float32 ()."""

    def shares_amax(self) -> tuple[str, ...]:
        """Returns the mesh axes whose ranks hold parts of one scale's operand."""
        return () if self.placement.tensor is None else (self.placement.tensor,)

    def multiplier(self, x: Any, tiles: Any, scale: jax.Array | None, operand: Operand) -> jax.Array | None:
        """Returns delayed scaling's multiplier of an operand: its scale, or current scaling's if it has none yet."""
        format = self.recipe.cast(operand).format or self.recipe.cast(operand, "columnwise").format
        if scale is None or format is None:
            return scale
        amax = self.largest_amax(x, tiles).view(jnp.int32)
        amax = explicit.max_over(amax, axes) if (axes := self.shares_amax()) else amax
        return scaling.delayed_multiplier(scale, amax, format, self.recipe.eps)

    @abstractmethod
    def values(self, operand: Side, tiles: Any, carrier: Any, cast: Cast, *, transposed: bool = False) -> jax.Array:
        """Returns the fp32 values [tokens, features] of a quantized x or gradient, with the derivative of `carrier`."""

    @abstractmethod
    def products(self, tiles: Any) -> tuple[Product, Product, Product]:
        """Returns the fp32 products of the forward (x, w), of dgrad (g, w) and of wgrad (g, x)."""


class Residuals(NamedTuple):
    """Values that a forward keeps for its derivatives.

    Attributes:
        row: x as the forward takes it, for forward mode; None if unused or if `column` has the same values.
        column: x as wgrad takes it, or x itself if the backward quantizes it; None if the weight is a constant.
        weight: the weight.
        tiles: the result of `Layer.tiles`.
        key, state: of the call.
        types: mesh axes that the arguments vary over.
    """

    row: Side | None
    column: Side | None
    weight: Matrix
    tiles: Any
    key: jax.Array | None
    state: DelayedState | None
    types: explicit.VaryingAxes


def _in_one_program(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Jits a function that would otherwise run operation by operation, at many times the host cost."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnames=static)

        @wraps(function)
        def run(*args: Any) -> Any:
            if not runs_at_once():
                return function(*args)
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
                return jitted(*args)
            with evaluating():
                return jitted(*args)

        return run

    return decorate


def _plain(layer: Layer, x, weight, carrier, bias, sizes, key, state):
    y, _, state, *_ = _multiplied(layer, False, x, weight, bias, sizes, state)
    return y, state


def _differentiable(layer: Layer, x, weight, carrier, bias, sizes, key, state):
    point = values_of(x)
    if isinstance(x, QuantizedArray):
        x, point = x.without_carrier(), x.carrier
    carriers = carriers_of(LayerInputs(point, carrier, bias, None if state is None else state.carrier))
    types = explicit.VaryingAxes.of(point, carrier, bias, state)
    # What is kept as it came is an input of a scan over layers too, which would store anything new once more.
    given, given_state = weight, state
    x, weight, bias, state = without_tangents((x, weight, bias, state))
    y, tiles, state_after, row, column = _multiplied(layer, carriers.weight is not None, x, weight, bias, sizes, state)
    y = computed_once(y)
    kept = Residuals(row, values_of(x) if layer.placement.gathers_input else column, given, tiles, key, given_state, types)
    later = [] if state_after is None or state_after.carrier is None else [state_after.carrier]
    like = tuple(jax.typeof(leaf) for leaf in (y, *later))

    def rule(kept, carriers, tangents):
        return linear_map(partial(_forward, layer, like), partial(_backward, layer), (kept, carriers), tangents, like)

    y, *later = attach([y, *later], kept, carriers, rule)
    if given_state is not None and state_after is not None:
        # Only a state's carrier has a derivative.
        new = {"input_amax_history": state_after.input_amax_history} | ({"carrier": later[0]} if later else {})
        state_after = replace(given_state, **new)
    return y, state_after


@_in_one_program("layer", "keep")
def _multiplied(layer: Layer, keep: bool, x, weight: Matrix, bias, sizes, state: DelayedState | None) -> tuple[Any, ...]:
    """Returns y, the tiles, the state after the forward, and x's operands for `Residuals`."""
    tiles = layer.tiles(x, sizes)
    # If x is gathered, keep only the shard; the backward gathers it again and makes the columnwise form.
    row, column, amax = layer.input_operands(x, tiles, state, columnwise=keep and not layer.placement.gathers_input)
    assert row is not None
    # A row-parallel layer adds the bias once, after summing over ranks.
    of_terms, own = (bias, None) if layer.placement.kind == "row" else (None, bias)
    fast = "forward" in layer.recipe.fast_accum
    y = layer.multiply_in_pieces("row", row, layer.gathered(weight), tiles, layer.result, bias=own, fast=fast)
    y = layer.placement.sum_output(y, None if of_terms is None else layer.bias_rows(of_terms, tiles), layer.result)
    if state is not None:
        state = state.after_forward(layer.largest_amax(values_of(x), tiles) if amax is None else amax)
    row = None if not keep or layer.placement.weight is not None or same_values(layer.recipe) else row
    return y, tiles, state, row, column


@_in_one_program("layer", "like")
def _forward(layer: Layer, like, known: tuple[Residuals, LayerInputs], tangents: LayerInputs) -> list[Any]:
    """Returns the tangents of y and, as zeros, of the state."""
    nothing = [lax.full(aval.shape, 0, aval.to_tangent_aval().dtype) for aval in like[1:]]
    return [_tangent(layer, like[0], known, tangents), *nothing]


@_in_one_program("layer", "like")
def _tangent(layer: Layer, like, known: tuple[Residuals, LayerInputs], tangents: LayerInputs) -> jax.Array:
    kept, carriers = known
    check_forward(layer.placement)
    recipe, tiles = layer.recipe, kept.tiles
    weight, x = values(kept.weight, carriers.weight), None
    if tangents.weight is not None and kept.row is not None:
        x = layer.values(kept.row, tiles, carriers.x, recipe.input)
    elif tangents.weight is not None:
        assert kept.column is not None
        x = layer.values(kept.column, tiles, carriers.x, recipe.input_columnwise, transposed=True)
    forward, _, _ = layer.products(tiles)
    y = sum_of_products((forward, tangents.x, weight), (forward, x, tangents.weight))
    y = jnp.zeros(like.shape, jnp.float32) if y is None else y
    y = y if tangents.bias is None else y + layer.bias_rows(tangents.bias, tiles).astype(y.dtype)
    return y.astype(layer.result)


def _backward(layer: Layer, known: tuple[Residuals, LayerInputs], wanted: LayerInputs, cotangents) -> LayerInputs:
    """Returns the wanted cotangents (None for others), with derivatives of their own."""
    kept, carriers = known
    g, *later = cotangents
    g_carrier = carrier_of(g) if isinstance(g, Tracer) else None
    kept, g, later = without_tangents((kept, g, later))
    watched = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((carriers, g_carrier)))
    made, row, column, kept = _cotangents(layer, wanted, watched, kept, g, later)
    types_made = jax.tree.map(jax.typeof, made)
    return attach(made, (row, column, kept), (carriers, g_carrier), partial(_second, layer, types_made))


@_in_one_program("layer", "wanted", "watched")
def _cotangents(layer: Layer, wanted: LayerInputs, watched: bool, kept: Residuals, g, later) -> tuple[Any, ...]:
    """Computes the cotangents; if `watched`, also returns the operands of g and the residuals, for `_second`."""
    recipe, placement, tiles, types, state = layer.recipe, layer.placement, kept.tiles, kept.types, kept.state
    g = placement.own(g, gradient=True)
    column: Any = kept.column
    if placement.gathers_input and wanted.weight is not None:
        column = layer.input_operands(column, tiles, state, rowwise=False).column
    directions = {"rowwise": wanted.x is not None, "columnwise": wanted.weight is not None}
    gradient_row, gradient_column, amax = layer.gradient_operands(g, kept, **directions)
    dx = dw = db = ds = None
    if gradient_row is not None:
        weight = layer.gathered(kept.weight)
        dx = layer.multiply_rows_back(gradient_row, weight, tiles, fast="dgrad" in recipe.fast_accum)
        dx = placement.sum_input(dx, types.x, layer.dtype)
    if gradient_column is not None:
        dw = layer.multiply_columns(gradient_column, column, tiles, fast="wgrad" in recipe.fast_accum)
        dw = _sum_weight(layer, types, dw)
    if wanted.bias is not None:
        db = _sum_bias(layer, kept, g, wanted.bias.dtype)
    if wanted.state is not None:
        ds = cotangent(lambda: layer.largest_amax(g, tiles) if amax is None else amax, later, types.state)
    made = LayerInputs(dx, dw, db, ds)
    return (made, gradient_row, gradient_column, kept) if watched else (made, None, None, None)


@_in_one_program("layer", "made")
def _second(
    layer: Layer, made: LayerInputs, kept: tuple, carriers: tuple[LayerInputs, Any], tangents: tuple[LayerInputs, Any]
) -> list[Any]:
    """Returns the tangents of a backward's cotangents."""
    check_second(layer.placement)
    recipe = layer.recipe
    (row, column, forward), (points, g_carrier), (dots, g_dot) = kept, carriers, tangents
    tiles, types = forward.tiles, forward.types
    _, dgrad, wgrad = layer.products(tiles)
    dx = dw = db = None
    if made.x is not None:
        weight = values(transposed_weight(forward.weight, recipe), points.weight, transposed=True)
        g = layer.values(row, tiles, g_carrier, recipe.gradient)
        dx = sum_of_products((dgrad, g_dot, weight), (dgrad, g, dots.weight))
        dx = None if dx is None else explicit.sum_like(dx.astype(layer.dtype), types.x, ())
    if made.weight is not None:
        x = layer.values(forward.column, tiles, points.x, recipe.input_columnwise, transposed=True)
        g = layer.values(column, tiles, g_carrier, recipe.gradient_columnwise, transposed=True)
        dw = sum_of_products((wgrad, g_dot, x), (wgrad, g, dots.x))
        dw = None if dw is None else _sum_weight(layer, types, dw.astype(layer.weight_dtype))
    if made.bias is not None and g_dot is not None:
        db = _sum_bias(layer, forward, g_dot, made.bias.dtype)
    there = [dot for dot, result in ((dx, made.x), (dw, made.weight), (db, made.bias)) if result is not None]
    return [*there, *(None for _ in jax.tree.leaves(made.state))]


def _sum_weight(layer: Layer, types: explicit.VaryingAxes, dw: jax.Array) -> jax.Array:
    placement = layer.placement
    rest = [name for name in placement.data_axes if name not in placement.fsdp]
    return explicit.sum_like(placement.scatter_weight(dw, layer.recipe.weight.format), types.carrier, rest)


def _sum_bias(layer: Layer, kept: Residuals, g: jax.Array, dtype) -> jax.Array:
    placement = layer.placement
    tokens = (placement.tensor,) if placement.gathers_gradient and placement.tensor else ()
    db = layer.sum_rows(g, kept.tiles).astype(dtype)
    return explicit.sum_like(db, kept.types.bias, (*placement.data_axes, *tokens))
