"""Optimizers of parameter trees with quantized leaves: fp32 masters, requantized after each step; any optax optimizer.

Optimizers are pairs of functions like optax's `GradientTransformation`; adamw, adam and muon don't need optax. Gradients of
quantized parameters are plain arrays (`value_and_grad`). Every leaf that isn't float32 has a master, and its update is its new
value (`Replacement`), because nothing can be added to codes. `apply_updates` handles both kinds of updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from blockfp.sharding import plans

from ..arrays import sharded
from ..arrays.array import OF_PARTS, QuantizedArray, is_quantized, with_derivative
from ..implementations import explicit
from ..implementations.derivatives import without_gradient
from .params import dequantize_params, quantize_weight, shares_scale
from .trees import describe, map_with_path


class Optimizer(NamedTuple):
    """An optimizer with optax's interface.

    Attributes:
        init: maps parameters to a state. If the original arrays still exist, init(parameters, originals) starts the masters
            from them.
        update: maps (gradients, state, parameters) to (updates, state) for `apply_updates`. Further named arguments are passed
            to an optax optimizer.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]


_CALCULATED = (
    "the update of a leaf with a master is its new value, which was calculated with: what transforms updates belongs inside, "
    "blockfp.jax.with_masters(optax.chain(..))"
)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Replacement:
    """The update of a leaf with a master: its new value. (optax.apply_updates rejects it; use `apply_updates`.)

    Wrappers of an optimizer may multiply updates by 0 or 1, or replace them by zeros (optax.MultiSteps); with 0 nothing is
    replaced. (optax.apply_if_finite acts on gradients, so put it inside `with_masters`.)

    Attributes:
        value: the new value.
        applies: whether the leaf is replaced: a bool, or an array of one.
    """

    value: jax.Array | QuantizedArray
    applies: bool | jax.Array = True

    def tree_flatten(self):
        # Use the value's own leaves, so that code that makes zeros like updates doesn't find a quantized array.
        leaves, made = jax.tree.flatten(self.value)
        return (self.applies, *leaves), made

    @classmethod
    def tree_unflatten(cls, made, leaves):
        applies, *leaves = leaves
        try:
            return cls(jax.tree.unflatten(made, leaves), applies)
        except TypeError:  # codes that became floats
            raise TypeError(_CALCULATED) from None


class MasterState(NamedTuple):
    """The state of a wrapped optimizer.

    Attributes:
        masters: float32, in the structure of gradients; None for float32 parameters.
        inner: the optimizer's own state.
    """

    masters: Any
    inner: Any


jax.export.register_namedtuple_serialization(MasterState, serialized_name="blockfp.jax.MasterState")


def apply_updates(params: Any, updates: Any) -> Any:
    """Applies updates to parameters: adds plain updates, substitutes replacements.

    Raises:
        TypeError: the update of a quantized leaf is not a `Replacement`; the message names its path.
        ValueError: an update has another shape or format than its parameter, or the trees differ.
    """

    def apply(path: str, param, update):
        new = update.value if isinstance(update, Replacement) else update
        if is_quantized(param) and new is update:
            raise TypeError("codes can't be added to: wrap the optimizer in blockfp.jax.with_masters")
        formats = {x.format if isinstance(x, QuantizedArray) else None for x in (param, new)}
        if getattr(new, "shape", None) != param.shape or len(formats) > 1:
            raise ValueError(f"the update of a parameter of {describe(param)} must be alike, got {describe(new)}")
        return _replaced(param, update) if isinstance(update, Replacement) else (param + update).astype(param.dtype)

    return map_with_path(apply, params, updates)


