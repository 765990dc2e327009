"""Muon for trees with quantized leaves, without optax."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from blockfp.definition import adamw as formulas
from blockfp.definition import muon as definition
from blockfp.definition.muon import Settings
from blockfp.definition.rounding import Key

from ..implementations import explicit
from .adam import AdamRule, AdamState, Schedule, Setting, at_step, bools_of, check_setting, rounded_once, take_all
from .ieee import ieee
from .moments import Storage, check_whole
from .optimizer import Optimizer, on_masters


def muon(
    learning_rate: Setting | Schedule,
    ns_coeffs: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: Setting = 0.95,
    eps: Setting = 1e-8,
    weight_decay: Setting | Schedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adam_b1: Setting = 0.9,
    adam_b2: Setting = 0.999,
    adam_eps_root: Setting = 0.0,
    adam_weight_decay: Setting | Schedule = 0.0,
    adam_learning_rate: Setting | Schedule | None = None,
    consistent_rms: float | None = None,
    bias_correction: bool = True,
    ns_dtype: str = "float32",
    matrices: Any = None,
    moments: str = "float32",
    key: Key | None = None,
) -> Optimizer:
    """Muon with fp32 masters for matrices, AdamW for other leaves, as `optax.contrib.muon`.

    Matrices are [out, in], as in `blockfp.jax.linear`; optax's are [in, out], which matters to the ratio of learning rates
    alone. The formula is that of `blockfp.torch.Muon`, whose defaults are `bias_correction=False`, `ns_dtype="bfloat16"` and
    another weight decay. Both agree to rounding, because sums in matrix products depend on the library.

    Parameters must be whole: partition a step by `jax.jit` and `named_shardings`, not by shard_map.

    Args:
        learning_rate: a number, or a function of the number of completed steps (an optax schedule).
        ns_coeffs, ns_steps: coefficients and number of Newton-Schulz iterations.
        beta: decay of the momentum, in [0, 1).
        eps: least norm by which a matrix is divided, and Adam's eps.
        weight_decay, weight_decay_mask: of matrices; the mask is as `adamw`'s.
        mu_dtype: dtype in which momenta and first moments are stored, rounded to nearest; float32 by default.
        nesterov: whether momenta and first moments look one step ahead.
        adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_learning_rate: of other leaves; their learning rate is that of
            matrices by default.
        consistent_rms: multiply the learning rate by consistent_rms sqrt(max(out, in)) (0.2 in Moonlight) instead of
            sqrt(max(1, out / in)).
        bias_correction: blend gradient and momentum as if the momentum had not started at 0.
        ns_dtype: dtype of the iteration, "float32" or "bfloat16".
        matrices: the leaves that Muon steps: a tree of bools, where one may cover a subtree, or a function from parameters to
            such a tree. By default leaves of two axes, and of three, whose matrices are orthogonalized one by one (experts,
            layers of a scan). Leave out embeddings and the output layer, as in Adam's care.
        moments, key: as in `adamw`.

    Raises:
        TypeError: a setting is not a number, or a mask has separate entries for codes and scales.
        ValueError: a setting is out of range or unknown; later, a leaf of less than two axes is taken for a matrix, or
            parameters are a rank's part.
    """
    settings = Settings(beta, nesterov, bias_correction, ns_coeffs, ns_steps, eps, ns_dtype)
    definition.check_settings(settings)
    storage = Storage.of(moments, mu_dtype, key)
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    of_adam = AdamRule(adam_rate, adam_b1, adam_b2, eps, adam_eps_root, adam_weight_decay, nesterov, True, storage)
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if not callable(value):
            check_setting(name, value)
    if consistent_rms is not None:
        check_setting("consistent_rms", consistent_rms)

    def init(weights):
        leaves, structure = jax.tree.flatten(weights)
        chosen = _chosen(matrices, weights)
        first = [storage.zeros(weight, second=False) for weight in leaves]
        second = [None if muon else storage.zeros(w, second=True) for w, muon in zip(leaves, chosen, strict=True)]
        return AdamState(jnp.zeros((), jnp.int32), structure.unflatten(first), structure.unflatten(second))

    def step(gradients, inner: AdamState, weights, extra):
        del extra
        begun, decayed = of_adam.begin(inner.step), bools_of("weight_decay_mask", weight_decay_mask, weights)
        kinds = list(zip(_chosen(matrices, weights), decayed, strict=True))
        rate, decay, operations = at_step(learning_rate, inner.step), at_step(weight_decay, inner.step), ieee(inner.step)
        blend = partial(formulas.blend, nesterov=nesterov, bias_correction=bias_correction)
        factors = rounded_once(blend, begun.number, beta)

        def take(keys, kind, weight, first, second, gradient):
            is_matrix, decayed = kind
            if not is_matrix:
                return of_adam.take(begun, keys, True, weight, first, second, gradient)
            zero = jnp.zeros_like(weight)
            c = definition.momentum_coefficients(settings)
            momentum, _, _ = formulas.update(zero, storage.load(first, second=False), zero, gradient, c, operations=operations)
            direction = _orthogonal(definition.blended(momentum, gradient, factors), settings)
            rows, columns = weight.shape[-2:]
            ratio = definition.ratio(rows, columns, consistent_rms)
            c = rounded_once(partial(definition.coefficients, ratio=ratio), rate, decay if decayed else 0.0)
            moved, _, _ = formulas.update(weight, zero, zero, direction, c, operations=operations)
            return moved, jnp.asarray(formulas.stands_still(c)), storage.store(momentum, keys[0], second=False), None

        return take_all(take, storage, kinds, gradients, inner, weights)

    return on_masters(init, step, partial(check_whole, "muon"))


def _chosen(matrices: Any, weights: Any) -> list[bool]:
    """Returns for each leaf whether Muon steps it."""
    leaves = jax.tree.leaves(weights)
    if matrices is None:
        return [leaf.ndim in (2, 3) for leaf in leaves]
    chosen = bools_of("matrices", matrices, weights)
    flat = next((leaf.shape for leaf, muon in zip(leaves, chosen, strict=True) if muon and leaf.ndim < 2), None)
    if flat is not None:
        raise ValueError(f"matrices: a leaf of shape {flat} is no matrix: choose leaves of two or more axes")
    return chosen


def _orthogonal(direction: jax.Array, settings: Settings) -> jax.Array:
    """Orthogonalizes each matrix of a leaf, float32 [..., out, in]."""

    def each(x: jax.Array) -> jax.Array:
        one = partial(definition.orthogonalize, settings=settings, addmm=_addmm)
        for _ in range(x.ndim - 2):
            one = jax.vmap(one)
        return one(x.astype(settings.ns_dtype)).astype(jnp.float32)

    mesh = explicit.mesh_of(direction)
    if mesh is None or 0 in direction.shape:
        return each(direction)
    return explicit.left_to_xla(each, mesh, PartitionSpec(*explicit.spec_of(direction)), direction)


def _addmm(x: jax.Array, a: jax.Array, b: jax.Array, *, beta: float, alpha: float) -> jax.Array:
    product = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * beta + product * alpha).astype(x.dtype)
