"""Whether the kernels' activations have the bits of XLA's program, compared once per process, on this device.

Both evaluate the same formulas, but exponentials and quotients of theirs may differ in the last bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.kernels.switch import once

from .. import activations
from ..activations import Making
from . import rowwise
from .source import Source

_REPEATS = 8
"""Ups for each gate."""


@once
def differing(making: Making) -> tuple[float, ...]:
    """Returns the first gates at which the kernels differ from XLA's program; none where they don't.

    Compares all values of a 16-bit gate, with ups of all magnitudes.
    """
    # A thread of its own knows nothing of the caller's traces, meshes and settings.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_differing, making).result()


def _differing(making: Making) -> tuple[float, ...]:
    dtype = jnp.dtype(making.dtype)
    gate = np.tile(np.arange(1 << 16, dtype=np.uint16), _REPEATS).view(dtype).reshape(-1, 32)
    random = np.random.default_rng(0)
    signs, sizes = (random.standard_normal(gate.shape, np.float32) for _ in range(2))
    with np.errstate(over="ignore"):  # in float16 some ups are Inf
        up = (signs * np.exp2(8 * sizes)).astype(dtype) if making.gated else None
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        on_device = jax.device_put((gate, up), jax.local_devices()[0])
        source = Source(on_device[0], on_device[1], making.activation)
        found = np.asarray(jax.jit(rowwise.made)(source))
        wanted = np.asarray(jax.jit(activations.activated, static_argnums=2)(source.gate, source.up, source.activation))
    differs = (found.view(np.uint16) != wanted.view(np.uint16)) & ~(np.isnan(found) & np.isnan(wanted))
    return tuple(float(value) for value in gate[differs][:8])
