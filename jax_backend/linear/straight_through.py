"""Derivatives of the layers' derivatives: of the straight-through function, whose casts have the derivative of the identity.

A layer is y = X W^T with X, W the casts' values, and its backward dx = G W, dw = G^T X with casts of their own. The derivative
of a product of casts is that of their values: a tangent, not quantized, times the other operand, dequantized. These are plain
products, which JAX differentiates further; in fp32, since nobody trains with them at speed.
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
from .products import Matrix
from .tiles import Tiles, gather_rows

Product = Callable[[jax.Array, jax.Array], jax.Array]


class LayerInputs(NamedTuple):
    """The inputs that a layer is differentiated by; or their carriers, tangents, cotangents or types."""

    x: Any
    weight: Any
    bias: Any
    state: Any


def carriers_of(points: LayerInputs) -> LayerInputs:
    """The carriers of inputs; None for constants."""

    def of(point: Any) -> Any:
        if not isinstance(point, Tracer):
            return None
        return point if is_carrier(point) else carrier_of(point)

    return jax.tree.map(of, points)


def same_values(recipe: Recipe) -> bool:
    """Returns True where a recipe gives x the same values along both axes."""
    row, column = recipe.input, recipe.input_columnwise
    return row.format is column.format and not (row.rotate or column.rotate) and (row.format is None or row.format.square)


def values(x: Matrix, carrier: Any = None, *, transposed: bool = False, rotated: bool = False) -> jax.Array:
    """The fp32 values of an operand, as it was before it was rotated and transposed, with the derivative of `carrier`."""
    y: Any = dequantize_params(x, jnp.float32) if isinstance(x, QuantizedArray) else x.astype(jnp.float32)
    y = hadamard(y, inverse=True) if rotated else y
    y = jnp.swapaxes(y, -1, -2) if transposed else y
    return y if carrier is None else straight_through(y, carrier)


def token_values(x: Matrix, tiles: Tiles, carrier: Any, cast: Cast, *, transposed: bool = False) -> jax.Array:
    """Decodes `values` of tiles [tiles, rows, size] ([tiles, size, rows] if transposed) to rows [tokens, size]."""
    made = values(x)
    if cast.rotate:
        made = jnp.where(tiles.rotated(made.shape[-1]) if transposed else True, hadamard(made, inverse=True), made)
    made = jnp.swapaxes(made, -1, -2) if transposed else made
    made = gather_rows(made.reshape(-1, made.shape[-1]), tiles.target)
    return made if carrier is None else straight_through(made, carrier)


def by_group(product: Product, tiles: Tiles) -> Product:
    """Returns the product of rows [tokens, ..] with their group's matrix of [groups, ..]; zeros for rows beyond all groups."""

    def run(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        def of_group(group, matrix):
            return product(tiles.only(rows, group), matrix)

        # The first makes what the sum begins with: shard_map keeps account of the mesh axes that it varies over.
        first = of_group(0, matrices[0])
        rest = jnp.arange(1, matrices.shape[0]), matrices[1:]
        return lax.scan(lambda sum, each: (sum + of_group(*each), None), first, rest)[0]

    return run


def of_each_group(product: Product, tiles: Tiles) -> Product:
    """Returns the product [groups, ..] of each group's rows of two arrays [tokens, ..]."""
    return lambda a, b: lax.map(lambda group: product(tiles.only(a, group), b), jnp.arange(tiles.sizes.shape[0]))


def sum_of_products(*terms: tuple[Product, Any, Any]) -> Any:
    """Sums the products (product, a, b), in fp32, whose operands aren't None; None if there is none."""
    made = [product(a.astype(jnp.float32), b.astype(jnp.float32)) for product, a, b in terms if a is not None and b is not None]
    return sum(made[1:], made[0]) if made else None


def contract(dims_a: int, dims_b: int) -> Product:
    """Returns the product of two matrices, summed over these axes of theirs, in fp32."""
    dimensions = (((dims_a,), (dims_b,)), ((), ()))
    return lambda a, b: lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST)


FORWARD, DGRAD, WGRAD = contract(1, 1), contract(1, 0), contract(0, 0)
"""y of (x, w), dx of (g, w), dw of (g, x)."""


def check_forward(placement: LayerPlacement) -> None:
    """Raises NotImplementedError where a layer has no forward mode."""
    if placement.weight is not None:
        raise NotImplementedError(
            f"a layer whose weight lies {placement.weight} has gradients in reverse mode alone: take jvp, jacfwd or a second "
            "derivative of unsharded weights"
        )


def check_second(placement: LayerPlacement) -> None:
    """Raises NotImplementedError where a layer's gradients have no derivative."""
    check_forward(placement)
    if placement.data_axes:
        raise NotImplementedError(
            f"the gradient of a layer is summed over data_axes = {placement.data_axes} and can't be differentiated again: take "
            "second derivatives without data_axes, and sum them"
        )
