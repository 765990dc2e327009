"""AdamW and Adam, without optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from blockfp.definition import adamw as formulas
from blockfp.definition.adamw import Coefficients, Operations
from blockfp.definition.rounding import Key

from ..arrays.array import is_quantized, label_of
from .ieee import ieee
from .moments import Storage, check_whole
from .optimizer import Optimizer, on_masters
from .trees import check_alike

Setting = float | jax.Array
"""An optimizer setting: a number, or an array, which may be traced, as from optax.inject_hyperparams."""

Schedule = Callable[[jax.Array], Any]
"""A function from the number of completed steps to a setting, like optax's schedules."""


class AdamState(NamedTuple):
    """The state of AdamW, Adam and Muon.

    Attributes:
        step: number of completed steps, int32.
        first: first moments, and Muon's momenta: float32, bfloat16, or a `QuantizedArray` for FP8.
        second: second moments; in FP8 their square roots. None for Muon's matrices.
    """

    step: jax.Array
    first: Any
    second: Any


jax.export.register_namedtuple_serialization(AdamState, serialized_name=f"blockfp.jax.{AdamState.__name__}")


def adamw(
    learning_rate: Setting | Schedule,
    b1: Setting = 0.9,
    b2: Setting = 0.999,
    eps: Setting = 1e-8,
    eps_root: Setting = 0.0,
    mu_dtype: Any = None,
    weight_decay: Setting | Schedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    moments: str = "float32",
    key: Key | None = None,
) -> Optimizer:
    """AdamW with fp32 masters, for trees with quantized leaves.

    Takes the arguments of `optax.adamw` and uses the formulas of `blockfp.torch.AdamW`.

    Args:
        learning_rate: a number, or a function of the number of completed steps (an optax schedule).
        b1, b2: decay of the first and second moment, in [0, 1).
        eps: added to the square root of the second moment.
        eps_root: added to the second moment under the root.
        mu_dtype: dtype in which the first moment is stored, rounded to nearest; float32 by default.
        weight_decay: a number or a schedule, multiplied by the learning rate. (PyTorch's default is 1e-2.)
        mask: the leaves to decay: a tree of bools, where one may cover a subtree, or a function from parameters, whose
            quantized leaves are then plain arrays, to such a tree; all leaves by default.
        nesterov: whether the first moment looks one step ahead (NAdamW).
        moments: "float32", or "bfloat16" or "fp8" to save memory, rounded stochastically as in `blockfp.torch.AdamW`. With
            equal gradients, the same bits as there. Needs whole parameters: outside of shard_map (`named_shardings`).
        key: seed, or two uint32 words, of that rounding; 0 by default. Random bits depend on the key, the step and the leaf's
            position in the tree.

    A step with learning rate 0 doesn't change codes and scales. For shard_map see `with_masters`.

    Raises:
        TypeError: a setting is not a number, or the mask has separate entries for codes and scales.
        ValueError: a setting is negative or unknown, or a moment decay is 1 or more.
    """
    rule = AdamRule(learning_rate, b1, b2, eps, eps_root, weight_decay, nesterov, True, Storage.of(moments, mu_dtype, key))
    return _optimizer(rule, mask)


def adam(
    learning_rate: Setting | Schedule,
    b1: Setting = 0.9,
    b2: Setting = 0.999,
    eps: Setting = 1e-8,
    eps_root: Setting = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    weight_decay: Setting | Schedule = 0.0,
    moments: str = "float32",
    key: Key | None = None,
) -> Optimizer:
    """Adam: like `adamw`, but weight decay is a term of the gradient (L2), as in `blockfp.torch.Adam`."""
    rule = AdamRule(learning_rate, b1, b2, eps, eps_root, weight_decay, nesterov, False, Storage.of(moments, mu_dtype, key))
    return _optimizer(rule, None)


class Step(NamedTuple):
    """A step's number, from 1, whether it is known to move weights, the constants of leaves with and without weight decay."""

    number: jax.Array
    moves: bool
    decayed: Coefficients
    plain: Coefficients
    ahead: tuple[Any, Any] | None
    operations: Operations


