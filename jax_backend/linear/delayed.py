"""Delayed scaling as explicit state, which layers take and return, and the update after each optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from blockfp import recipes
from blockfp.definition import scaling
from blockfp.recipes import Operand, Recipe, RecipeName

from ..implementations import amaxes, explicit
from ..implementations.carriers import Shares, carrier_of
from ..implementations.derivatives import attach, linear_map
from ..params.trees import describe, map_with_path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState(Shares):
    """Amax histories and scales of a layer's input and gradient, float32. Stacks of layers (scan, vmap) have leading axes.

    `linear` returns a state whose input history contains the new amax. The gradient's amax is only known in the backward, so it
    is returned as the state's cotangent (entry 0 of `gradient_amax_history`). Differentiate with respect to the state:

        (loss, state), (grads, seen) = bfp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, state, batch)
        state = bfp.update_scales(state, seen, recipe)

    If a layer runs several times per step, pass the state from each call to the next to record every input amax. Of several
    gradient amaxes the largest counts, also if calls share one state or if scan or vmap closes over it. Join the `seen` of
    several microbatches by `jax.tree.map(jnp.maximum, ..)`. `update_scales` rejects amaxes that were added or averaged;
    `jax.grad` adds those of several uses.

    Attributes:
        input_amax_history: [..., history], newest first.
        input_scale: [...], the input's multiplier; 0 before the first update, when casts use the current amax.
        gradient_amax_history: [..., history].
        gradient_scale: [...].
    """

    input_amax_history: jax.Array
    input_scale: jax.Array
    gradient_amax_history: jax.Array
    gradient_scale: jax.Array

    carrier: ClassVar[jax.Array | None] = None

    def after_forward(self, amax: jax.Array) -> DelayedState:
        """Records an amax, float32 of shape (), in the input history."""
        return replace(self, input_amax_history=scaling.record(self.input_amax_history, lax.stop_gradient(amax)))

    def shared(self) -> DelayedState:
        amax, scale = self.gradient_amax_history[..., 0], self.gradient_scale
        if not (isinstance(amax, Tracer) or isinstance(scale, Tracer)):
            return self
        carrier = carrier_of(amaxes.as_amax(_checked(amax, scale)))
        parts = {field.name: lax.stop_gradient(getattr(self, field.name)) for field in fields(DelayedState)}
        return _SharedState(**parts, carrier=carrier)

    def unshared(self) -> DelayedState:
        return self

    def differentiated(self) -> DelayedState:
        return self

    def at(self, point: DelayedState) -> DelayedState:
        return point


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SharedState(DelayedState):
    """A state that is differentiated. Gradient amaxes go to a carrier [...], whose cotangent is their maximum."""

    carrier: jax.Array | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def shared(self) -> DelayedState:
        return self

    def unshared(self) -> DelayedState:
        history = self.gradient_amax_history

        def rule(_, __, tangent):
            forward = lambda _, amax: [jnp.zeros_like(history).at[..., 0].set(amaxes.as_float(amax))]  # noqa: E731
            backward = lambda _, __, cotangents: amaxes.as_amax(cotangents[0][..., 0])  # noqa: E731
            return linear_map(forward, backward, (), tangent, [jax.typeof(history).to_tangent_aval()])

        history = attach(history, (), self.carrier, rule)
        return DelayedState(self.input_amax_history, self.input_scale, history, self.gradient_scale)


def given_back(state: DelayedState, given: DelayedState) -> DelayedState:
    """Returns the new state in the form of the caller's: with or without a carrier."""
    return state.unshared() if given.carrier is None else state


