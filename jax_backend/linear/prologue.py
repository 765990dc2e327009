"""An activation before a layer, whose output the layer casts as it is made.

    y = linear(activation(gate) * up)

Derivatives keep gate and up. The CUDA library and Pallas cast the output without storing it; elsewhere XLA computes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax

from blockfp.kernels.calls import ACTIVATIONS

from ..implementations import activations

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]


class Made(NamedTuple):
    """An input that an activation makes.

    Attributes:
        values: its values, which a kernel that makes them itself doesn't read.
        gate, up: what they are made of.
    """

    values: jax.Array
    gate: jax.Array
    up: jax.Array | None


def values_of(x: Any) -> Any:
    """Returns the values of a layer's input."""
    return x.values if isinstance(x, Made) else x


def check(activation: str | None, gate: jax.Array, up: jax.Array | None) -> None:
    """Raises ValueError for an unknown activation, an `up` without one, or one that differs from gate in shape or dtype."""
    if activation is None:
        if up is not None:
            raise ValueError("up: an activation takes it in; pass activation='silu', for one")
        return
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is not None and (up.shape, up.dtype) != (gate.shape, gate.dtype):
        raise ValueError(f"up must be as x, {gate.dtype} {gate.shape}, got {up.dtype} {up.shape}")


def activated(gate: jax.Array, up: jax.Array | None, activation: str) -> jax.Array:
    """Computes `activations.activated`; its derivative keeps gate and up alone."""

    # JAX would keep several arrays of this size; nothing is computed again but the activation.
    return jax.checkpoint(partial(activations.activated, activation=activation), prevent_cse=False)(gate, up)
