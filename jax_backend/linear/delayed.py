"""Delayed scaling as explicit state: what a linear layer takes and gives back, and the step between optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockfp import recipes
from blockfp.definition import scaling
from blockfp.recipes import Operand, Recipe

from ..implementations import replication
from ..params.trees import describe, map_with_path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState:
    """Amax history and scale of a layer's input and gradient; float32. Stacks of layers (scan, vmap) have leading axes.

    `linear` gives back a state whose input history has the new amax. The gradient's amax is known in the backward only: it
    comes out as the cotangent of the state (entry 0 of `gradient_amax_history`), so differentiate with respect to it:

        (loss, state), (grads, seen) = bfp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, state, batch)
        state = bfp.update_scales(state, seen, recipe)

    A layer that runs several times in one step passes the state on from each call to the next; the largest amax then counts.
    vmap adds the cotangents of what it doesn't map, so a state under it is mapped too (`dot_general`'s batch axes share one).

    Attributes:
        input_amax_history: [..., history], newest first.
        input_scale: [...], what the input is multiplied with.
        gradient_amax_history: [..., history].
        gradient_scale: [...].
    """

    input_amax_history: jax.Array
    input_scale: jax.Array
    gradient_amax_history: jax.Array
    gradient_scale: jax.Array

    def after_forward(self, amax: jax.Array) -> DelayedState:
        """Records an amax, float32 of shape (), in the input history."""
        return replace(self, input_amax_history=scaling.record(self.input_amax_history, lax.stop_gradient(amax)))

    def cotangent(
        self, wanted: DelayedState, amax: Callable[[], jax.Array], later: Sequence[jax.Array], varies: replication.Axes | None
    ) -> DelayedState:
        """The cotangent of this state: the amax of a layer's gradient, or that of a later use.

        Args:
            wanted: a state with None where no cotangent is.
            amax: gives float32 of shape ().
            later: the cotangents of the state that the layer gave back, its leaves.
            varies: the mesh axes that this state varies over.
        """
        if not jax.tree.leaves(wanted):
            return wanted
        made = self._after_backward(amax(), jax.tree.structure(self).unflatten(later), varies)
        return jax.tree.map(lambda want, part: None if want is None else part, wanted, made, is_leaf=lambda x: x is None)

    def _after_backward(self, amax: jax.Array, later: DelayedState, varies: replication.Axes | None) -> DelayedState:
        # The largest of all uses counts, so a later use's goes on to an earlier one as a maximum and no sum.
        newest = scaling.record(later.gradient_amax_history, amax)[0]
        zeros = jax.tree.map(jnp.zeros_like, self)
        history = zeros.gradient_amax_history.at[0].set(replication.max_like(newest, varies))
        return replace(zeros, gradient_amax_history=history)


def delayed_state(recipe: Recipe | str) -> DelayedState:
    """The state of a layer before its first step: no history, scales of 1.

    Raises:
        ValueError: the recipe doesn't scale by history, or no recipe has this name.
    """
    recipe = _delayed(recipe)
    # Histories of their own: a step may be given both to overwrite (donate_argnums).
    own, gradients = (jnp.zeros((recipe.delayed.history,), jnp.float32) for _ in range(2))  # pyright: ignore[reportOptionalMemberAccess]
    return DelayedState(own, jnp.float32(1), gradients, jnp.float32(1))


def update_scales(states: Any, seen: Any, recipe: Recipe | str, *, axes: Sequence[str] = ()) -> Any:
    """Updates states for the next step: histories move on, scales follow from them. Once per optimizer step.

    Args:
        states: a tree of `DelayedState`, as the layers gave them back.
        seen: their cotangents, a tree alike.
        recipe: the recipe of these layers.
        axes: inside shard_map, the mesh axes whose ranks share a scale: data-parallel ones and those that cut activations. All
            amaxes of the tree go through one integer max-reduction.

    Raises:
        ValueError: the recipe doesn't scale by history, an axis is unknown, or a leaf is no state of this recipe or has no
            cotangent of its shape: the message names its path.
    """
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
        return its

    for name in axes:
        replication.axis_index(name)
    seen = map_with_path(check, states, seen, is_leaf=_is_state)
    leaves, tree = jax.tree.flatten(states, is_leaf=_is_state)
    observed = tree.flatten_up_to(seen)
    inputs = [_first(s.input_amax_history) for s in leaves]
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
        updated.append(DelayedState(*moved))
    return jax.tree.unflatten(tree, updated)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_each(state: DelayedState, count: int) -> DelayedState:
    """Repeats a state for each of `count` layers under vmap; `of_all` puts what they give back together."""
    return jax.tree.map(lambda part: jnp.broadcast_to(part, (count, *part.shape)), state)


@jax.custom_vjp
def of_all(states: DelayedState) -> DelayedState:
    """Joins the states of layers [count] that shared one: the largest amax of any counts."""
    return jax.tree.map(lambda part: jnp.max(part, axis=0), states)


# vmap would add the cotangents of a state that isn't mapped. They are amaxes, and a layer passes on the largest.
for_each.defvjp(lambda state, count: (for_each(state, count), None), lambda count, _, cotangent: (of_all(cotangent),))
of_all.defvjp(
    lambda states: (of_all(states), states.input_scale.shape[0]), lambda count, cotangent: (for_each(cotangent, count),)
)


def _largest_over(histories: list[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
    """Reduces the newest entries of histories [history, ...] to the largest over mesh axes, all in one reduction."""
    # Older entries are equal on all ranks. Where JAX keeps account of what varies it doesn't know that, until they are reduced.
    known = [not replication.varying(h) & set(axes) for h in histories]
    parts = [h[:1] if k else h for h, k in zip(histories, known, strict=True)]
    together = jnp.concatenate([part.reshape(-1) for part in parts])
    together = replication.max_over(together.view(jnp.int32), axes).view(jnp.float32)
    each = jnp.split(together, list(itertools.accumulate(part.size for part in parts))[:-1])
    reduced = [new.reshape(part.shape) for new, part in zip(each, parts, strict=True)]
    return [jnp.concatenate([new, h[1:]]) if k else new for new, h, k in zip(reduced, histories, known, strict=True)]


def _first(history: jax.Array) -> jax.Array:
    """Moves [..., history] to [history, ...], which the core works on."""
    return jnp.moveaxis(history, -1, 0)


def _is_state(leaf: object) -> bool:
    return isinstance(leaf, DelayedState)


def _delayed(recipe: Recipe | str) -> Recipe:
    recipe = recipes.for_linear(recipe)
    if recipe.delayed is None:
        raise ValueError(f"recipe {recipe} takes scales from the current amax and has no state; fp8_delayed has one")
    return recipe