def _checked(amax: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns an amax, float32 [...], whose cotangent also sends its square root as the scale's cotangent.

    If amaxes are added or averaged later, the roots no longer match.
    """

    def backward(_, wanted, cotangents):
        made = cotangents[0], jnp.sqrt(cotangents[0])
        return tuple(None if want is None else each for want, each in zip(wanted, made, strict=True))

    def rule(_, __, tangents):
        like = [jax.typeof(amax).to_tangent_aval()]
        forward = lambda _, given: [jnp.zeros_like(amax) if given[0] is None else given[0]]  # noqa: E731
        return linear_map(forward, backward, (), tangents, like)

    return attach(amax, (), (carrier_of(amax), carrier_of(scale)), rule)


def cotangent(amax: Callable[[], jax.Array], later: Sequence[jax.Array], varies: explicit.Axes | None) -> jax.Array:
    """Returns the cotangent of a state's carrier: the maximum of this gradient's amax and those of later uses.

    `amax` computes float32 (); `later` are cotangents of the returned carrier; the state varies over the mesh axes `varies`.
    """
    newest = scaling.record(jnp.stack([amaxes.as_float(each) for each in later]), amax())[0]
    return amaxes.as_amax(explicit.max_like(newest, varies))


def delayed_state(recipe: Recipe | RecipeName) -> DelayedState:
    """Returns the state of a layer before its first step: empty histories, and scales of 0, which select the current amax.

    Raises:
        ValueError: the recipe doesn't use delayed scaling, or no recipe has this name.
    """
    recipe = _delayed(recipe)
    # Two separate arrays, because a step may donate both (donate_argnums).
    own, gradients = (jnp.zeros((recipe.delayed.history,), jnp.float32) for _ in range(2))  # pyright: ignore[reportOptionalMemberAccess]
    return DelayedState(own, jnp.float32(0), gradients, jnp.float32(0))


def update_scales(states: Any, seen: Any, recipe: Any, *, axes: Sequence[str]) -> Any:
    """Computes `layer_state.update_scales` for a tree of `DelayedState`."""
    recipe = _delayed(recipe)
    options = recipe.delayed
    assert options is not None

    def check(path: str, state, its) -> DelayedState:
        for part in (state, its):
            if not _is_state(part):
                raise ValueError(f"states and seen must be trees of DelayedState, got {describe(part)}")
        histories = state.input_amax_history.shape, its.gradient_amax_history.shape
        if histories[0] != histories[1] or histories[0][-1] != options.history:
            raise ValueError(
                f"a state of recipe {recipe} has histories [.., {options.history}], and seen alike, got {histories[0]} and "
                f"{histories[1]}"
            )
        return replace(its, gradient_scale=_mixed(its))

    for name in axes:
        explicit.axis_index(name)
    seen = map_with_path(check, states, seen, is_leaf=_is_state)
    leaves, tree = jax.tree.flatten(states, is_leaf=_is_state)
    observed = tree.flatten_up_to(seen)
    inputs = [_first(s.input_amax_history) for s in leaves]
    mixed = [its.gradient_scale for its in observed]
    gradients = [
        scaling.record(_first(s.gradient_amax_history), _first(o.gradient_amax_history)[0])
        for s, o in zip(leaves, observed, strict=True)
    ]
    histories = [*inputs, *gradients]
    if axes and histories:
        histories = _largest_over(histories, axes)
    updated = []
    for i, state in enumerate(leaves):
        moved = []
        pairs: tuple[tuple[jax.Array, jax.Array, Operand], ...] = (
            (histories[i], state.input_scale, "input"),
            (histories[len(leaves) + i], state.gradient_scale, "gradient"),
        )
        for history, scale, operand in pairs:
            format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
            if format is not None:
                history, scale = scaling.update(
                    history, scale, format.element, margin=options.margin, algorithm=options.algorithm
                )
            moved += [jnp.moveaxis(history, 0, -1), scale]
        input_history, input_scale, gradient_history, gradient_scale = moved
        gradient_scale = jnp.where(mixed[i], jnp.nan, gradient_scale)
        updated.append(DelayedState(input_history, input_scale, gradient_history, gradient_scale))
    return jax.tree.unflatten(tree, updated)


def _mixed(seen: DelayedState) -> jax.Array:
    """Returns where amaxes were added or averaged, so that the roots sent with them don't match; raises ValueError if
    concrete."""
    amax, root = seen.gradient_amax_history[..., 0], seen.gradient_scale
    # A cotangent that didn't pass `_checked` has no root.
    mixed = (root != 0) & (jnp.abs(jnp.sqrt(amax) - root) > 1e-5 * root)
    if not isinstance(mixed, Tracer) and mixed.any():
        raise ValueError(
            "amaxes in seen were added or averaged, but need the maximum: differentiate by blockfp.jax.grad or "
            "value_and_grad if a state is used several times (or pass it from call to call), combine microbatches by "
            "jax.tree.map(jnp.maximum, ..), and ranks by axes="
        )
    return mixed


def of_all(states: DelayedState) -> DelayedState:
    """Joins the states returned by layers [count] under vmap that share a state, by the maximum of their amaxes."""
    joined = {field.name: jnp.max(getattr(states, field.name), axis=0) for field in fields(DelayedState)}
    if states.carrier is None:
        return DelayedState(**joined)
    count, one = states.carrier.shape[0], amaxes.as_amax(joined["input_scale"])

    def rule(_, __, tangents):
        like = [jax.typeof(one)]
        forward = lambda _, each: [amaxes.largest(each)]  # noqa: E731
        return linear_map(forward, lambda _, __, of_one: amaxes.repeated(of_one[0], count), (), tangents, like)

    return _SharedState(**joined, carrier=attach(carrier_of(one), (), states.carrier, rule))


def _largest_over(histories: list[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
    """Reduces the newest entries of histories [history, ...] to their maximum over mesh axes, in one reduction."""
    # Older entries are equal on all ranks, but under varying-axes tracking JAX only knows that after a reduction.
    known = [not explicit.varying(h) & set(axes) for h in histories]
    parts = [h[:1] if k else h for h, k in zip(histories, known, strict=True)]
    together = jnp.concatenate([part.reshape(-1) for part in parts])
    together = explicit.max_over(together.view(jnp.int32), axes).view(jnp.float32)
    each = jnp.split(together, list(itertools.accumulate(part.size for part in parts))[:-1])
    reduced = [new.reshape(part.shape) for new, part in zip(each, parts, strict=True)]
    return [jnp.concatenate([new, h[1:]]) if k else new for new, h, k in zip(reduced, histories, known, strict=True)]


def _first(history: jax.Array) -> jax.Array:
    """Moves [..., history] to [history, ...], the core's layout."""
    return jnp.moveaxis(history, -1, 0)


def _is_state(leaf: object) -> bool:
    return isinstance(leaf, DelayedState)


def _delayed(recipe: Recipe | RecipeName) -> Recipe:
    recipe = recipes.for_linear(recipe)
    if recipe.delayed is None:
        raise ValueError(f"recipe {recipe} takes scales from the current amax and has no state; fp8_delayed has one")
    return recipe
