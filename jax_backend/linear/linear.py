"""`linear`: x w^T with quantized operands, forward and backward, on one device or inside shard_map.

The weight says how it lies (`QuantizedArray.sharding`), and everything else follows from that and from the data-parallel
axes: what is gathered, which amaxes are reduced, where partial products are summed. `operands` makes the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from blockfp import recipes
from blockfp.definition.rounding import Key
from blockfp.formats import FP8_E4M3, Format
from blockfp.kernels.routes import exact_in_bfloat16
from blockfp.recipes import Compute, Recipe

from ..arrays.array import QuantizedArray
from ..implementations import explicit, ops, replication
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, either, linear_map
from ..params.params import dequantize_params, quantize_weight
from . import overflow
from .delayed import DelayedState
from .layer_placement import LayerPlacement
from .lying import Lies
from .operands import gradient_operands, input_operands
from .products import Operand, product
from .straight_through import (
    DGRAD,
    FORWARD,
    WGRAD,
    Points,
    carriers_of,
    check_forward,
    check_second,
    same_values,
    total,
    values,
)


@dataclass(frozen=True)
class _How:
    """What is static about a call."""

    recipe: Recipe
    placement: LayerPlacement
    dtype: np.dtype
    weight_dtype: np.dtype
    lies: Lies | None

    def gathered(self, weight: Operand) -> Operand:
        """The weight as a product takes it: where several devices hold it, gathered as codes and scales."""
        weight = self.placement.gathered(weight)
        return weight if self.lies is None else self.lies.constrained(weight)


def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | str,
    key: Key | None = None,
    state: DelayedState | None = None,
    compute: Compute = "quantized",
    data_axes: Sequence[str] = (),
    sequence: bool = False,
) -> Any:
    """x w^T + bias, with the operands of all three products quantized as a recipe says.

    Inside shard_map a weight of `shard_params` brings its placement along. Its FSDP axes, which are those among `data_axes`,
    are gathered in the forward and again in the backward, codes and scales; its gradient is summed over all of `data_axes`
    and scattered like the weight. Another axis that cuts it is tensor parallelism: if it cuts the rows (out), y is cut along
    its last axis (column parallel); if it cuts the columns (in), x must be, and y is summed (row parallel).

    Args:
        x: float32, float16 or bfloat16 [..., in]; leading axes are flattened to tokens, along which columnwise blocks run.
        weight: [out, in], quantized in the recipe's format, or in high precision: then it is quantized here.
        bias: [out], or None.
        recipe: a `Recipe` or its name.
        key: for recipes that round gradients stochastically: an integer seed, two uint32 words or a `jax.random.key`. Another
            one for each layer and step, equal on all ranks.
        state: for recipes with delayed scaling, see `DelayedState`.
        compute: "high_precision" multiplies the dequantized weight with x and gradients as they are.
        data_axes: inside shard_map, the mesh axes that divide the batch, in the mesh's order.
        sequence: sequence parallelism: the tokens outside the layer (x of a column parallel one, y of a row parallel one) are
            cut over the tensor-parallel axis.

    Returns:
        y [..., out] in x's dtype; (y, state) where a state is given.

    Raises:
        TypeError: x, weight or bias is not an array of a supported dtype, or data_axes one name instead of a tuple.
        ValueError: shapes don't fit, the weight is in another format than the recipe's, a key or state is missing or of no
            use, or a mesh axis is unknown.

    Example:
        >>> w = bfp.quantize(w, "mxfp8_e4m3_32x32")
        >>> y = bfp.linear(x, w, recipe="mxfp8")
    """
    recipe, run = recipes.parse(recipe), recipes.for_linear(recipe, compute)
    check_tensors(x, weight, bias)
    placement = LayerPlacement.of(weight, data_axes, sequence)
    check_state(recipe, state, key, compute)
    weight, carrier = stored_weight(weight, recipe)
    placement.check(x, weight, bias)
    words = None if key is None else jnp.asarray(ops.key_array(key))
    mesh = explicit.mesh_of(x, weight, carrier, bias)
    lies = None if mesh is None else Lies.of(x, weight)
    how = _How(run, placement, np.dtype(x.dtype), np.dtype(weight.dtype), lies)

    def multiply(x, weight, carrier, bias, words, state):
        tokens = placement.own(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), gradient=False)
        plain, differentiable = partial(_plain, how), partial(_differentiable, how)
        y, state = either(plain, differentiable, tokens, weight, carrier, bias, words, state)
        return y.reshape(*placement.leading_axes(x, y), y.shape[-1]), state

    operands = (x, weight, carrier, bias, words, state)
    if mesh is None or lies is None:
        y, state_out = multiply(*operands)
    else:
        specs = lies.result, jax.tree.map(lambda _: PartitionSpec(), state)
        y, state_out = explicit.left_to_xla(multiply, mesh, specs, *operands)
    return y if state is None else (y, state_out)


def check_tensors(x, weight, bias, *, grouped: bool = False) -> None:
    """Raises TypeError or ValueError where these aren't arrays that `linear` (`grouped_linear`) multiplies."""
    if isinstance(x, QuantizedArray) or not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"x must be an array in high precision, got {type(x).__name__}")
    if not isinstance(weight, QuantizedArray | jax.Array | np.ndarray):
        raise TypeError(f"weight must be an array or a QuantizedArray, got {type(weight).__name__}")
    for name, array in (("x", x), ("weight", weight)):
        if np.dtype(array.dtype).name not in ("float32", "float16", "bfloat16"):
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {array.dtype}: cast it first")
    if grouped and weight.ndim != 3:
        raise ValueError(f"weight must be [groups, out, in], got {tuple(weight.shape)}")
    if not grouped and (weight.ndim != 2 or x.ndim < 1):
        raise ValueError(
            f"weight must be [out, in] and x [..., in], got {tuple(weight.shape)} and {tuple(x.shape)}: use jax.vmap or "
            "lax.scan over a stack, grouped_linear for experts"
        )
    if bias is not None and (bias.ndim != weight.ndim - 1 or not jnp.issubdtype(bias.dtype, jnp.floating)):
        wanted = "[groups, out]" if grouped else "[out]"
        raise ValueError(f"bias must be a float array of shape {wanted}, got {bias.dtype} {tuple(bias.shape)}")


