"""`linear`: x w^T with quantized operands, forward and backward, on one device or inside shard_map.

The weight's placement (`QuantizedArray.sharding`) and the data-parallel axes determine everything else: what is gathered, which
amaxes are reduced, where partial products are summed. `operands` makes the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from blockfp import recipes
from blockfp.definition.rounding import Key
from blockfp.formats import FP8_E4M3
from blockfp.recipes import Compute, Operand, Recipe, RecipeName

from ..arrays.array import QuantizedArray
from ..implementations import explicit, ops
from .arguments import check_order, check_state, check_tensors, stored_weight
from .delayed import DelayedState, given_back
from .layer import Layer
from .layer_placement import ExplicitLayout, LayerPlacement
from .layer_state import LayerState, takes_layer_state
from .operands import Delayed, Operands, gradient_operands, input_operands
from .products import Matrix, product
from .prologue import Activation, Made, activated, values_of
from .prologue import check as check_activation
from .straight_through import DGRAD, FORWARD, WGRAD, Product, values


@dataclass(frozen=True)
class _Linear(Layer):
    """A layer of one matrix.

    Attributes:
        activation: what made x, a `Made` then; or None.
        layout: shardings of operands and result on a mesh with Explicit axes, or None.
    """

    activation: str | None
    layout: ExplicitLayout | None

    def tiles(self, x, sizes) -> None:
        return None

    def _delayed(self, x: jax.Array, scale: jax.Array, operand: Operand) -> Delayed:
        return Delayed(scale, partial(self.multiplier, x, None, scale, operand))

    def input_operands(self, x: Any, tiles, state, *, rowwise=True, columnwise=True) -> Operands:
        delayed = None if state is None else self._delayed(values_of(x), state.input_scale, "input")
        ways = {"rowwise": rowwise, "columnwise": columnwise}
        return input_operands(x, self.recipe, self.placement, delayed, self.activation, **ways)

    def gradient_operands(self, g, kept, *, rowwise, columnwise) -> Operands:
        delayed = None if kept.state is None else self._delayed(g, kept.state.gradient_scale, "gradient")
        return gradient_operands(g, self.recipe, self.placement, delayed, kept.key, rowwise=rowwise, columnwise=columnwise)

    def gathered(self, weight: Matrix) -> Matrix:
        weight = super().gathered(weight)
        return weight if self.layout is None else self.layout.constrained(weight)

    def multiply_rows(self, operand, weight, tiles, dtype, *, bias=None, fast) -> jax.Array:
        return product(operand, weight, dtype, bias=bias, fast=fast, exact=self.recipe.exactness)

    def multiply_columns(self, gradient, x, tiles, *, fast) -> jax.Array:
        return product(gradient, x, self.weight_dtype, fast=fast, exact=self.recipe.exactness)

    def bias_rows(self, bias, tiles) -> jax.Array:
        return bias[None]

    def sum_rows(self, g, tiles) -> jax.Array:
        return jnp.sum(g, axis=0, dtype=jnp.float32)

    def largest_amax(self, x, tiles) -> jax.Array:
        # The amax is the same in every format.
        return ops.amax(x, format=FP8_E4M3).blocks.reshape(()).view(jnp.float32)

    def values(self, operand, tiles, carrier, cast, *, transposed=False) -> jax.Array:
        return values(operand, carrier, transposed=transposed, rotated=cast.rotate)

    def products(self, tiles) -> tuple[Product, Product, Product]:
        return FORWARD, DGRAD, WGRAD


@overload
def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: None = None,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
    splits: int | None = None,
    up: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array: ...
@overload
def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
    splits: int | None = None,
    up: jax.Array | None = None,
    activation: Activation | None = None,
) -> tuple[jax.Array, DelayedState]: ...
@overload
def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    recipe: None = None,
    state: LayerState,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
    splits: int | None = None,
    up: jax.Array | None = None,
    activation: Activation | None = None,
) -> tuple[jax.Array, LayerState]: ...
@takes_layer_state
def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState | None = None,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
    splits: int | None = None,
    up: jax.Array | None = None,
    activation: Activation | None = None,
) -> Any:
    """Computes x w^T + bias, with the operands of all three products quantized by a recipe.

    Inside shard_map, a weight from `shard_params` has a placement. Its axes among `data_axes` are FSDP axes: codes and scales
    are gathered over them in the forward and again in the backward, and the gradient is summed over all `data_axes` and
    scattered like the weight. Another axis that cuts it is tensor parallelism: if it cuts the rows (out), y is cut along its
    last axis (column parallel); if it cuts the columns (in), x must be cut and y is summed (row parallel).

    Derivatives of every order exist and are straight-through. Casts along rows and columns differ, so the derivative of the
    gradient isn't symmetric: Hessian-vector products by forward-over-reverse and reverse-over-reverse differ.

    Args:
        x: float32, float16 or bfloat16 [..., in]; leading axes are flattened to tokens, along which columnwise blocks run.
        weight: [out, in], quantized in the recipe's format; a weight in high precision is quantized here.
        bias: [out], or None.
        recipe: a `Recipe` or its name; None with a `LayerState`, which has its own.
        key: for recipes that round gradients stochastically: an integer seed, two uint32 words or a `jax.random.key`. Use
            another key for each layer and step, equal on all ranks.
        state: for recipes with delayed scaling a `DelayedState`; or, for any recipe, a `LayerState` (see `init_state`).
        compute: "high_precision" multiplies the dequantized weight with unquantized x and gradients.
        data_axes: inside shard_map, the mesh axes that divide the batch, in the mesh's order.
        sequence: sequence parallelism: tokens outside the layer (x if column parallel, y if row parallel) are cut evenly over
            the tensor-parallel axis. They are on axis -2, after axes of sequences, as in PyTorch.
        splits: with a recipe of `exact_order` under tensor parallelism, the number of pieces of the axis that it cuts, on any
            number of ranks (also one): a power of two that they divide. Terms of pieces are added in one tree, so y and the
            gradients have the same bits on 1, 2, 4 .. ranks, and those of PyTorch's `parallelize(.., splits=)`.
        activation: "silu", "gelu", "gelu_tanh" or "relu2" (squared ReLU): the layer multiplies activation(x), or with `up`
            activation(x) * up, as SwiGLU does with x as the gate. The CUDA library, or Pallas, quantizes it without storing it.
        up: as x.

    Returns:
        y [..., out] in x's dtype, or (y, state) if a state is given.

    Raises:
        TypeError: x, weight or bias is not an array of a supported dtype, or data_axes is a string.
        ValueError: shapes don't match, the weight's format isn't the recipe's, a key or state is missing or useless, or a mesh
            axis is unknown.

    Example:
        >>> w = bfp.quantize(w, "mxfp8_e4m3_32x32")
        >>> y = bfp.linear(x, w, recipe="mxfp8")
    """
    return linear_to(None, x, weight, bias, recipe, key, state, compute, data_axes, sequence, splits, up, activation)


def linear_to(
    dtype: Any,
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None,
    recipe: Recipe | RecipeName,
    key: Key | None,
    state: DelayedState | None,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
    splits: int | None = None,
    up: jax.Array | None = None,
    activation: str | None = None,
) -> Any:
    """Computes `linear` with y, and so its gradient, in `dtype`; None for x's."""
    recipe, run = recipes.parse(recipe), recipes.for_linear(recipe, compute)
    check_tensors(x, weight, bias)
    check_activation(activation, x, up)
    placement = LayerPlacement.of(weight, data_axes, sequence, splits)
    check_state(recipe, state, key, compute)
    if run.exact_order:
        check_order(run, x, weight, placement, up)
    elif splits is not None:
        raise ValueError(f"splits = {splits} is for recipes with exact_order = True, which {recipe} hasn't")
    weight, carrier = stored_weight(weight, recipe)
    placement.check(x, weight, bias)
    leading = placement.leading_axes(x.shape[:-1])
    placement = placement.of_sequences(x.shape[:-1])
    words = None if key is None else jnp.asarray(ops.key_array(key))
    mesh = explicit.mesh_of(x, weight, carrier, bias)
    layout = None if mesh is None else ExplicitLayout.of(x, weight)
    dtypes = np.dtype(x.dtype), np.dtype(weight.dtype), np.dtype(dtype or x.dtype)
    layer = _Linear(run, placement, *dtypes, activation, layout)

    def multiply(x, up, weight, carrier, bias, words, state):
        shape = math.prod(x.shape[:-1]), x.shape[-1]
        gate, up = x.reshape(shape), None if up is None else up.reshape(shape)
        tokens: Any = placement.own(gate if activation is None else activated(gate, up, activation), gradient=False)
        tokens = tokens if activation is None else Made(tokens, gate, up)
        y, state = layer(tokens, weight, carrier, bias, None, words, state)
        return y.reshape(*leading, y.shape[-1]), state

    shared = None if state is None else state.shared()
    operands = (x, up, weight, carrier, bias, words, shared)
    if mesh is None or layout is None:
        y, state_out = multiply(*operands)
    else:
        specs = layout.result, jax.tree.map(lambda _: PartitionSpec(), shared)
        y, state_out = explicit.left_to_xla(multiply, mesh, specs, *operands)
    return y if state is None or state_out is None else (y, given_back(state_out, state))
