"""Overflow that shows: an operand's Inf and NaN reach every element of its products.

Quantizing saturates an Inf at the largest finite value, and a NaN is that of its own block's products alone: behind that, loss
scaling and `optax.apply_if_finite` would not see them. Codes stay as the definition says; the scales that a product takes
are NaN then. Operands in high precision propagate them as IEEE says.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.array import QuantizedArray
from ..implementations import replication

_E8M0_NAN = 0xFF


def is_finite(x: jax.Array, over: replication.Axes = frozenset()) -> jax.Array:
    """Returns bool (), True where all of x is finite on all ranks of these mesh axes."""
    finite = jnp.isfinite(x).all()
    return lax.pmin(finite.astype(jnp.int32), tuple(over)) == 1 if over else finite


def propagate(q: QuantizedArray, finite: jax.Array) -> QuantizedArray:
    """Makes all values of q NaN where its source isn't `finite`: bool (), or [stack] for each matrix of a stack."""
    if q.tensor_scale is not None:
        return q.replace(tensor_scale=jnp.where(finite, q.tensor_scale, jnp.nan))
    return q.replace(scales=jnp.where(finite[..., None, None], q.scales, _nan(q)))


def propagate_rows(q: QuantizedArray, finite: jax.Array) -> QuantizedArray:
    """Makes the values NaN of rows whose source isn't finite: bool [rows], of q in blocks of one row."""
    return q.replace(scales=jnp.where(finite[:, None], q.scales, _nan(q)))


def _nan(q: QuantizedArray) -> jax.Array:
    return jnp.asarray(_E8M0_NAN if q.scales.dtype == jnp.uint8 else jnp.nan, q.scales.dtype)
