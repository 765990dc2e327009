"""Parameter trees with quantized leaves, traversed with paths so that errors name the leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blockfp.definition import checks

from ..arrays import identity
from ..arrays.array import QuantizedArray, is_quantized
from ..arrays.identity import Static


def path_name(path: Sequence[Any]) -> str:
    """Returns a leaf's path as names and numbers joined by dots: "layers.0.weight"."""
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in path)


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] = is_quantized) -> Any:
    """Like `jax.tree.map` over leaves, including whole quantized arrays; `function` first gets the path's name.

    Exceptions name the path, also if a tree in `rest` has another structure.
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
    """Raises ValueError, naming the path, if `other` has another structure than `tree`; it may have subtrees at `tree`'s
    leaves."""
    try:
        jax.tree.structure(tree, is_leaf=is_leaf).flatten_up_to(other)
    except ValueError as error:
        # JAX's own message may name another path, or none.
        raise ValueError(_difference(tree, other, is_leaf, ()) or str(error)) from None


def _difference(tree: Any, other: Any, is_leaf: Callable[[Any], bool], path: tuple[Any, ...]) -> str | None:
    """Describes the first structural difference between `other` and `tree`, or returns None."""
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
    """Returns (key, child) pairs of a tree's first level and its structure; a leaf is its own only child, without a key."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)


def _made_of(node: Any, children: list[tuple[tuple[Any, ...], Any]]) -> str:
    names = [path_name(key) for key, _ in children]
    return describe(node) if names == [""] else f"{type(node).__name__} of {', '.join(names) or 'nothing'}"


def describe(leaf: Any) -> str:
    """Describes a leaf for an error message: format, dtype and shape, or the type of another object."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{f'{leaf.format} of ' if is_quantized(leaf) else ''}{leaf.dtype} {tuple(leaf.shape)}"


# ---- restoring from files


def rebuild_params(tree: Any) -> Any:
    """Rebuilds quantized arrays from dictionaries of their parts in a tree.

    Orbax without a target and `flax.serialization.msgpack_restore` return such dictionaries: "codes_mxfp8_e4m3_bfloat16_64",
    "scales", ..; the name of the codes encodes format, dtype and columns.

    Args:
        tree: the restored tree; other leaves are unchanged.

    Raises:
        ValueError: parts are missing or don't match, the format is unknown, or the array was sharded over a mesh; the message
            names the path.
        TypeError: a part has a wrong dtype.

    Example:
        >>> params = bfp.rebuild_params(checkpointer.restore(path))
    """
    return map_with_path(lambda _, leaf: rebuild(leaf) if _is_parts(leaf) else leaf, tree, is_leaf=_is_parts)


def _is_parts(node: Any) -> bool:
    return isinstance(node, Mapping) and any(str(name).startswith("codes_") for name in node) and "scales" in node


def rebuild(parts: Mapping[str, Any]) -> QuantizedArray:
    """Makes a quantized array from a dictionary of parts, and checks it."""
    names = {name: identity.parse_codes_name(name) for name in parts}
    found = {name: static for name, static in names.items() if static is not None}
    given = {name: part for name, part in parts.items() if part is not None}
    others = set(given) - set(found) - {"scales", "tensor_scale"}
    if len(found) != 1 or others or not {*found, "scales"} <= set(given):
        raise ValueError(f"codes, scales and tensor_scale make a quantized array, got {', '.join(map(str, given))}")
    ((name, static),) = found.items()
    tensor_scale = jnp.asarray(given["tensor_scale"]) if "tensor_scale" in given else None
    return _checked(jnp.asarray(given[name]), jnp.asarray(given["scales"]), tensor_scale, static)


def _checked(codes: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None, static: Static) -> QuantizedArray:
    format = static.format
    checks.check_codes(codes, static.columns, format)
    # Each matrix of a stack may have its own tensor scale; then check the shapes of one.
    own = tensor_scale.ndim if tensor_scale is not None else 0
    if format.per_tensor and scales.ndim == codes.ndim and scales.shape[-2:] == (1, 1) and scales.size > 1:
        own = codes.ndim - 2
    if own and any(part is not None and part.shape[:own] != codes.shape[:own] for part in (scales, tensor_scale)):
        raise ValueError(
            f"a stack of {format} has one scale per tensor for each matrix, got codes {codes.shape}, {scales.shape}"
        )
    one = jax.ShapeDtypeStruct(scales.shape[own:], scales.dtype)
    its_scale = None if tensor_scale is None else jax.ShapeDtypeStruct(tensor_scale.shape[own:], tensor_scale.dtype)
    checks.check_scales(one, its_scale, (*codes.shape[own:-1], static.columns), format, static.origin)
    return QuantizedArray(codes, scales, tensor_scale, *static)
