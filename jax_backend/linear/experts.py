"""`dispatch` and `combine`: tokens to their experts, as codes and scales, and the experts' results back to the tokens."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from blockfp import recipes
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.recipes import Recipe
from blockfp.sharding.experts import why_not_sent, why_not_twice

from ..arrays.array import QuantizedArray, wrap_parts
from ..implementations import ops, replication
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, linear_map
from . import overflow
from .experts_route import Route


def dispatch(
    x: jax.Array,
    chosen: jax.Array,
    *,
    experts: int,
    recipe: Recipe | str | None = None,
    axis: str | None = None,
    bound: int | None = None,
) -> tuple[jax.Array | QuantizedArray, jax.Array, Route]:
    """Sends each token to the experts that were chosen for it.

    With a recipe a token is quantized once, as the recipe's input. Its codes and scales travel and are put in order, and
    `grouped_linear` multiplies them as they are. What arrives is, bit for bit, the quantization of what would arrive without a
    recipe. The gradient comes back as `combine` sends results, in x's dtype.

    Inside shard_map `axis` divides the experts evenly: rank 0 has the first ones. Rows travel by one `ragged_all_to_all` on
    GPUs, elsewhere by an `all_to_all` of buckets of equal length.

    Args:
        x: float32, float16 or bfloat16 [tokens, features], of this rank.
        chosen: int32 [tokens] or [tokens, choices], the experts of each token, numbered over all ranks; -1 for none.
        experts: how many there are on all ranks.
        recipe: a `Recipe` or its name; None lets tokens travel in high precision.
        axis: inside shard_map, the mesh axis that divides the experts (`grouped_linear`'s `expert_axis`); None: this rank has
            all.
        bound: rows that each rank has room for, the same on all. The default is what all ranks could send to one; a smaller one
            saves memory and time. No token is dropped: where a rank gets more rows, or a choice is no expert, all ranks' results
            of `combine` are NaN, and `route.fits`, bool (), is False.

    Returns:
        (tokens [bound, features], a QuantizedArray with a recipe: the rows of this rank's first expert, then those of the next,
        ..; those of one expert in the order of ranks and of their tokens.
        sizes int32 [experts of this rank]: `grouped_linear`'s group_sizes.
        route: what `combine` wants.)

    Raises:
        TypeError, ValueError: x or chosen have other shapes or dtypes, the ranks don't divide the experts, or the recipe's
            input doesn't travel quantized: it has a scale for a whole tensor, blocks of several rows, or a rotation.

    Example:
        >>> tokens, sizes, route = bfp.dispatch(x, chosen, experts=8, recipe="mxfp8", axis="expert")
        >>> y = bfp.grouped_linear(tokens, w, sizes, recipe="mxfp8", expert_axis="expert")
        >>> out = bfp.combine(y, route, weights)
    """
    cast = _sendable(recipe, "input")
    x, chosen, ranks = _checked(x, chosen, experts, axis)
    tokens, choices = chosen.shape
    bound = ranks * tokens * choices if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise ValueError(f"bound must be a number of rows, 1 or more, got {bound!r}")
    route, sizes = Route.of(chosen, experts, axis, bound)
    if cast is None:
        return _linked(route.send(lax.stop_gradient(x), of_tokens=True), route, x, of_tokens=True), sizes, route
    q = _quantized(x, cast, route, of_tokens=True)
    if isinstance(x, Tracer):
        zeros = carrier_of(jnp.zeros_like(q.codes, dtype=q.dtype, shape=q.shape))
        q = q.replace(tangent=_linked(zeros, route, x, of_tokens=True))
    return q, sizes, route


def combine(y: jax.Array, route: Route, weights: jax.Array | None = None, *, recipe: Recipe | str | None = None) -> jax.Array:
    """Returns the experts' results to their tokens and sums each token's.

    Results travel in y's dtype; the sum is in fp32, in the order of the choices, and rounded once to y's dtype. A token's
    choice of no expert adds nothing.

    Args:
        y: float32, float16 or bfloat16 [bound, out], what the experts made of the tokens of `dispatch`.
        route: of `dispatch`.
        weights: [tokens, choices], a factor for each of a token's choices; None sums as they are.
        recipe: in the backward the gradient of each row of y is quantized as this recipe's gradient, before it travels as codes
            and scales. `grouped_linear` with the same recipe then multiplies, for dgrad, by what it would multiply by without
            it; wgrad's operand is quantized of these values. None lets gradients travel in y's dtype.

    Returns:
        [tokens, out] in y's dtype; NaN where `route.fits` is False.

    Raises:
        TypeError, ValueError: y or weights don't fit the route, or the recipe's gradient doesn't travel quantized.
    """
    if not isinstance(route, Route):
        raise TypeError(f"route must be that of dispatch, got {type(route).__name__}")
    pairs = (route.tokens, route.choices)
    if not isinstance(y, jax.Array) or not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(f"y must be a float array, got {getattr(y, 'dtype', type(y).__name__)}")
    if y.ndim != 2 or y.shape[0] != route.arrived.shape[0]:
        raise ValueError(f"y must be [bound, out] with bound = {route.arrived.shape[0]} as dispatch gave, got {y.shape}")
    if weights is not None and (weights.shape != pairs or not jnp.issubdtype(weights.dtype, jnp.floating)):
        raise ValueError(f"weights must be floats [tokens, choices] = {pairs}, got {weights.dtype} {weights.shape}")
    rows = _returned(y, route, _sendable(recipe, "gradient")).reshape(*pairs, y.shape[1]).astype(jnp.float32)
    terms = rows if weights is None else rows * weights.astype(jnp.float32)[..., None]
    total = terms[:, 0]
    for choice in range(1, route.choices):
        total = total + terms[:, choice]
    return jnp.where(route.fits, total, jnp.nan).astype(y.dtype)


class _Cast(NamedTuple):
    """The format of rows that travel, and the recipe's eps for it."""

    format: Format
    eps: float


def _sendable(recipe: Recipe | str | None, operand: Literal["input", "gradient"]) -> _Cast | None:
    """The cast of rows that travel, None for high precision; raises ValueError where they can't travel quantized."""
    if recipe is None:
        return None
    recipe = recipes.for_linear(recipe)
    cast = recipe.cast(operand)
    if cast.format is None:
        return None
    why = why_not_sent(cast.format)
    if why is None and operand == "gradient":
        why = why_not_twice(cast.format)
    if why is None and (cast.stochastic or cast.rotate):
        why = f"its {operand} is {cast}, which depends on where a row lies"
    if why is not None:
        raise ValueError(f"recipe {recipe}: {why}; pass recipe=None, which sends values as they are")
    return _Cast(cast.format, eps_for(cast.format, recipe.eps))


def _checked(x, chosen, experts: int, axis: str | None) -> tuple[jax.Array, jax.Array, int]:
    """Returns x, the choices [tokens, choices] and the number of ranks."""
    if isinstance(x, QuantizedArray) or not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"x must be an array in high precision, got {type(x).__name__}: dispatch quantizes it, with recipe=")
    if np.dtype(x.dtype).name not in ("float32", "float16", "bfloat16") or x.ndim != 2:
        raise TypeError(f"x must be float32, float16 or bfloat16 [tokens, features], got {x.dtype} {tuple(x.shape)}")
    chosen = jnp.asarray(chosen)
    if not jnp.issubdtype(chosen.dtype, jnp.integer) or chosen.ndim not in (1, 2) or chosen.shape[0] != x.shape[0]:
        raise ValueError(
            f"chosen must be integers [tokens] or [tokens, choices] for the {x.shape[0]} tokens of x, got {chosen.dtype} "
            f"{chosen.shape}"
        )
    ranks = 1
    if axis is not None:
        replication.axis_index(axis)
        ranks = lax.axis_size(axis)
    if experts < 1 or experts % ranks:
        raise ValueError(f"experts = {experts} must be a multiple of the {ranks} ranks of {axis!r}")
    return jnp.asarray(x), chosen.astype(jnp.int32).reshape(x.shape[0], -1), ranks


