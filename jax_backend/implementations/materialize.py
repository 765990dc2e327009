"""The store of values that are used many times, which XLA would compute again at each use (`definition.layout.Materialize`)."""

from __future__ import annotations

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def materialize(x: jax.Array) -> jax.Array:
    """Stores x: XLA doesn't fuse what makes it into the loops that use it.

    XLA:CPU removes optimization barriers before it fuses, but keeps calls that are marked as not to be inlined.
    """
    return jax.lax.platform_dependent(x, cpu=_uninlined, default=jax.lax.optimization_barrier)


def _uninlined(x: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return _itself(x)


@jax.jit
def _itself(x: jax.Array) -> jax.Array:
    return x | x
