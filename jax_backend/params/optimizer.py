"""AdamW, and any optax optimizer, on parameter trees with quantized leaves: fp32 masters, requantized after each step.

Both are pairs of functions like optax's `GradientTransformation`, and need nothing of optax themselves. Gradients have plain
arrays where parameters are quantized (`value_and_grad`). A leaf that isn't float32 has a master; its update is its new value
(`Replacement`), because codes can't be added to. `apply_updates` takes both kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from blockfp import adamw as formulas
from blockfp import plans

from ..arrays import sharded
from ..arrays.array import QuantizedArray, carried, is_quantized
from ..implementations import replication
from ..implementations.derivatives import without_gradient
from .params import dequantize_params, quantize_weight, shares_scale
from .trees import describe, map_with_path


class Optimizer(NamedTuple):
    """An optimizer as optax has them.

    Attributes:
        init: from parameters to a state; (parameters, originals) where the arrays that were quantized are still there, which
            masters then begin with.
        update: from (gradients, state, parameters) to (updates, state); updates go to `apply_updates`.
    """

    init: Callable[..., Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replacement:
    """The update of a leaf with a master: its new value. (optax.apply_updates refuses it; `apply_updates` takes it.)"""

    value: jax.Array | QuantizedArray


class MasterState(NamedTuple):
    """What a wrapped optimizer keeps.

    Attributes:
        masters: float32, of the structure of gradients; None where the parameter is float32 itself.
        inner: the optimizer's own state.
    """

    masters: Any
    inner: Any


class AdamState(NamedTuple):
    """What AdamW keeps: the number of steps done (int32), and both moments (float32)."""

    step: jax.Array
    first: Any
    second: Any


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters after a step: plain updates are added, replacements replace.

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
        if new is not update:
            return new
        return (param + update).astype(param.dtype)

    return map_with_path(apply, params, updates)


def with_masters(optimizer: Any) -> Optimizer:
    """Any optax optimizer, for trees with quantized or 16-bit leaves.

    It works on fp32 masters, whose values are quantized after each step; a leaf whose master didn't move keeps its codes.
    Inside shard_map each rank has its part, and amaxes are reduced as the leaf's sharding says.

    Args:
        optimizer: an optax `GradientTransformation`.

    Example:
        >>> optimizer = bfp.with_masters(optax.chain(optax.clip(1.0), optax.lion(1e-4)))
    """

    def step(gradients, inner, weights):
        updates, inner = optimizer.update(gradients, inner, weights)
        moved = jax.tree.map(lambda weight, update: weight + update, weights, updates)
        # A NaN counts as moved.
        still = jax.tree.map(lambda old, new: ~jnp.any(old != new), weights, moved)
        return moved, still, inner

    return _on_masters(optimizer.init, step)


def adamw(
    lr: float | Callable[[jax.Array], jax.Array],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """AdamW with fp32 masters and moments, for trees with quantized leaves: the formulas of `blockfp.torch.AdamW`.

    Args:
        lr: learning rate, or a function of the number of steps done (an optax schedule).
        betas, eps, weight_decay: as in `torch.optim.AdamW`; weight decay goes to every leaf.

    A step with lr 0 leaves codes and scales as they are. Inside shard_map see `with_masters`.
    """
    formulas.check_settings(0.0 if callable(lr) else lr, betas, eps, weight_decay, "float32")

    def init(weights):
        # Zeros of their own for each: a step may be given both to overwrite (donate_argnums).
        first, second = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), first, second)

    def step(gradients, inner: AdamState, weights):
        rate = jnp.asarray(lr(inner.step) if callable(lr) else lr, jnp.float32)
        count = inner.step + 1
        c = formulas.coefficients(count.astype(jnp.float32), rate, betas, eps, weight_decay)
        new = jax.tree.map(lambda w, m, v, g: formulas.update(w, m, v, g, c), weights, inner.first, inner.second, gradients)
        moved, first, second = (jax.tree.map(lambda _, each, i=i: each[i], weights, new) for i in range(3))
        still = jax.tree.map(lambda _: formulas.stands_still(c), weights)
        return moved, still, AdamState(count, first, second)

    return _on_masters(init, step)


def _on_masters(init_inner: Callable, step: Callable) -> Optimizer:
    """An optimizer whose `step` (gradients, state, weights) -> (weights, which stand still, state) works on fp32 trees."""

    def init(params, originals=None):
        masters = map_with_path(_new_master, params, params if originals is None else originals)
        return MasterState(masters, init_inner(_weights(params, masters)))

    def update(gradients, state: MasterState, params=None):
        if params is None:
            raise ValueError("update needs the parameters: update(gradients, state, params)")
        weights = _weights(params, state.masters)
        gradients = map_with_path(_check_gradient, params, gradients, weights)
        moved, still, inner = step(gradients, state.inner, weights)
        updates = map_with_path(_update, params, weights, moved, still)
        masters = map_with_path(lambda _, param, new: None if _is_own_master(param) else new, params, moved)
        return updates, MasterState(masters, inner)

    return Optimizer(init, update)


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
    return Replacement(carried(new, moved) if param.sharding is None else new)


_NO_GRADIENT = "an update of a sharded quantized weight has no derivative: differentiate through updates of unsharded ones"


def _requantized(q: QuantizedArray, values: jax.Array) -> QuantizedArray:
    """The new values in q's format and place, with q's nominal dtype."""
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
    """Whether no rank's part of the weight moved: its blocks may lie on several."""
    assert q.sharding is not None
    axes = tuple(name for dim in (0, 1) for name in q.sharding.order(dim))
    if not axes or (replication.varying(replication.axis_index(axes[0])) and not replication.varying(still)):
        return still
    return replication.max_over((~still).astype(jnp.int32), axes) == 0