def _quantized(x: jax.Array, cast: _Cast, route: Route, *, of_tokens: bool) -> QuantizedArray:
    """Quantizes rows and sends codes and scales, side by side; a row with Inf or NaN has NaN scales, as overflow shows."""
    parts = wrap_parts(ops.quantize(x, format=cast.format, eps=cast.eps), cast.format, x)
    parts = overflow.propagate_rows(parts, jnp.isfinite(x).all(axis=1))
    scales = parts.scales
    if scales.dtype != jnp.uint8:
        scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)
    sent = route.send(jnp.concatenate([parts.codes, scales], axis=1), of_tokens=of_tokens)
    codes, scales = jnp.split(sent, [parts.codes.shape[1]], axis=1)
    if parts.scales.dtype != jnp.uint8:
        scales = lax.bitcast_convert_type(scales.reshape(scales.shape[0], -1, 4), parts.scales.dtype)
    return parts.replace(codes=codes, scales=scales)


def _linked(result: Any, route: Route, x: jax.Array, *, of_tokens: bool) -> Any:
    """Gives what became of x on its way the derivative of the way."""
    if not isinstance(x, Tracer):
        return result
    over, like = replication.varying(x), [jax.typeof(result).to_tangent_aval()]

    def forward(route, tangent):
        return [route.send(tangent, of_tokens=of_tokens)]

    def backward(route, _, cotangents):
        rows = route.give_back(cotangents[0])
        if of_tokens:
            rows = rows.reshape(route.tokens, route.choices, -1).astype(jnp.float32).sum(axis=1)
        return replication.sum_like(jnp.where(route.fits, rows, jnp.nan).astype(x.dtype), over, ())

    return attach(result, route, carrier_of(x), lambda route, _, dot: linear_map(forward, backward, route, dot, like))


def _returned(y: jax.Array, route: Route, cast: _Cast | None) -> jax.Array:
    """[pairs, out]: what came back for each pair; in the backward rows are quantized by `cast`."""
    rows = route.give_back(lax.stop_gradient(y))
    if not isinstance(y, Tracer):
        return rows
    over, like = replication.varying(y), [jax.typeof(rows)]

    def forward(route, tangent):
        return [route.give_back(tangent)]

    def backward(route, _, cotangents):
        (g,) = cotangents
        if cast is None:
            sent = route.send(g, of_tokens=False)
        else:
            stopped = lax.stop_gradient(g)
            sent = _linked(_quantized(stopped, cast, route, of_tokens=False).dequantize(), route, g, of_tokens=False)
        return replication.sum_like(sent, over, ())

    return attach(rows, route, carrier_of(y), lambda route, _, dot: linear_map(forward, backward, route, dot, like))
