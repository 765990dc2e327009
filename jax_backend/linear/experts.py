"""`dispatch` and `combine`: send tokens to their experts as codes and scales, and the experts' results back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from blockfp import recipes
from blockfp.definition.scaling import eps_for
from blockfp.formats import FP8_E4M3, Format
from blockfp.recipes import Cast, Recipe, RecipeName
from blockfp.sharding.dispatching import check_rows

from ..arrays.array import QuantizedArray, wrap_parts
from ..implementations import explicit, ops
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, linear_map
from . import operands
from .experts_route import Route


@partial(jax.tree_util.register_dataclass, data_fields=("tokens", "counts", "fits", "_route"), meta_fields=("recipe",))
@dataclass(frozen=True)
class Received:
    """The rows received by this rank's experts from `dispatch`, sorted by expert.

    Attributes:
        tokens: [bound, in], a `QuantizedArray` in the recipe's input format, or values if it has none. Zeros follow the last
            received row.
        counts: int32 [own experts], rows per expert: `grouped_linear`'s group_sizes.
        fits: bool (), whether the rows of every rank fit its bound and all expert numbers are valid. If not, no rows are sent
            and `combine` returns NaN.
        recipe: the `Recipe`, or None.
    """

    tokens: jax.Array | QuantizedArray
    counts: jax.Array
    fits: jax.Array
    recipe: Recipe | None
    _route: Route


def dispatch(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    recipe: Recipe | RecipeName | None,
    axis: str | None = None,
    bound: int | None = None,
) -> Received:
    """Sends each token to its experts as codes and scales.

    A token is quantized once, as the recipe's input. Its codes and scales are sent and sorted, and `grouped_linear` multiplies
    them. The result equals, bit for bit, quantizing received values: in blocks of a row, or with one scale from the largest
    magnitude among all ranks' tokens if the format has a tensor scale. wgrad's operand is quantized from the received values.
    Gradients of the rows return in x's dtype.

    Inside shard_map `axis` divides the experts evenly, starting at rank 0. Rows travel in one `ragged_all_to_all` on GPUs,
    elsewhere in an `all_to_all` of buckets of equal length.

    Args:
        x: float32, float16 or bfloat16 [tokens, in], this rank's tokens.
        experts: int32 [tokens, k] (or [tokens]), each token's expert numbers among all ranks' experts; -1 for none.
        num_experts: number of experts on all ranks.
        recipe: a `Recipe` or its name; None sends values.
        axis: inside shard_map, the mesh axis that divides the experts (`grouped_linear`'s `expert_axis`); None if this rank has
            all experts.
        bound: maximum number of rows per rank, equal on all ranks. The default fits all rows of all ranks; a smaller bound
            saves memory and time. No token is dropped: if a rank would receive more rows, or an expert number is invalid,
            `combine` returns NaN on all ranks and `fits` is False.

    Raises:
        TypeError, ValueError: x or experts have a wrong shape or dtype; the ranks don't divide the experts; the recipe's input
            can't be sent as codes (blocks of several rows, a rotation, delayed scaling); or x or experts are cut over Explicit
            axes outside shard_map.

    Example:
        >>> received = bfp.dispatch(x, experts, 8, recipe="mxfp8", axis="expert")
        >>> y = bfp.grouped_linear(received.tokens, w, received.counts, recipe="mxfp8", expert_axis="expert")
        >>> out = bfp.combine(y, received, weights)
    """
    recipe = None if recipe is None else check_recipe(recipes.for_linear(recipe))
    x, experts, ranks = _checked(x, experts, num_experts, axis)
    bound = ranks * experts.size if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise ValueError(f"bound must be a number of rows, 1 or more, got {bound!r}")
    explicit.check_not_cut("dispatch", x=x, experts=experts)
    route, counts = Route.of(experts, num_experts, axis, bound)
    if recipe is None or recipe.input.format is None:
        tokens = _linked(route.send(lax.stop_gradient(x), of_tokens=True), route, x, of_tokens=True)
    else:
        tokens = _sent(x, recipe.input.format, recipe.eps, route, of_tokens=True)
        if isinstance(x, Tracer):
            zeros = carrier_of(explicit.zeros_beside(tokens.codes, tokens.shape, tokens.dtype))
            tokens = tokens.replace(tangent=_linked(zeros, route, x, of_tokens=True))
    return Received(tokens, counts, route.fits, recipe, route)


def combine(y: jax.Array, received: Received, weights: jax.Array | None = None) -> jax.Array:
    """Sends the experts' results back, in their dtype, and sums those of each token.

    Sums are computed in fp32, in the order of each token's experts, and rounded once to y's dtype. In the backward, each row's
    gradient is quantized on its token's rank, as the recipe's gradient, and sent as codes and scales if the format has
    power-of-two block scales (MX, FP8 blocks) and rounds to nearest; the layer's own cast doesn't change these values again.
    Other formats would round twice, so their gradients are sent in y's dtype.

    Args:
        y: float32, float16 or bfloat16 [bound, out], in the order of `received.tokens`.
        received: from `dispatch`.
        weights: [tokens, k], factors of the experts' results; None for 1.

    Returns:
        [tokens, out] in y's dtype; NaN if `received.fits` is False.

    Raises:
        TypeError, ValueError: y or weights don't match the dispatch.
    """
    if not isinstance(received, Received):
        raise TypeError(f"received must be what dispatch gave, got {type(received).__name__}")
    if not isinstance(y, jax.Array) or not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(f"y must be a float array, got {getattr(y, 'dtype', type(y).__name__)}")
    route = received._route
    pairs, bound = (route.tokens, route.choices), route.arrived.shape[0]
    if y.ndim != 2 or y.shape[0] != bound:
        raise ValueError(f"y must be [{bound}, out], a row for each of received.tokens, got {y.shape}")
    if weights is not None and (weights.shape != pairs or not jnp.issubdtype(weights.dtype, jnp.floating)):
        raise ValueError(
            f"weights must be floats {pairs}, one for each expert of each token, got {weights.dtype} {weights.shape}"
        )
    rows = _returned(y, route, received.recipe).reshape(*pairs, y.shape[1]).astype(jnp.float32)
    terms = rows if weights is None else rows * weights.astype(jnp.float32)[..., None]
    total = jnp.zeros_like(terms[:, 0])
    for choice in range(route.choices):
        total = total + terms[:, choice]
    return jnp.where(received.fits, total, jnp.nan).astype(y.dtype)


def check_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe; raises ValueError if tokens can't be dispatched with it."""
    if recipe.delayed is not None:
        raise ValueError(
            f"recipe {recipe} scales by amaxes of earlier steps, which each layer keeps for itself, and tokens are quantized "
            "before they come to one: use fp8_current, or recipe=None, which sends values"
        )
    if recipe.input.rotate or recipe.input.stochastic:
        raise ValueError(f"recipe {recipe} quantizes its input in {recipe.input}: pass recipe=None, which sends values")
    if recipe.input.format is not None:
        check_rows(recipe.input.format)
    return recipe


def _checked(x, experts, num_experts: int, axis: str | None) -> tuple[jax.Array, jax.Array, int]:
    """Returns x, the experts [tokens, k] and the number of ranks; raises TypeError or ValueError for invalid arguments."""
    if isinstance(x, QuantizedArray) or not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"x must be an array in high precision, got {type(x).__name__}: dispatch quantizes it, with recipe=")
    if np.dtype(x.dtype).name not in ("float32", "float16", "bfloat16") or x.ndim != 2:
        raise TypeError(f"x must be float32, float16 or bfloat16 [tokens, in], got {x.dtype} {tuple(x.shape)}")
    experts = jnp.asarray(experts)
    if not jnp.issubdtype(experts.dtype, jnp.integer) or experts.ndim not in (1, 2) or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"experts must be integers [tokens, k] for the {x.shape[0]} tokens of x, got {experts.dtype} {experts.shape}"
        )
    ranks = 1
    if axis is not None:
        explicit.axis_index(axis)
        ranks = lax.axis_size(axis)
    if num_experts < 1 or num_experts % ranks:
        raise ValueError(f"num_experts = {num_experts} must be a multiple of the {ranks} ranks of {axis!r}")
    return jnp.asarray(x), experts.astype(jnp.int32).reshape(x.shape[0], -1), ranks


