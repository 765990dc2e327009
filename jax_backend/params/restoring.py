"""Quantized arrays of the dictionaries that checkpoints have in their place, where they are restored without a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from blockfp.definition import checks

from ..arrays import identity
from ..arrays.array import QuantizedArray
from ..arrays.identity import Static
from .trees import map_with_path


def rebuild_params(tree: Any) -> Any:
    """Rebuilds quantized arrays where a tree has the dictionaries of their parts.

    That is what Orbax restores without a target, and `flax.serialization.msgpack_restore`: "codes_mxfp8_e4m3_bfloat16_64",
    "scales", .., of which the first says format, dtype and columns.

    Args:
        tree: what was restored; leaves that aren't such parts stay as they are.

    Raises:
        ValueError: parts that are missing or don't fit each other, an unknown format, or parts of an array that was cut over
            a mesh; the message names the path.
        TypeError: parts of another dtype.

    Example:
        >>> params = bfp.rebuild_params(checkpointer.restore(path))
    """
    return map_with_path(lambda _, leaf: rebuild(leaf) if _is_parts(leaf) else leaf, tree, is_leaf=_is_parts)


def _is_parts(node: Any) -> bool:
    return isinstance(node, Mapping) and any(str(name).startswith("codes_") for name in node) and "scales" in node


def rebuild(parts: Mapping[str, Any]) -> QuantizedArray:
    """Makes the quantized array of a dictionary of parts by name, checked."""
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
    # Each matrix of a stack may have its own scale per tensor: then one of them is looked at.
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