def check_state(recipe: Recipe, state, key, compute: str = "quantized") -> None:
    """Raises TypeError or ValueError where a recipe needs another state or key."""
    if recipe.delayed is not None and state is None and compute == "quantized":
        raise ValueError(f"recipe {recipe} scales by history: pass state=bfp.delayed_state(recipe)")
    if recipe.delayed is None and state is not None:
        raise ValueError(f"state: recipe {recipe} takes scales from the current amax and has no state")
    if state is not None and not isinstance(state, DelayedState):
        raise TypeError(f"state must be a DelayedState, got {type(state).__name__}")
    if state is not None and state.input_scale.ndim:
        raise ValueError(f"state belongs to a stack of {state.input_scale.shape} layers: use jax.vmap or lax.scan")
    if key is None and compute == "quantized" and (recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic):
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass a key, another one for each layer and step")


def stored_weight(weight, recipe: Recipe) -> tuple[Operand, jax.Array | None]:
    """The weight, or a stack of them, as the forward takes it, and the carrier of its derivative, or None."""
    format = recipe.weight.format
    if isinstance(weight, QuantizedArray):
        if weight.format is not format:
            raise ValueError(
                f"weight is in {weight.format}, and recipe {recipe} wants {format or 'high precision'}: quantize it with "
                "quantize_params and this recipe"
            )
        return weight.without_carrier(), weight.carrier
    weight = jnp.asarray(weight)
    carrier = carrier_of(weight) if isinstance(weight, Tracer) else None
    stopped = lax.stop_gradient(weight)
    return stopped if format is None else _quantized_here(stopped, format), carrier


def _quantized_here(weight: jax.Array, format: Format) -> QuantizedArray:
    return overflow.show(quantize_weight(weight, format), overflow.is_finite(weight))