def _replaced(param, update: Replacement):
    new, applies = update.value, update.applies
    if applies is True:
        return new
    if isinstance(new, QuantizedArray) and new.tangent is not None:
        raise TypeError("an update that may be left out (optax.MultiSteps and others) has no derivative: take it without them")
    old = param.without_carrier() if is_quantized(param) else param
    dtypes = [[jnp.result_type(part) for part in jax.tree.leaves(tree)] for tree in (old, new, applies)]
    if dtypes[0] != dtypes[1] or dtypes[2] != [jnp.bool_]:
        raise TypeError(_CALCULATED)
    return jax.tree.map(lambda old, new: jnp.where(applies, new, old), old, new)


def with_masters(optimizer: Any) -> Optimizer:
    """Wraps any optax optimizer for trees with quantized or 16-bit leaves.

    The optimizer works on fp32 masters, which are quantized after each step; a leaf whose master didn't move keeps its codes.
    Inside shard_map each rank updates its part, and amaxes are reduced according to the leaf's sharding.

    `update` passes named arguments on. The optimizer sees masters: a `value_fn` (optax.lbfgs) is called with parameters made
    from masters, as after a step, and `grad` is treated like the gradients. For optax.lookahead, pass `LookaheadParams` as
    parameters.

    Args:
        optimizer: an optax `GradientTransformation`, or an optimizer of this package.

    Example:
        >>> optimizer = bfp.with_masters(optax.chain(optax.clip(1.0), optax.lion(1e-4)))
    """

    def step(gradients, inner, weights, extra):
        updates, inner = optimizer.update(gradients, inner, weights, **extra)
        moved = jax.tree.map(lambda weight, update: weight + update, weights, updates)
        # NaN counts as moved.
        still = jax.tree.map(lambda old, new: ~jnp.any(old != new), weights, moved)
        return moved, still, inner

    return on_masters(optimizer.init, step)


def on_masters(init_inner: Callable, step: Callable, check: Callable[[Any], None] | None = None) -> Optimizer:
    """Makes an optimizer from `step`: (gradients, state, weights, extra) -> (weights, which are unchanged (False if known not
    to be), state), all in fp32. `check` raises for a parameter that it can't step."""

    def check_params(params) -> None:
        def each(path: str, param) -> None:
            _check_whole(path, param)
            if check is not None:
                check(param)

        map_with_path(each, params)

    def init(params, originals=None):
        check_params(params)
        masters = map_with_path(_new_master, params, params if originals is None else originals)
        return MasterState(masters, init_inner(_weights(params, masters)))

    def update(gradients, state: MasterState, params=None, **extra):
        check_state(state, MasterState)
        if params is None:
            raise ValueError("update needs the parameters: update(gradients, state, params)")
        check_params(params)
        weights = _weights(params, state.masters)
        gradients = _gradients(params, gradients, weights)
        if "grad" in extra:
            extra["grad"] = _gradients(params, extra["grad"], weights)
        if callable(extra.get("value_fn")):
            extra["value_fn"] = _of_weights(extra["value_fn"], params)
        moved, still, inner = step(gradients, state.inner, weights, extra)
        updates = map_with_path(_update, params, weights, moved, still)
        masters = map_with_path(lambda _, param, new: None if _is_own_master(param) else new, params, moved)
        return updates, MasterState(masters, inner)

    return Optimizer(init, update)


def _check_whole(path: str, param) -> None:
    """Raises TypeError if a wrapper (optax.masked, multi_transform) has taken codes or scales out of a quantized leaf."""
    if not is_quantized(param):
        return
    parts = (part for part in (param.codes, param.scales, param.tensor_scale) if part is not None)
    if not all(hasattr(part, "dtype") for part in parts):
        raise TypeError(OF_PARTS)


