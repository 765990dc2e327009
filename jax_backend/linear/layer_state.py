"""What layers carry from step to step, as one tree for a model: recipes, delayed scaling's histories, random keys."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from blockfp import patterns, recipes
from blockfp.definition.rounding import Key, fold_in
from blockfp.recipes import ByPath, Recipe, RecipeName

from ..arrays.array import is_quantized
from ..implementations import ops
from ..implementations.carriers import Shares
from ..params.params import Filter, check_format, is_matrix, none_taken
from ..params.trees import describe, map_with_path
from . import delayed
from .delayed import DelayedState, delayed_state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerState(Shares):
    """A layer's recipe and what the recipe needs beside the weight; `init_state` makes a model's. None where it needs nothing.

    Attributes:
        recipe: static, so a tree of states says how a model is quantized.
        scaling: delayed scaling's histories and scales.
        rng_key: uint32 [..., 2], of stochastic rounding. Stacks of layers (scan, vmap) have leading axes.
        rng_step: int32 [...], counts the calls. Each call's key is `fold_in(rng_key, rng_step)`.
    """

    recipe: Recipe = field(metadata={"static": True})
    scaling: DelayedState | None
    rng_key: jax.Array | None
    rng_step: jax.Array | None

    def differentiated(self) -> DelayedState | None:
        return self.scaling

    def at(self, point: DelayedState | None) -> LayerState:
        return replace(self, scaling=point)

    def shared(self) -> LayerState:
        return replace(self, scaling=self.scaling and self.scaling.shared())

    def unshared(self) -> LayerState:
        return replace(self, scaling=self.scaling and self.scaling.unshared())

    def _key(self) -> jax.Array | None:
        """Returns the key of the next call."""
        if self.rng_key is None or self.rng_step is None:
            return None
        if self.rng_step.ndim:
            raise ValueError(f"state belongs to a stack of {self.rng_step.shape} layers: use jax.vmap or lax.scan")
        return _folded(self.rng_key, self.rng_step)

    def _after(self, scaling: DelayedState | None) -> LayerState:
        return replace(self, scaling=scaling, rng_step=None if self.rng_step is None else self.rng_step + 1)


@patterns.takes_filter
def init_state(
    recipe: Recipe | RecipeName | ByPath,
    params: Any,
    *,
    key: Key | None = None,
    filter_fn: Filter = is_matrix,
    grouped_fn: Filter | None = None,
) -> Any:
    """Returns a tree like `params` with a `LayerState` for each weight, and None for other leaves and in high precision.

    Layers take a state in place of `recipe`, `key` and `state`, and return it for the next step, whatever the recipe needs:

        y, state["up"] = bfp.linear(x, params["up"], state=state["up"])

    So a model changes its recipes here alone. Differentiate with respect to the states too, and once a step call
    `update_scales`, which changes only states with delayed scaling:

        (loss, state), (grads, seen) = bfp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, state, batch)
        state = bfp.update_scales(state, seen)

    Args:
        recipe: as for `quantize_params`.
        params: parameters, quantized or not. Weights [..., out, in] with leading axes are stacks of layers, for scan or vmap.
        key: an integer seed, two uint32 words or a `jax.random.key`, for recipes that round stochastically. Each weight's key
            is derived from it by the weight's path and place in its stack.
        filter_fn: selects the leaves that are weights, as for `quantize_params`.
        grouped_fn: selects weights [..., groups, out, in] of `grouped_linear`, whose groups share a state.

    Raises:
        TypeError, ValueError: as `quantize_params`, or a recipe needs a key.

    Example:
        >>> state = bfp.init_state("mxfp8", params)
    """
    words = None if key is None else jnp.asarray(ops.key_array(key))
    found: list[tuple[str, Any]] = []
    map_with_path(lambda path, leaf: found.append((path, leaf)), params)
    taken = {path for (path, _), wanted in zip(found, patterns.select(filter_fn, found), strict=True) if wanted}
    weights = [(path, leaf) for path, leaf in found if path in taken]
    grouped = {path for path, leaf in weights if grouped_fn is not None and grouped_fn(path, leaf)}
    recipes.check_paths(recipe, [path for path, _ in found])
    if not weights:
        raise none_taken("params", [path for path, _ in found])

    def one(path: str, leaf: Any) -> LayerState | None:
        chosen = recipes.resolve(recipe, path) if path in taken else None
        if chosen is None:
            return None
        chosen = recipes.for_linear(chosen)
        axes = 2 + (path in grouped)
        if getattr(leaf, "ndim", 0) < axes:
            raise ValueError(f"a weight has {axes} or more axes, got {describe(leaf)}: leave it out by filter_fn")
        if is_quantized(leaf):
            check_format(leaf, chosen)
        stack = leaf.shape[:-axes]
        return _first(chosen, None if words is None else _folded(words, zlib.crc32(path.encode())), stack)

    return map_with_path(one, params)


def _first(recipe: Recipe, words: Any, stack: tuple[int, ...]) -> LayerState:
    scaling = rng_key = rng_step = None
    if recipe.delayed is not None:
        scaling = jax.tree.map(lambda part: jnp.zeros((*stack, *part.shape), part.dtype), delayed_state(recipe))
    if recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic:
        if words is None:
            raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass a key")
        rng_key, rng_step = words, jnp.zeros(stack, jnp.int32)
        if stack:
            places = jnp.arange(rng_step.size, dtype=jnp.int32)
            rng_key = jax.vmap(partial(_folded, words))(places).reshape(*stack, 2)
    return LayerState(recipe, scaling, rng_key, rng_step)


def _folded(key: Any, data: Any) -> jax.Array:
    """Computes `fold_in` as uint32 [2]."""
    return jnp.asarray(fold_in(key, data)).view(jnp.uint32)


def takes_layer_state(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a layer take a `LayerState` as `state`, in place of recipe and key, and return the one after the call."""

    @wraps(layer)
    def run(*operands: Any, recipe: Any = None, key: Any = None, state: Any = None, **options: Any) -> Any:
        if not isinstance(state, LayerState):
            return layer(*operands, recipe=recipe, key=key, state=state, **options)
        if key is not None:
            raise ValueError("key: the state holds the layer's key")
        if recipe is not None and recipes.for_linear(recipe) != state.recipe:
            raise ValueError(f"recipe = {recipe}: the state is of {state.recipe}; leave recipe out, or make the state with it")
        made = layer(*operands, recipe=state.recipe, key=state._key(), state=state.scaling, **options)
        y, scaling = made if isinstance(made, tuple) else (made, state.scaling)
        return y, state._after(scaling)

    return run


