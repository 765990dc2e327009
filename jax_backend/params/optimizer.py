"""AdamW, Adam and any optax optimizer on parameter trees with quantized leaves: fp32 masters, requantized after each step.

Both are pairs of functions like optax's `GradientTransformation`, and need nothing of optax themselves. Gradients have plain
arrays where parameters are quantized (`value_and_grad`). A leaf that isn't float32 has a master; its update is its new value
(`Replacement`), because codes can't be added to. `apply_updates` takes both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from blockfp.definition import adamw as formulas
from blockfp.sharding import plans

from ..arrays import sharded
from ..arrays.array import QuantizedArray, is_quantized, with_derivative
from ..implementations import explicit
from ..implementations.derivatives import without_gradient
from .params import dequantize_params, quantize_weight, shares_scale
from .trees import describe, map_with_path


class Optimizer(NamedTuple):
    """An optimizer as optax has them.

    Attributes:
        init: from parameters to a state; (parameters, originals) where the arrays that were quantized are still there, which
            masters then begin with.
        update: from (gradients, state, parameters) to (updates, state); updates go to `apply_updates`. Named arguments that
            an optax optimizer wants besides are passed on to it.
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
    """The update of a leaf with a master: its new value. (optax.apply_updates refuses it; `apply_updates` takes it.)

    What wraps an optimizer may multiply updates with 0 or 1, or take zeros instead (optax.MultiSteps): then nothing is
    replaced. (optax.apply_if_finite takes gradients instead, and so belongs inside `with_masters`.)

    Attributes:
        value: the new value.
        applies: whether the leaf is replaced; a bool, or an array of one.
    """

    value: jax.Array | QuantizedArray
    applies: bool | jax.Array = True

    def tree_flatten(self):
        # The value's own leaves: who makes zeros like updates shall not find a quantized array among them.
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
        masters: float32, of the structure of gradients; None where the parameter is float32 itself.
        inner: the optimizer's own state.
    """

    masters: Any
    inner: Any


class AdamState(NamedTuple):
    """The state of AdamW: the number of steps done (int32), and both moments (float32)."""

    step: jax.Array
    first: Any
    second: Any


for _state in (MasterState, AdamState):
    jax.export.register_namedtuple_serialization(_state, serialized_name=f"blockfp.jax.{_state.__name__}")


def apply_updates(params: Any, updates: Any) -> Any:
    """Updates parameters after a step: plain updates are added, replacements replace.

    Raises:
        TypeError: a quantized leaf has an update to add; the message names its path.
        ValueError: an update of another shape or format than the parameter's, or a tree that isn't made alike.
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

    It works on fp32 masters, whose values are quantized after each step; a leaf whose master didn't move keeps its codes.
    Inside shard_map each rank has its part, and amaxes are reduced as the leaf's sharding says.

    Named arguments of `update` go on to it. It sees masters: a `value_fn` among them (optax.lbfgs) is called with parameters
    made of those as after a step, and a `grad` is as the gradients. For optax.lookahead parameters are `LookaheadParams`.

    Args:
        optimizer: an optax `GradientTransformation`, or one of this package.

    Example:
        >>> optimizer = bfp.with_masters(optax.chain(optax.clip(1.0), optax.lion(1e-4)))
    """

    def step(gradients, inner, weights, extra):
        updates, inner = optimizer.update(gradients, inner, weights, **extra)
        moved = jax.tree.map(lambda weight, update: weight + update, weights, updates)
        # A NaN counts as moved.
        still = jax.tree.map(lambda old, new: ~jnp.any(old != new), weights, moved)
        return moved, still, inner

    return _on_masters(optimizer.init, step)


Setting = float | jax.Array
"""A number of an optimizer; an array, also a traced one, as optax.inject_hyperparams gives it."""

Schedule = Callable[[jax.Array], Any]
"""From the number of steps done to a setting, as optax has them."""


def adamw(
    learning_rate: Setting | Schedule,
    b1: Setting = 0.9,
    b2: Setting = 0.999,
    eps: Setting = 1e-8,
    *,
    weight_decay: Setting | Schedule = 1e-4,
) -> Optimizer:
    """AdamW with fp32 masters and moments, for trees with quantized leaves: the arguments of `optax.adamw`, the formulas of
    `blockfp.torch.AdamW`.

    Args:
        learning_rate: a number, or a function of the number of steps done (an optax schedule).
        b1, b2: decay of the first and of the second moment, at least 0 and below 1.
        eps: added to the root of the second moment.
        weight_decay: a number or a schedule, multiplied with the learning rate; it goes to every leaf. (PyTorch's default is
            1e-2.)

    A step with learning rate 0 leaves codes and scales as they are. Inside shard_map see `with_masters`.

    Raises:
        TypeError: a setting that is no number.
        ValueError: a negative one, or a decay of 1 or more.
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=True)


def adam(
    learning_rate: Setting | Schedule,
    b1: Setting = 0.9,
    b2: Setting = 0.999,
    eps: Setting = 1e-8,
    *,
    weight_decay: Setting | Schedule = 0.0,
) -> Optimizer:
    """Adam: as `adamw`, but that weight decay is a term of the gradient (L2), as in `blockfp.torch.Adam`."""
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=False)


