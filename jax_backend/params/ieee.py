"""`ieee`: operations of an optimizer's step that XLA would round otherwise than IEEE 754.

XLA contracts a product and a sum into one rounding, and its GPU compiler takes approximate float32 divisions and roots. Those
of float64 are exact, and rounding them to float32 gives the correctly rounded result (Figueroa 1995: 53 >= 2 * 24 + 2).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.adamw import Operations


def ieee(done: jax.Array) -> Operations:
    """Returns the operations of the step after `done` steps.

    Results are joined with a 0 that XLA can't foresee, the sign of `done`, so that it neither fuses a product into a sum nor
    divides in float32 after all.
    """
    zero = done >> 31
    return Operations(partial(_joined, zero=zero), partial(_divided, zero=zero), square_root)


@jax.custom_jvp
def _joined(x: jax.Array, zero: jax.Array) -> jax.Array:
    words = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    return (x.view(words) | zero.astype(words)).view(x.dtype)


@_joined.defjvp
def _joined_jvp(primals, tangents):
    return _joined(*primals), tangents[0]


@jax.custom_jvp
def _divided(a: jax.Array, b: jax.Array, zero: jax.Array) -> jax.Array:
    def in_float64(a, b, zero):
        with jax.enable_x64(True):
            exact = a.astype(jnp.float64) / b.astype(jnp.float64)
            return _joined(exact, zero).astype(jnp.float32)

    return lax.platform_dependent(a, b, zero, cuda=in_float64, default=lambda a, b, _: a / b)


@_divided.defjvp
def _divided_jvp(primals, tangents):
    quotient = _divided(*primals)
    return quotient, (tangents[0] - quotient * tangents[1]) / primals[1]


@jax.custom_jvp
def square_root(x: jax.Array) -> jax.Array:
    """Returns the float32 root of x, rounded to nearest."""

    def in_float64(x):
        with jax.enable_x64(True):
            return jnp.sqrt(x.astype(jnp.float64)).astype(jnp.float32)

    return lax.platform_dependent(x, cuda=in_float64, default=jnp.sqrt)


@square_root.defjvp
def _square_root_jvp(primals, tangents):
    root = square_root(*primals)
    return root, tangents[0] * (0.5 / root)
