"""`linear`: x w^T with quantized operands, forward and backward, on one device or inside shard_map.

The weight says how it lies (`QuantizedArray.sharding`), and everything else follows from that and from the data-parallel
axes: what is gathered, which amaxes are reduced, where partial products are summed. `operands` makes the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from blockfp import recipes
from blockfp.formats import FP8_E4M3
from blockfp.products import exact_in_bfloat16, has_tensor_scale
from blockfp.recipes import Compute, Recipe
from blockfp.rounding import Key

from ..arrays.array import QuantizedArray
from ..implementations import explicit, ops, replication
from ..params.params import dequantize_params, quantize_weight
from .delayed import DelayedState
from .layer_placement import LayerPlacement
from .lying import Lies
from .operands import gradient_operands, input_operands
from .products import Operand, product


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
        tokens = placement.own(x.reshape(-1, x.shape[-1]), gradient=False)
        y, state = cast(Any, _linear(how, tokens, weight, carrier, bias, words, state))
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
    """The weight, or a stack of them, as the forward takes it, and the array whose cotangent is its gradient."""
    format = recipe.weight.format
    if isinstance(weight, QuantizedArray):
        if weight.format is not format:
            raise ValueError(
                f"weight is in {weight.format}, and recipe {recipe} wants {format or 'high precision'}: quantize it with "
                "quantize_params and this recipe"
            )
        return weight.replace(tangent=None), weight.carrier
    weight = jnp.asarray(weight)
    stopped = lax.stop_gradient(weight)
    return stopped if format is None else quantize_weight(stopped, format), weight


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(how: _How, x, weight, carrier, bias, key, state):
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


def _forward(how: _How, x, weight, carrier, bias, key, state):
    multiplier = None if state is None else state.input_scale
    # Where x travels, its columnwise form is made behind a second gather, in the backward: until then a shard is kept.
    later = how.placement.gathers_input
    row, column = input_operands(x, how.recipe, how.placement, multiplier, columnwise=not later)
    y = _output(how, row, weight, bias)
    types = replication.Types.of(x, carrier, bias, state)
    return (y, _seen(x, state)), (x if later else column, weight, None if bias is None else bias[:0], key, state, types)


def _backward(how: _How, kept, cotangents):
    column, weight, bias, key, state, types = kept
    g, later = cotangents
    recipe, placement = how.recipe, how.placement
    g = placement.own(g, gradient=True)
    input_scale, gradient_scale = (None, None) if state is None else (state.input_scale, state.gradient_scale)
    if placement.gathers_input:
        _, column = input_operands(column, recipe, placement, input_scale, columnwise=True, rowwise=False)
    gradient_row, gradient_column = gradient_operands(g, recipe, placement, gradient_scale, key)
    assert gradient_row is not None
    assert gradient_column is not None
    assert column is not None
    fast = recipe.fast_accum
    summed = (placement.tensor,) if placement.kind == "column" and placement.tensor and not placement.sequence else ()
    dx = product(gradient_row, across(how.gathered(weight), recipe), how.dtype, fast="dgrad" in fast)
    dx = replication.sum_like(placement.sum_input(passing_overflow(dx, g)), types.x, summed)
    dw = db = ds = None
    if types.carrier is not None:
        dw = product(gradient_column, column, how.weight_dtype, fast="wgrad" in fast)
        dw = passing_overflow(dw, g)
        rest = [name for name in placement.data_axes if name not in placement.fsdp]
        dw = replication.sum_like(placement.scatter_weight(dw, weight.format if placement.fsdp else None), types.carrier, rest)
    if bias is not None:
        tokens = (placement.tensor,) if placement.gathers_gradient and placement.tensor else ()
        db = jnp.sum(g, axis=0, dtype=jnp.float32).astype(bias.dtype)
        db = replication.sum_like(db, types.bias, (*placement.data_axes, *tokens))
    if state is not None:
        ds = state.after_backward(_amax(g), later, types.state)
    return dx, None, dw, db, None, ds


_linear.defvjp(_forward, _backward)


def passing_overflow(product: jax.Array, gradient: jax.Array) -> jax.Array:
    """The product of a float16 gradient, NaN where that holds an Inf.

    FP8 saturates Inf at its largest finite value, behind which loss scaling would not see that its scale was too large.
    """
    if gradient.dtype != jnp.float16 or gradient.size == 0:
        return product
    return jnp.where(jnp.isinf(gradient).any(), jnp.full_like(product, jnp.nan), product)


def across(weight: Operand, recipe: Recipe) -> Operand:
    """The weight [.., out, in] as dgrad takes it: [.., in, out]."""
    if isinstance(weight, QuantizedArray):
        if weight.format.square:
            return weight.mT
        # Its codes have no exact transpose; its values, in a dtype that holds them all, have.
        exact = exact_in_bfloat16(weight.format) and not has_tensor_scale(weight.format)
        return dequantize_params(weight, "bfloat16" if exact else "float32").mT
    format = recipe.weight_columnwise.format
    return weight.mT if format is None else quantize_weight(weight.mT, format)