def _adam(learning_rate, b1, b2, eps, weight_decay, *, decoupled: bool) -> Optimizer:
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if not callable(value):
            _check_setting(name, value)
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps)):
        _check_setting(name, value, below=math.inf if name == "eps" else 1)

    def init(weights):
        # Zeros of their own for each: a step may be given both to overwrite (donate_argnums).
        first, second = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), first, second)

    def step(gradients, inner: AdamState, weights, extra):
        # As optax's own, it has no use for what other optimizers are told.
        del extra
        rate = jnp.asarray(learning_rate(inner.step) if callable(learning_rate) else learning_rate, jnp.float32)
        decay = weight_decay(inner.step) if callable(weight_decay) else weight_decay
        count = inner.step + 1
        c = formulas.coefficients(count.astype(jnp.float32), rate, (b1, b2), eps, decay, decoupled=decoupled)
        new = jax.tree.map(lambda w, m, v, g: formulas.update(w, m, v, g, c), weights, inner.first, inner.second, gradients)
        moved, first, second = (jax.tree.map(lambda _, each, i=i: each[i], weights, new) for i in range(3))
        still = jax.tree.map(lambda _: formulas.stands_still(c), weights)
        return moved, still, AdamState(count, first, second)

    return _on_masters(init, step)


def _check_setting(name: str, value: Any, below: float = math.inf) -> None:
    """Raises unless a setting means something; arrays are not looked at."""
    if hasattr(value, "dtype") and not isinstance(value, Real):
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    if not 0 <= float(value) < below:
        raise ValueError(f"{name} must be 0 or more{'' if below == math.inf else f' and below {below}'}, got {value!r}")


def _on_masters(init_inner: Callable, step: Callable) -> Optimizer:
    """Makes an optimizer of `step`: (gradients, state, weights, extra) -> (weights, which stand still, state), all in fp32."""

    def init(params, originals=None):
        map_with_path(_check_whole, params)
        masters = map_with_path(_new_master, params, params if originals is None else originals)
        return MasterState(masters, init_inner(_weights(params, masters)))

    def update(gradients, state: MasterState, params=None, **extra):
        check_state(state, MasterState)
        if params is None:
            raise ValueError("update needs the parameters: update(gradients, state, params)")
        map_with_path(_check_whole, params)
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
    """Raises TypeError where a wrapper (optax.masked, multi_transform) has taken codes, or scales, out of a quantized leaf."""
    if is_quantized(param) and not all(hasattr(part, "dtype") for part in (param.codes, param.scales)):
        raise TypeError(
            "labels or a mask speak of its codes and scales one by one: make them of whole leaves, jax.tree.map(.., params, "
            "is_leaf=lambda leaf: isinstance(leaf, blockfp.jax.QuantizedArray)); or put optax.multi_transform or masked inside "
            "blockfp.jax.with_masters, which shows it plain arrays"
        )


def check_state(state: Any, kind: type) -> None:
    """Raises TypeError unless the state is what the optimizer's `init` makes."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be the {kind.__name__} of this optimizer's init, got {type(state).__name__}")


def _is_own_master(param: Any) -> bool:
    return not is_quantized(param) and param.dtype == jnp.float32


def _new_master(path: str, param, original):
    if not is_quantized(param) and not _is_float(param):
        raise TypeError(f"an optimizer moves float and quantized arrays, got {describe(param)}: leave it out of the parameters")
    if _is_own_master(param):
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
            return param
        if master.shape != param.shape:
            raise ValueError(f"the state belongs to other parameters: its master has shape {master.shape}, not {param.shape}")
        return master

    return map_with_path(weight, params, masters)


def _gradients(params, gradients, weights):
    # Those of optax.lookahead are gradients of the fast ones of its pair of parameters.
    of = lambda tree: getattr(tree, "fast", tree) if isinstance(params, tuple) else tree  # noqa: E731
    return map_with_path(_check_gradient, of(params), gradients, of(weights))


def _of_weights(function: Callable, params) -> Callable:
    """Turns a function of parameters into one of their weights in fp32, with a straight-through gradient."""

    def param(path: str, like, weight):
        if not is_quantized(like):
            return weight.astype(like.dtype)
        return with_derivative(_requantized(like, jax.lax.stop_gradient(weight)), weight)

    return lambda weights, *args, **kwargs: function(map_with_path(param, params, weights), *args, **kwargs)


def _check_gradient(path: str, param, gradient, weight) -> jax.Array:
    if is_quantized(gradient) or not _is_float(gradient) or gradient.shape != weight.shape:
        raise ValueError(f"the gradient must be a float array of shape {weight.shape}, got {describe(gradient)}")
    return gradient.astype(jnp.float32)


def _update(path: str, param, weight: jax.Array, moved: jax.Array, still: jax.Array):
    if _is_own_master(param):
        return moved - weight
    if not is_quantized(param):
        return Replacement(moved.astype(param.dtype))
    if param.sharding is not None:
        moved = without_gradient(moved, _NO_GRADIENT)
    new = _requantized(param, moved)
    if param.sharding is not None:
        still = _everywhere(still, param)
    new = jax.tree.map(lambda old, new: jnp.where(still, old, new), param.without_carrier(), new)
    return Replacement(with_derivative(new, moved) if param.sharding is None else new)


_NO_GRADIENT = "an update of a sharded quantized weight has no derivative: differentiate through updates of unsharded ones"


def _requantized(q: QuantizedArray, values: jax.Array) -> QuantizedArray:
    """Quantizes new values in q's format and place, with q's nominal dtype."""
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
    """Returns True where no rank's part of the weight moved: its blocks may lie on several."""
    assert q.sharding is not None
    axes = tuple(name for dim in (0, 1) for name in q.sharding.order(dim))
    if not axes or (explicit.varying(explicit.axis_index(axes[0])) and not explicit.varying(still)):
        return still
    return explicit.max_over((~still).astype(jnp.int32), axes) == 0