def check_state(state: Any, kind: type) -> None:
    """Raises TypeError unless the state comes from the optimizer's `init`."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be the {kind.__name__} of this optimizer's init, got {type(state).__name__}")


def _is_own_master(param: Any) -> bool:
    return not is_quantized(param) and param.dtype == jnp.float32


def _new_master(path: str, param, original):
    if not is_quantized(param) and not _is_float(param):
        raise TypeError(f"an optimizer moves float and quantized arrays, got {describe(param)}: leave it out of the parameters")
    if _is_own_master(param):
        if is_quantized(original):
            raise ValueError("the original is quantized, and the parameter isn't: init(parameters, originals) takes both so")
        return None
    if getattr(original, "shape", None) != param.shape:
        raise ValueError(f"the original of a parameter of shape {param.shape} must have that shape, got {describe(original)}")
    if is_quantized(original):
        return dequantize_params(original, jnp.float32)
    return jnp.array(original, jnp.float32)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _weights(params, masters):
    def weight(path: str, param, master):
        if master is None:
            if not _is_own_master(param):
                raise ValueError(f"the state belongs to other parameters: no master of {describe(param)}; call init again")
            return param
        if master.shape != param.shape:
            raise ValueError(f"the state belongs to other parameters: its master has shape {master.shape}, not {param.shape}")
        return master

    return map_with_path(weight, params, masters)


def _gradients(params, gradients, weights):
    # With optax.lookahead's pair of parameters, gradients belong to the fast ones.
    of = lambda tree: getattr(tree, "fast", tree) if isinstance(params, tuple) else tree  # noqa: E731
    return map_with_path(_check_gradient, of(params), gradients, of(weights))


def _of_weights(function: Callable, params) -> Callable:
    """Converts a function of parameters to a function of their fp32 weights, with a straight-through gradient."""

    def param(path: str, like, weight):
        if not is_quantized(like):
            return weight.astype(like.dtype)
        return with_derivative(_requantized(like, jax.lax.stop_gradient(weight)), weight)

    return lambda weights, *args, **kwargs: function(map_with_path(param, params, weights), *args, **kwargs)


def _check_gradient(path: str, param, gradient, weight) -> jax.Array:
    if is_quantized(gradient) or not _is_float(gradient) or gradient.shape != weight.shape:
        raise ValueError(f"the gradient must be a float array of shape {weight.shape}, got {describe(gradient)}")
    return gradient.astype(jnp.float32)


def _update(path: str, param, weight: jax.Array, moved: jax.Array, still: Any):
    if _is_own_master(param):
        return moved - weight
    if not is_quantized(param):
        return Replacement(moved.astype(param.dtype))
    if param.sharding is not None:
        moved = without_gradient(moved, _NO_GRADIENT)
    new = _requantized(param, moved)
    if still is not False:
        still = still if param.sharding is None else _everywhere(still, param)
        new = jax.tree.map(lambda old, new: jnp.where(still, old, new), param.without_carrier(), new)
    return Replacement(with_derivative(new, moved) if param.sharding is None else new)


_NO_GRADIENT = "an update of a sharded quantized weight has no derivative: differentiate through updates of unsharded ones"


def _requantized(q: QuantizedArray, values: jax.Array) -> QuantizedArray:
    """Quantizes new values in q's format, placement and nominal dtype."""
    if q.sharding is None:
        return quantize_weight(values, q.format, nominal=np.dtype(q.dtype), shared=shares_scale(q))
    plan = plans.quantize_shards(q.format, q.sharding)
    options = sharded.Options(nominal=np.dtype(q.dtype).name)

    def one(values):
        return sharded.quantize(values, plan, options)

    for _ in range(0 if shares_scale(q) else values.ndim - 2):
        one = jax.vmap(one)
    return one(values).replace(dtype=np.dtype(q.dtype))


def _everywhere(still: jax.Array, q: QuantizedArray) -> jax.Array:
    """Returns whether no rank's part of the weight moved; blocks may span ranks."""
    assert q.sharding is not None
    axes = tuple(name for dim in (0, 1) for name in q.sharding.order(dim))
    if not axes or (explicit.varying(explicit.axis_index(axes[0])) and not explicit.varying(still)):
        return still
    return explicit.max_over((~still).astype(jnp.int32), axes) == 0