def _sent(x: jax.Array, format: Format, eps: float, route: Route, *, of_tokens: bool) -> QuantizedArray:
    """Quantizes rows and sends their codes together with their scales.

    A row that isn't finite gets NaN scales, as layers show overflow; with a tensor scale all rows do.
    """
    amax = None
    if format.has_tensor_scale and route.axis is not None:
        # The amax of a tensor is the same in every format.
        amax = explicit.max_over(ops.amax(x, format=FP8_E4M3).blocks, (route.axis,))
    q = wrap_parts(ops.quantize(x, None, amax, format=format, eps=eps_for(format, eps)), format, x)
    if format.has_tensor_scale:
        q = operands.propagate(q, operands.is_finite(x, frozenset(() if route.axis is None else (route.axis,))))
    else:
        q = operands.propagate_rows(q, jnp.isfinite(x).all(axis=1))
    if format.per_tensor:
        return q.replace(codes=route.send(q.codes, of_tokens=of_tokens))
    scales = q.scales
    if scales.dtype != jnp.uint8:
        scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)
    rows = route.send(jnp.concatenate([q.codes, scales], axis=1), of_tokens=of_tokens)
    codes, scales = jnp.split(rows, [q.codes.shape[1]], axis=1)
    if q.scales.dtype != jnp.uint8:
        scales = lax.bitcast_convert_type(scales.reshape(scales.shape[0], -1, 4), q.scales.dtype)
    return q.replace(codes=codes, scales=scales)