def update_scales(states: Any, seen: Any, recipe: Recipe | RecipeName | None = None, *, axes: Any = ()) -> Any:
    """Updates delayed scaling's histories and scales; call it once per optimizer step.

    Args:
        states: a tree of `LayerState` (and None), or of `DelayedState`, as returned by the layers.
        seen: their cotangents, in the same tree structure.
        recipe: the recipe of these layers; a `LayerState` knows its own. Those without delayed scaling stay as they are.
        axes: inside shard_map, the mesh axes whose ranks share a scale: data-parallel axes and axes that cut activations. One
            integer max-reduction handles all amaxes of a recipe.

    Raises:
        ValueError: the recipe doesn't use delayed scaling; an axis is unknown; a leaf is not a state of this recipe, has no
            cotangent of its shape, or has amaxes that were added or averaged (the message names its path). Under tracing the
            gradient's scale becomes NaN instead.
    """
    found = [leaf for leaf in jax.tree.leaves(states, is_leaf=_is_state) if isinstance(leaf, LayerState)]
    if not found and (recipe is not None or jax.tree.leaves(states)):
        return delayed.update_scales(states, seen, recipe, axes=axes)
    if recipe is not None:
        raise ValueError(f"recipe = {recipe}: each of these states holds its own, leave recipe out")
    scaled: dict[Recipe, dict[str, tuple[Any, Any]]] = {}

    def sort(path: str, state: Any, its: Any) -> None:
        if not isinstance(state, LayerState):
            raise ValueError(f"states must be a tree of LayerState, got {describe(state)}")
        if state.scaling is not None:
            scaled.setdefault(state.recipe, {})[path] = state.scaling, its

    map_with_path(sort, states, seen, is_leaf=_is_state)
    updated: dict[str, DelayedState] = {}
    for own, pairs in scaled.items():
        before, its = ({path: pair[i] for path, pair in pairs.items()} for i in range(2))
        updated |= delayed.update_scales(before, its, own, axes=axes)
    return map_with_path(lambda path, state: replace(state, scaling=updated.get(path)), states, is_leaf=_is_state)


def _is_state(leaf: object) -> bool:
    return isinstance(leaf, LayerState)
