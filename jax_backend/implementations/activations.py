"""Activations before a layer: what is computed in fp32, and where it is rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Function = Callable[[jax.Array], jax.Array]

FUNCTIONS: Mapping[str, Function] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""The activations, of float32, by the names of `kernels.calls.ACTIVATIONS`."""


class Making(NamedTuple):
    """How an activation makes a layer's input: its name, the dtype of gate and up, and whether there is an up."""

    activation: str
    dtype: str
    gated: bool


def activated(gate: jax.Array, up: jax.Array | None, activation: str) -> jax.Array:
    """Returns activation(gate), or activation(gate) * up, rounded after each."""
    out = FUNCTIONS[activation](gate.astype(jnp.float32)).astype(gate.dtype)
    return out if up is None else out * up