def _plain(how: _How, x, weight, carrier, bias, key, state):
    multiplier = None if state is None else state.input_scale
    row, _ = input_operands(x, how.recipe, how.placement, multiplier, columnwise=False)
    return _output(how, row, weight, bias), _seen(x, state)


def _output(how: _How, row: Operand | None, weight: Operand, bias) -> jax.Array:
    assert row is not None
    y = product(row, how.gathered(weight), how.dtype, fast="forward" in how.recipe.fast_accum)
    y = how.placement.sum_output(y)
    return y if bias is None else y + bias.astype(y.dtype)[None]


def _seen(x: jax.Array, state: DelayedState | None) -> DelayedState | None:
    """The state after a forward: its input history knows x."""
    return None if state is None else state.after_forward(_amax(x))


def _amax(x: jax.Array) -> jax.Array:
    # It is the same in every format.
    return ops.amax(x, format=FP8_E4M3).blocks.reshape(()).view(jnp.float32)


class _Kept(NamedTuple):
    """What a forward keeps for derivatives.

    Attributes:
        row: x as the forward takes it, for forward mode; None where that isn't wanted or `column` has the same values.
        column: x as wgrad takes it, or x itself where that is made in the backward; None for a weight that is a constant.
        weight: the weight.
        key, state: of the call.
        types: what the arguments vary over.
    """

    row: Operand | None
    column: Operand | None
    weight: Operand
    key: jax.Array | None
    state: DelayedState | None
    types: replication.Types


def _differentiable(how: _How, x, weight, carrier, bias, key, state):
    carriers = carriers_of(Points(x, carrier, bias, state))
    types = replication.Types.of(x, carrier, bias, state)
    x, weight, bias, state = lax.stop_gradient((x, weight, bias, state))
    multiplier = None if state is None else state.input_scale
    # Where x travels, its columnwise form is made behind a second gather, in the backward: until then a shard is kept.
    later = how.placement.gathers_input
    row, column = input_operands(x, how.recipe, how.placement, multiplier, columnwise=carriers.weight is not None and not later)
    y = _output(how, row, weight, bias)
    row = None if column is None or how.placement.weight is not None or same_values(how.recipe) else row
    kept = _Kept(row, x if later else column, weight, key, state, types)
    results = (y, _seen(x, state))
    like = [jax.typeof(leaf) for leaf in jax.tree.leaves(results)]

    def rule(kept, carriers, tangents):
        return linear_map(partial(_forward, how, like[0]), partial(_backward, how), (kept, carriers), tangents, like)

    return attach(results, kept, carriers, rule)


def _forward(how: _How, like, known: tuple[_Kept, Points], tangents: Points) -> list[Any]:
    """The tangents of y and of the state, which has none."""
    kept, carriers = known
    check_forward(how.placement)
    weight, x = values(kept.weight, carriers.weight), None
    if tangents.weight is not None:
        assert kept.column is not None
        x = values(kept.column, carriers.x, transposed=True) if kept.row is None else values(kept.row, carriers.x)
    y = total((FORWARD, tangents.x, weight), (FORWARD, x, tangents.weight))
    y = jnp.zeros(like.shape, jnp.float32) if y is None else y
    y = y if tangents.bias is None else y + tangents.bias.astype(y.dtype)
    return [y.astype(how.dtype), *jax.tree.leaves(jax.tree.map(jnp.zeros_like, kept.state))]


