"""Codes and scales in JAX's small dtypes instead of bytes, and back, by bit casts, for which compiled programs don't copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition import layout, views
from blockfp.formats import Format


def view_codes(codes: jax.Array, columns: int, format: Format) -> jax.Array:
    """Views codes as elements [..., rows, columns].

    Raises:
        TypeError: 6-bit elements.
    """
    element = format.element
    if element.bits == 6:
        raise TypeError(
            f"JAX has no dtype for {element}: q.codes has four of them in three bytes, and "
            "blockfp.definition.layout.unpack one a byte"
        )
    elements = layout.unpack(codes, element.bits, columns)
    if element.packed:
        elements = elements.astype(jnp.uint4)
    return lax.bitcast_convert_type(elements, views.dtype_of(element.native_dtype))


def view_scales(scales: jax.Array, format: Format) -> jax.Array:
    """Views scales as numbers: fp32 ones as they are."""
    return lax.bitcast_convert_type(scales, views.dtype_of(format.scale.native_dtype))


def stored(codes: jax.Array, scales: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Converts codes and scales of the format's own dtypes to what the format stores; others stay as they are."""
    element = format.element
    if codes.dtype == element.native_dtype and not isinstance(codes, np.ndarray):
        as_integers = lax.bitcast_convert_type(codes, jnp.uint4 if element.packed else jnp.uint8)
        codes = layout.pack(as_integers.astype(jnp.uint8), element.bits)
    elif isinstance(codes, np.ndarray):
        codes = views.stored_codes(codes, format)
    if scales.dtype == format.scale.native_dtype and scales.dtype != format.scale.dtype:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    return codes, scales