@dataclass(frozen=True)
class AdamRule:
    """AdamW's or Adam's rule for a leaf."""

    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    weight_decay: Any
    nesterov: bool
    decoupled: bool
    storage: Storage

    def __post_init__(self):
        for name in ("learning_rate", "weight_decay"):
            if not callable(value := getattr(self, name)):
                check_setting(name, value)
        for name in ("b1", "b2", "eps", "eps_root"):
            check_setting(name, getattr(self, name), below=1 if name in ("b1", "b2") else math.inf)

    def begin(self, done: jax.Array) -> Step:
        """Returns the constants of the step after `done` steps."""
        rate, decay = at_step(self.learning_rate, done), at_step(self.weight_decay, done)

        def constants(number: Any, rate: Any, decay: Any, b1: Any, b2: Any) -> tuple[Coefficients, Any]:
            c = formulas.coefficients(number, rate, (b1, b2), self.eps, decay, decoupled=self.decoupled)
            if not self.nesterov:
                return c, None
            factors = formulas.blend(number, b1, nesterov=True, bias_correction=True)
            return c, (-rate * factors[0], -rate * factors[1])

        c, ahead = rounded_once(constants, done + 1, rate, decay, self.b1, self.b2)
        moves = isinstance(rate, float) and np.float32(rate) != 0
        return Step(done + 1, moves, c, c._replace(decay=1.0, l2=0.0), ahead, ieee(done))

    def take(self, step: Step, keys: Any, decayed: bool, weight, first, second, gradient) -> tuple[Any, Any, Any, Any]:
        """Returns (weight, whether it is unchanged, False if that is known, first moment, second moment) of a leaf."""
        first, second = self.storage.load(first, second=False), self.storage.load(second, second=True)
        c = step.decayed if decayed else step.plain
        options = {"ahead": step.ahead, "eps_root": self.eps_root, "operations": step.operations}
        moved, first, second = formulas.update(weight, first, second, gradient, c, **options)
        first, second = self.storage.store(first, keys[0], second=False), self.storage.store(second, keys[1], second=True)
        return moved, not step.moves and formulas.stands_still(c), first, second


def _optimizer(rule: AdamRule, mask: Any) -> Optimizer:
    def init(weights):
        first, second = (jax.tree.map(lambda w, i=i: rule.storage.zeros(w, second=i == 1), weights) for i in range(2))
        return AdamState(jnp.zeros((), jnp.int32), first, second)

    def step(gradients, inner: AdamState, weights, extra):
        # Like optax's own Adam, ignore arguments for other optimizers.
        del extra
        begun, chosen = rule.begin(inner.step), bools_of("mask", mask, weights)
        return take_all(partial(rule.take, begun), rule.storage, chosen, gradients, inner, weights)

    return on_masters(init, step, _needing_whole(rule.storage))


def _needing_whole(storage: Storage) -> Callable[[Any], None] | None:
    return (lambda param: check_whole(f"moments={storage.moments!r}", param)) if storage.rounds else None


def take_all(take: Callable, storage: Storage, kinds: list, gradients: Any, inner: AdamState, weights: Any) -> tuple:
    """Steps each leaf by take(keys, kind, weight, first, second, gradient); returns the result of `on_masters`'s `step`.

    `keys` are those of both moments, `kinds` has an entry for each leaf.
    """
    leaves, structure = jax.tree.flatten(weights)
    keys: Any = storage.keys(inner.step + 1, len(leaves))
    keys = [(None, None)] * len(leaves) if keys is None else keys
    trees = (structure.flatten_up_to(tree) for tree in (inner.first, inner.second, gradients))
    taken = [take(*row) for row in zip(keys, kinds, leaves, *trees, strict=True)]
    moved, still, first, second = (structure.unflatten([each[i] for each in taken]) for i in range(4))
    return moved, still, AdamState(inner.step + 1, first, second)


def at_step(setting: Any, done: jax.Array) -> Any:
    """Returns a setting, or a schedule's value after `done` steps: a number, or a float32 array."""
    value = setting(done) if callable(setting) else setting
    return float(value) if isinstance(value, Real) else jnp.asarray(value, jnp.float32)


def rounded_once(constants: Callable[..., Any], *args: Any) -> Any:
    """Returns constants(*args), computed in float64 and rounded to float32, as PyTorch's constants are Python's numbers."""
    with jax.enable_x64(True):
        exact = constants(*(each if isinstance(each, Real) else jnp.asarray(each, jnp.float64) for each in args))
        return jax.tree.map(lambda each: each if isinstance(each, Real) else each.astype(jnp.float32), exact)


def bools_of(name: str, mask: Any, weights: Any) -> list[bool]:
    """Returns a mask's value for each leaf of `weights`; True without a mask."""
    if mask is None:
        return [True] * len(jax.tree.leaves(weights))
    mask = mask(weights) if callable(mask) else mask
    mask = jax.tree.map(lambda leaf: label_of(leaf) if is_quantized(leaf) else leaf, mask, is_leaf=is_quantized)
    try:
        check_alike(mask, weights)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return jax.tree.leaves(jax.tree.map(lambda chosen, part: jax.tree.map(lambda _: bool(chosen), part), mask, weights))


def check_setting(name: str, value: Any, below: float = math.inf) -> None:
    """Raises TypeError or ValueError for an invalid setting; arrays are not checked."""
    if hasattr(value, "dtype") and not isinstance(value, Real):
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    if not 0 <= float(value) < below:
        raise ValueError(f"{name} must be 0 or more{'' if below == math.inf else f' and below {below}'}, got {value!r}")
