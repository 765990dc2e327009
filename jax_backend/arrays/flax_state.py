"""Quantized arrays in the state dicts of Flax: dictionaries of their parts, whose names say the format.

Flax looks types up in a table of its own, and isn't imported for that: it is told when an array is made after it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from . import identity


def register(kind: type) -> None:
    """Registers with Flax, which is imported, how the arrays of this class go into its state dicts and come out."""
    from flax import serialization

    # While Flax itself is being imported, the function isn't there yet.
    if hasattr(serialization, "register_serialization_state"):
        serialization.register_serialization_state(kind, to_parts, of_state_dict, override=True)
        registered.add(kind)


registered: set[type] = set()
"""The classes that Flax knows."""


def to_parts(q: Any) -> dict[str, Any]:
    """The parts by name, as `rebuild_params` takes them."""
    parts = {identity.codes_name(identity.static_of(q)): q.codes, "scales": q.scales, "tensor_scale": q.tensor_scale}
    return {name: part for name, part in parts.items() if part is not None}


def of_state_dict(target: Any, state: Mapping[str, Any]) -> Any:
    """Restores a quantized array of a target from a state dict, for `flax.serialization.from_state_dict`."""
    from flax import serialization

    where = serialization.current_path()
    expected = to_parts(target)
    if not isinstance(state, Mapping) or set(state) != set(expected):
        got = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{where}: the target has {', '.join(expected)}, and what is restored {got}")
    for name, part in expected.items():
        if (state[name].shape, state[name].dtype) != (part.shape, part.dtype):
            raise ValueError(
                f"{where}: {name} is {part.dtype} {part.shape} in the target, and {state[name].dtype} {state[name].shape} "
                "in what is restored"
            )
    codes, scales = (jnp.asarray(state[name]) for name in list(expected)[:2])
    tensor_scale = jnp.asarray(state["tensor_scale"]) if "tensor_scale" in state else None
    return target.replace(codes=codes, scales=scales, tensor_scale=tensor_scale, tangent=None)
