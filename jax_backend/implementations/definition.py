"""The definition on JAX's arrays, which XLA compiles for any device and can split over several."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.formats import Format

from .settling import settle


def quantize(
    x: jax.Array, key: jax.Array | None, amax: jax.Array | None, format: Format, eps: float, nominal: str | None
) -> numerics.Quantized:
    """`numerics.quantize`; `amax` as for `ops.quantize`."""
    given: dict = {}
    if amax is not None and amax.dtype == jnp.float32:
        given["multiplier"] = amax
    elif amax is not None and format.per_tensor:
        given["amax"] = numerics.Amax(amax.reshape((1,) * x.ndim), None, None)
    elif amax is not None:
        given["amax"] = numerics.amax(x, format)._replace(tensor=amax.reshape(()))
    return numerics.quantize(x, format, key=key, eps=eps, nominal=nominal, settle=settle, **given)


def quantize_columnwise(
    x: jax.Array, key: jax.Array | None, amax: jax.Array | None, format: Format, eps: float, rotated: bool
) -> numerics.Quantized:
    """`quantize` of x.mT, rotated first where `rotated` says so."""
    return quantize(rotate(x.mT) if rotated else x.mT, key, amax, format, eps, None)


def quantize_both(
    x: jax.Array, key: jax.Array | None, amax: jax.Array | None, format: Format, eps: float, rotated: bool
) -> tuple[numerics.Quantized, numerics.Quantized]:
    """`quantize` and `quantize_columnwise`; a key has two words for each."""
    keys = (None, None) if key is None else (key[:2], key[2:])
    row = quantize(x, keys[0], amax, format, eps, None)
    if not format.square or rotated or key is not None:
        return row, quantize_columnwise(x, keys[1], amax, format, eps, rotated)
    codes, scales = numerics.transpose(row.codes, row.scales, format, columns=x.shape[-1])
    return row, numerics.Quantized(codes, scales, row.tensor_scale)


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    tensor_scale: jax.Array | None,
    format: Format,
    dtype: str,
    columns: int,
    origin: tuple[int, int],
) -> jax.Array:
    """`numerics.dequantize`."""
    return numerics.dequantize(codes, scales, tensor_scale, format, dtype, columns=columns, origin=origin, settle=settle)