def _backward(how: _How, known: tuple[_Kept, Points], wanted: Points, cotangents) -> Points:
    """The cotangents of what is wanted (None where nothing is), which have derivatives of their own."""
    kept, carriers = known
    g, *later = cotangents
    g_carrier = carrier_of(g) if isinstance(g, Tracer) else None
    kept, g = lax.stop_gradient((kept, g))
    recipe, placement, types, state = how.recipe, how.placement, kept.types, kept.state
    g = placement.own(g, gradient=True)
    input_scale, gradient_scale = (None, None) if state is None else (state.input_scale, state.gradient_scale)
    column: Any = kept.column
    if placement.gathers_input and wanted.weight is not None:
        _, column = input_operands(column, recipe, placement, input_scale, columnwise=True, rowwise=False)
    directions = {"rowwise": wanted.x is not None, "columnwise": wanted.weight is not None}
    gradient_row, gradient_column = gradient_operands(g, recipe, placement, gradient_scale, kept.key, **directions)
    fast = recipe.fast_accum
    dx = dw = db = ds = None
    if gradient_row is not None:
        summed = (placement.tensor,) if placement.kind == "column" and placement.tensor and not placement.sequence else ()
        dx = product(gradient_row, across(how.gathered(kept.weight), recipe), how.dtype, fast="dgrad" in fast)
        dx = replication.sum_like(placement.sum_input(dx), types.x, summed)
    if gradient_column is not None:
        dw = product(gradient_column, column, how.weight_dtype, fast="wgrad" in fast)
        dw = _sum_weight(how, kept, dw)
    if wanted.bias is not None:
        db = _sum_bias(how, types, jnp.sum(g, axis=0, dtype=jnp.float32).astype(wanted.bias.dtype))
    if state is not None:
        ds = state.cotangent(wanted.state, lambda: _amax(g), later, types.state)
    made = Points(dx, dw, db, ds)
    types_made = jax.tree.map(jax.typeof, made)
    return attach(made, (gradient_row, gradient_column, kept), (carriers, g_carrier), partial(_second, how, types_made))


def _second(how: _How, made: Points, kept: tuple, carriers: tuple[Points, Any], tangents: tuple[Points, Any]) -> list[Any]:
    """The tangents of the cotangents that a backward made."""
    check_second(how.placement)
    recipe = how.recipe
    (row, column, forward), (points, g_carrier), (dots, g_dot) = kept, carriers, tangents
    dx = dw = db = None
    if made.x is not None:
        weight = values(across(forward.weight, recipe), points.weight, transposed=True)
        g = values(row, g_carrier, rotated=recipe.gradient.rotate)
        dx = total((DGRAD, g_dot, weight), (DGRAD, g, dots.weight))
        dx = None if dx is None else replication.sum_like(dx.astype(how.dtype), forward.types.x, ())
    if made.weight is not None:
        x = values(forward.column, points.x, transposed=True, rotated=recipe.input_columnwise.rotate)
        g = values(column, g_carrier, transposed=True, rotated=recipe.gradient_columnwise.rotate)
        dw = total((WGRAD, g_dot, x), (WGRAD, g, dots.x))
        dw = None if dw is None else _sum_weight(how, forward, dw.astype(how.weight_dtype))
    if made.bias is not None and g_dot is not None:
        db = _sum_bias(how, forward.types, jnp.sum(g_dot, axis=0, dtype=jnp.float32).astype(made.bias.dtype))
    there = [dot for dot, result in ((dx, made.x), (dw, made.weight), (db, made.bias)) if result is not None]
    return [*there, *(None for _ in jax.tree.leaves(made.state))]


def _sum_weight(how: _How, kept: _Kept, dw: jax.Array) -> jax.Array:
    placement = how.placement
    rest = [name for name in placement.data_axes if name not in placement.fsdp]
    format = kept.weight.format if placement.fsdp and isinstance(kept.weight, QuantizedArray) else None
    return replication.sum_like(placement.scatter_weight(dw, format), kept.types.carrier, rest)


def _sum_bias(how: _How, types: replication.Types, db: jax.Array) -> jax.Array:
    placement = how.placement
    tokens = (placement.tensor,) if placement.gathers_gradient and placement.tensor else ()
    return replication.sum_like(db, types.bias, (*placement.data_axes, *tokens))


def across(weight: Operand, recipe: Recipe) -> Operand:
    """The weight [.., out, in] as dgrad takes it: [.., in, out]."""
    if isinstance(weight, QuantizedArray):
        if weight.format.square:
            return weight.mT
        # Its codes have no exact transpose; its values, in a dtype that holds them all, have.
        exact = exact_in_bfloat16(weight.format) and not weight.format.has_tensor_scale
        return dequantize_params(weight, "bfloat16" if exact else "float32").mT
    format = recipe.weight_columnwise.format
    return weight.mT if format is None else _quantized_here(weight.mT, format)
