"""How XLA is told to store what is used many times (`definition.layout.Settle`)."""

from __future__ import annotations

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def settle(x: jax.Array) -> jax.Array:
    """x, stored: XLA doesn't fuse what makes it into the loops that use it.

    XLA:CPU removes optimization barriers before it fuses, but keeps calls that are marked as not to be inlined.
    """
    return jax.lax.platform_dependent(x, cpu=_uninlined, default=jax.lax.optimization_barrier)


def _uninlined(x: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return _itself(x)


@jax.jit
def _itself(x: jax.Array) -> jax.Array:
    return x | x
