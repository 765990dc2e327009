"""Trees of parameters, whose leaves may be quantized: walked with paths, so that messages name the leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..arrays.array import is_quantized


def path_name(path: Sequence[Any]) -> str:
    """A leaf's path as names and numbers with dots between: "layers.0.weight"."""
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in path)


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] = is_quantized) -> Any:
    """Maps over leaves, quantized arrays being whole ones, as `jax.tree.map` does; `function` gets the path's name first.

    An exception names the path, also where one of `rest` isn't made like `tree`.
    """

    def named(path, *leaves):
        name = path_name(path)
        try:
            return function(name, *leaves)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or 'the tree'}: {error}") from error

    for other in rest:
        check_alike(tree, other, is_leaf)
    return jax.tree_util.tree_map_with_path(named, tree, *rest, is_leaf=is_leaf)


def check_alike(tree: Any, other: Any, is_leaf: Callable[[Any], bool] = is_quantized) -> None:
    """Raises ValueError, naming the path, where `other` isn't made like `tree`; where that has a leaf it may have a subtree."""
    try:
        jax.tree.structure(tree, is_leaf=is_leaf).flatten_up_to(other)
    except ValueError as error:
        # JAX's own message may name another path, or none.
        raise ValueError(_difference(tree, other, is_leaf, ()) or str(error)) from None


def _difference(tree: Any, other: Any, is_leaf: Callable[[Any], bool], path: tuple[Any, ...]) -> str | None:
    """Describes the first place at which `other` isn't made like `tree`; None where there is none."""
    children, made = _children(tree)
    if is_leaf(tree) or jax.tree_util.treedef_is_leaf(made):
        return None
    others, otherwise = _children(other)
    if made != otherwise:
        expected, got = (_made_of(*one) for one in ((tree, children), (other, others)))
        return f"{path_name(path) or 'the tree'}: trees differ: expected {expected}, got {got}"
    found = (_difference(child, its, is_leaf, (*path, *key)) for (key, child), (_, its) in zip(children, others, strict=True))
    return next(filter(None, found), None)


def _children(node: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """(key, child) of a tree's first level, and what it is made of; a leaf's only child is itself, without a key."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)


def _made_of(node: Any, children: list[tuple[tuple[Any, ...], Any]]) -> str:
    names = [path_name(key) for key, _ in children]
    return describe(node) if names == [""] else f"{type(node).__name__} of {', '.join(names) or 'nothing'}"


def describe(leaf: Any) -> str:
    """Describes a leaf in an error message: its format, dtype and shape; of something else its type."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{f'{leaf.format} of ' if is_quantized(leaf) else ''}{leaf.dtype} {tuple(leaf.shape)}"
