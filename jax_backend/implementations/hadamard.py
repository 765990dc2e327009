"""The random Hadamard transform as a product with a matrix: `rotate` without its bits, which derivatives go through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition.rotation import GROUP, rotate


def hadamard(x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Multiplies each group of 16 along the last axis of x by `rotate`'s matrix (or its inverse); a tail stays as it is."""
    matrix = rotate(np.eye(GROUP, dtype=np.float32))
    whole = x.shape[-1] // GROUP * GROUP
    groups = x[..., :whole].reshape(*x.shape[:-1], -1, GROUP)
    turned = jnp.matmul(groups, (matrix.T if inverse else matrix).astype(x.dtype), precision=lax.Precision.HIGHEST)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], whole), x[..., whole:]], axis=-1)