def _linked(result: Any, route: Route, x: jax.Array, *, of_tokens: bool) -> Any:
    """Gives the result of sending x the corresponding derivative."""
    if not isinstance(x, Tracer):
        return result
    over, like = explicit.varying(x), [jax.typeof(result).to_tangent_aval()]

    def forward(route, tangent):
        return [route.send(tangent, of_tokens=of_tokens)]

    def backward(route, _, cotangents):
        rows = route.give_back(cotangents[0])
        if of_tokens:
            rows = rows.reshape(route.tokens, route.choices, -1).astype(jnp.float32).sum(axis=1)
        return explicit.sum_like(jnp.where(route.fits, rows, jnp.nan).astype(x.dtype), over, ())

    return attach(result, route, carrier_of(x), lambda route, _, dot: linear_map(forward, backward, route, dot, like))


def _returned(y: jax.Array, route: Route, recipe: Recipe | None) -> jax.Array:
    """Returns the rows sent back for each pair, [pairs, out]."""
    rows = route.give_back(lax.stop_gradient(y))
    if not isinstance(y, Tracer):
        return rows
    over, like = explicit.varying(y), [jax.typeof(rows)]
    format = None if recipe is None or not _keeps_values(recipe.gradient) else recipe.gradient.format

    def forward(route, tangent):
        return [route.give_back(tangent)]

    def backward(route, _, cotangents):
        (g,) = cotangents
        if recipe is None or format is None:
            sent = route.send(g, of_tokens=False)
        else:
            q = _sent(lax.stop_gradient(g), format, recipe.eps, route, of_tokens=False)
            sent = _linked(q.dequantize(), route, g, of_tokens=False)
        return explicit.sum_like(sent, over, ())

    return attach(rows, route, carrier_of(y), lambda route, _, dot: linear_map(forward, backward, route, dot, like))


def _keeps_values(cast: Cast) -> bool:
    """Returns whether quantizing a row's dequantized values again, in other blocks, keeps the values."""
    format = cast.format
    if format is None or format.has_tensor_scale or cast.stochastic or cast.rotate:
        return False
    return format.block is not None and format.block[0] == 1 and format.scale.power_of_two
