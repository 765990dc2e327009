"""Checks of layer arguments, and the weight in the form that products take."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp.formats import Format
from blockfp.kernels import exact_order
from blockfp.kernels.routes import exact_in_bfloat16
from blockfp.recipes import Recipe
from blockfp.sharding.pieces import check_pieces

from ..arrays.array import QuantizedArray
from ..implementations import explicit
from ..implementations.carriers import carrier_of
from ..implementations.jax_internals import without_tangents
from ..params.params import check_format, dequantize_params, quantize_weight
from .delayed import DelayedState
from .layer_placement import LayerPlacement
from .products import Matrix, check_order_on_device


def check_tensors(x, weight, bias, *, grouped: bool = False) -> None:
    """Raises TypeError or ValueError unless `linear` (or `grouped_linear`) can multiply these arrays."""
    if not isinstance(x, jax.Array | np.ndarray) and not (grouped and isinstance(x, QuantizedArray)):
        wanted = "an array in high precision" + (", or what dispatch gave" if grouped else "")
        raise TypeError(f"x must be {wanted}, got {type(x).__name__}")
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


def check_quantized_input(x: QuantizedArray, recipe: Recipe) -> None:
    """Raises ValueError unless a quantized x has the format of the recipe's input."""
    cast, block = recipe.input, x.format.block
    if cast.format is not x.format or cast.rotate or cast.stochastic or recipe.delayed or (block and block[0] > 1):
        raise ValueError(
            f"x is in {x.format}, and recipe {recipe} takes {cast} as its input: pass what dispatch gave with this recipe, or "
            "x in high precision"
        )
    if x.sharding is not None or x.origin != (0, 0):
        raise ValueError("x is a part of a sharded array: pass what dispatch gave")


def check_state(recipe: Recipe, state, key, compute: str = "quantized") -> None:
    """Raises TypeError or ValueError for a missing, useless or invalid state or key."""
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


def check_order(recipe: Recipe, x, weight, placement: LayerPlacement, up=None) -> None:
    """Raises ValueError unless the forward's sums have a defined order (`kernels.exact_order`), also over ranks (`pieces`);
    dgrad's and wgrad's products check themselves when a gradient is traced."""
    check_order_on_device()
    try:
        exact_order.check(recipe, np.dtype(x.dtype).name, np.dtype(weight.dtype).name, ("forward",))
    except ValueError as error:
        raise ValueError(f"recipe {recipe}: {error}") from error
    if placement.tensor is None or placement.weight is None:
        return
    if placement.splits is None:
        instead = "linear(.., splits=N), with one N for every number of ranks, adds them in one tree"
        raise ValueError(
            f"recipe {recipe} has exact_order, and the ranks of {placement.tensor!r} would add their terms in any order: "
            + (instead if weight.ndim == 2 else "divide the groups, by expert_axis")
        )
    check_pieces(placement.weight.shape[placement.kind == "row"], placement.splits, recipe)
    if placement.kind == "column" and any(placement.tensor in explicit.varying(leaf) for leaf in jax.tree.leaves((x, up))):
        raise ValueError(
            f"x varies over {placement.tensor!r}, so JAX would add the ranks' gradients of it in any order: with splits a "
            "column-parallel layer wants x to be the same on all ranks, such as a result of a row-parallel layer"
        )


def stored_weight(weight, recipe: Recipe) -> tuple[Matrix, jax.Array | None]:
    """Returns the weight, or a stack of weights, as the forward takes it, and its derivative's carrier or None.

    Raises ValueError if a quantized weight has another format than the recipe's.
    """
    format = recipe.weight.format
    if isinstance(weight, QuantizedArray):
        check_format(weight, recipe)
        return weight.without_carrier(), weight.carrier
    weight = weight if isinstance(weight, Tracer) else jnp.asarray(weight)
    carrier = carrier_of(weight) if isinstance(weight, Tracer) else None
    stopped = without_tangents(weight)
    return stopped if format is None else _quantized_here(stopped, format=format), carrier


@partial(jax.jit, static_argnames="format", inline=True)
def _quantized_here(weight: jax.Array, format: Format) -> QuantizedArray:
    return quantize_weight(weight, format, mark=True)


def transposed_weight(weight: Matrix, recipe: Recipe) -> Matrix:
    """Transposes the weight [.., out, in] for dgrad, [.., in, out]."""
    if isinstance(weight, QuantizedArray):
        if weight.format.square:
            return weight.mT
        # Its codes have no exact transpose; its values do, in a dtype that represents all of them.
        exact = exact_in_bfloat16(weight.format) and not weight.format.has_tensor_scale
        return dequantize_params(weight, "bfloat16" if exact else "float32").mT
    format = recipe.weight_columnwise.format
    return weight.mT if format is None else _quantized_here(weight.mT, format=format)
