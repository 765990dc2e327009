"""Second derivatives of layers: derivatives of the straight-through function, whose casts count as the identity.

A layer computes y = X W^T with the casts' values X and W, and its backward dx = G W, dw = G^T X with its own casts. The
derivative of such a product uses their values: an unquantized tangent times the other operand, dequantized. These are plain
products, which JAX can differentiate further. They run in fp32, because speed doesn't matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from blockfp.recipes import Cast, Recipe

from ..arrays.array import QuantizedArray
from ..implementations.carriers import carrier_of, is_carrier
from ..implementations.derivatives import hadamard, straight_through
from ..params.params import dequantize_params
from .layer_placement import LayerPlacement
from .products import Aligned, Side
from .tiles import Tiles, gather_rows

Product = Callable[[jax.Array, jax.Array], jax.Array]


class LayerInputs(NamedTuple):
    """A layer's differentiable inputs; or their carriers, tangents, cotangents or types."""

    x: Any
    weight: Any
    bias: Any
    state: Any


def carriers_of(points: LayerInputs) -> LayerInputs:
    """Returns the carriers of inputs; None for constants."""

    def of(point: Any) -> Any:
        if not isinstance(point, Tracer):
            return None
        return point if is_carrier(point) else carrier_of(point)

    return jax.tree.map(of, points)


def same_values(recipe: Recipe) -> bool:
    """Returns whether a recipe gives x the same values along both axes."""
    row, column = recipe.input, recipe.input_columnwise
    return row.format is column.format and not (row.rotate or column.rotate) and (row.format is None or row.format.square)


def values(x: Side, carrier: Any = None, *, transposed: bool = False, rotated: bool = False) -> jax.Array:
    """Returns an operand's fp32 values, with rotation and transposition undone, and the derivative of `carrier`."""
    if isinstance(x, Aligned):
        y: Any = x.dequantize(jnp.float32)
    else:
        y = dequantize_params(x, jnp.float32) if isinstance(x, QuantizedArray) else x.astype(jnp.float32)
    y = hadamard(y, inverse=True) if rotated else y
    y = jnp.swapaxes(y, -1, -2) if transposed else y
    return y if carrier is None else straight_through(y, carrier)


def token_values(x: Side, tiles: Tiles, carrier: Any, cast: Cast, *, transposed: bool = False) -> jax.Array:
    """Returns `values` of tiles [tiles, rows, size] ([tiles, size, rows] if transposed) as rows [tokens, size]."""
    made = values(x)
    if cast.rotate:
        made = jnp.where(tiles.rotated(made.shape[-1]) if transposed else True, hadamard(made, inverse=True), made)
    made = jnp.swapaxes(made, -1, -2) if transposed else made
    made = gather_rows(made.reshape(-1, made.shape[-1]), tiles.target)
    return made if carrier is None else straight_through(made, carrier)


def by_group(product: Product, tiles: Tiles) -> Product:
    """Returns a function that multiplies rows [tokens, ..] by their group's matrix of [groups, ..]; zeros beyond all groups."""

    def run(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        def of_group(group, matrix):
            return product(tiles.only(rows, group), matrix)

        # Start with the first product, so that the sum varies over the right mesh axes, which shard_map tracks.
        first = of_group(0, matrices[0])
        rest = jnp.arange(1, matrices.shape[0]), matrices[1:]
        return lax.scan(lambda sum, each: (sum + of_group(*each), None), first, rest)[0]

    return run


def of_each_group(product: Product, tiles: Tiles) -> Product:
    """Returns a function that multiplies each group's rows of two arrays [tokens, ..] to [groups, ..]."""
    return lambda a, b: lax.map(lambda group: product(tiles.only(a, group), b), jnp.arange(tiles.sizes.shape[0]))


def sum_of_products(*terms: tuple[Product, Any, Any]) -> Any:
    """Sums the fp32 products (product, a, b) whose operands aren't None; returns None if there are none."""
    made = [product(a.astype(jnp.float32), b.astype(jnp.float32)) for product, a, b in terms if a is not None and b is not None]
    return sum(made[1:], made[0]) if made else None


def contract(dims_a: int, dims_b: int) -> Product:
    """Returns the fp32 product of two matrices, contracted over these axes."""
    dimensions = (((dims_a,), (dims_b,)), ((), ()))
    return lambda a, b: lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST)


FORWARD, DGRAD, WGRAD = contract(1, 1), contract(1, 0), contract(0, 0)
"""y from (x, w), dx from (g, w), dw from (g, x)."""


def check_forward(placement: LayerPlacement) -> None:
    """Raises NotImplementedError if a layer has no forward mode."""
    if placement.weight is not None:
        raise NotImplementedError(
            f"a layer whose weight is placed as {placement.weight} only has gradients in reverse mode: take jvp, jacfwd "
            "or a second derivative of unsharded weights"
        )


def check_second(placement: LayerPlacement) -> None:
    """Raises NotImplementedError if a layer's gradients can't be differentiated."""
    check_forward(placement)
    if placement.data_axes:
        raise NotImplementedError(
            f"the gradient of a layer is summed over data_axes = {placement.data_axes} and can't be differentiated again: take "
            "second derivatives without data_axes, and sum them"
        )
