"""Jitted quantize, dequantize and transpose on plain arrays, without derivatives: whoever calls them attaches these.

`definition.numerics` runs on JAX's tracers as it is. Formats are static arguments, so each format is one compiled function per
shape and dtype; a key is data, so a new seed compiles nothing.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp.definition import numerics
from blockfp.definition.rounding import Key, key_words
from blockfp.formats import Format

from . import implementations
from .choice import Choice


@partial(jax.jit, static_argnames=("format", "choice", "eps", "nominal"))
def quantize(
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None = None,
    *,
    format: Format,
    choice: Choice,
    eps: float = 0.0,
    nominal: str | None = None,
) -> numerics.Quantized:
    """`numerics.quantize`; x has no gradient through it, because JAX's own derivative of a cast rounds the cotangent.

    Args:
        x, key, format, eps, nominal: as there.
        amax: of the whole tensor, for formats that have a scale for it: int32 bits, or float32 for the multiplier that stands
            instead of it (delayed scaling); computed by default.
        choice: who carries it out.
    """
    return implementations.quantize(choice, jax.lax.stop_gradient(x), key, amax, format, eps, nominal)


@partial(jax.jit, static_argnames=("format", "choice", "eps", "rotate"))
def quantize_columnwise(
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None = None,
    *,
    format: Format,
    choice: Choice,
    eps: float = 0.0,
    rotate: bool = False,
) -> numerics.Quantized:
    """`quantize` of x.mT, rotated along its last axis first where `rotate` says so; `amax` is of what is quantized."""
    return implementations.quantize_columnwise(choice, jax.lax.stop_gradient(x), key, amax, format, eps, rotate)


@partial(jax.jit, static_argnames=("format", "choice", "eps", "rotate"))
def quantize_both(
    x: jax.Array,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    *,
    format: Format,
    choice: Choice,
    eps: float = 0.0,
    rotate: bool = False,
) -> tuple[numerics.Quantized, numerics.Quantized]:
    """`quantize` and `quantize_columnwise`, of one read of x where the implementation has a kernel for that.

    Args:
        key: four words, two for each; or None.
        amax: of both directions, so of no use where one is rotated.
        x, format, choice, eps, rotate: as there.
    """
    return implementations.quantize_both(choice, jax.lax.stop_gradient(x), key, amax, format, eps, rotate)


def amax(x: jax.Array, *, format: Format) -> numerics.Amax:
    """`numerics.amax`."""
    return _amax(x, format=format, choice=implementations.choose(None, "amax", format))


@partial(jax.jit, static_argnames=("format", "choice"))
def _amax(x: jax.Array, *, format: Format, choice: Choice) -> numerics.Amax:
    return implementations.amax(choice, jax.lax.stop_gradient(x), format)


@partial(jax.jit, static_argnames=("format", "dtype", "columns", "origin", "choice"))
def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    tensor_scale: jax.Array | None,
    *,
    format: Format,
    dtype: str,
    columns: int,
    origin: tuple[int, int],
    choice: Choice,
) -> jax.Array:
    """`numerics.dequantize`; no gradient goes to the scales."""
    codes, scales, tensor_scale = jax.lax.stop_gradient((codes, scales, tensor_scale))
    return implementations.dequantize(choice, codes, scales, tensor_scale, format, dtype, columns, origin)


@partial(jax.jit, static_argnames=("format", "columns"))
def transpose(codes: jax.Array, scales: jax.Array, *, format: Format, columns: int) -> tuple[jax.Array, jax.Array]:
    """`numerics.transpose`."""
    return implementations.transpose(codes, scales, format, columns)


def key_array(key: Key | None) -> jax.Array | np.ndarray | None:
    """A key as an array of two uint32 words, or None.

    Args:
        key: an integer seed, two uint32 words, or a typed key of `jax.random.key`.

    Raises:
        ValueError: none of these, or a typed key of another generator than threefry2x32. Traced words are not looked at.
    """
    if key is None:
        return None
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        generator = str(jax.random.key_impl(key))
        if generator != "threefry2x32":
            raise ValueError(
                f"key must be of generator threefry2x32, got a key of {generator}: "
                "use jax.random.key(seed, impl='threefry2x32')"
            )
        key = jax.random.key_data(key)
    elif isinstance(key, jax.Array) and key.ndim == 0:
        raise ValueError(
            f"key must be an integer seed, two uint32 words or a jax.random.key, got an array of {key.dtype} without axes: "
            "jax.random.fold_in(jax.random.key(seed), step) makes a key of a step"
        )
    if isinstance(key, jax.Array) and key.dtype == np.int64 and not isinstance(key, Tracer):
        key = np.asarray(key)
    words = key_words(key)
    if isinstance(key, jax.Array):
        return jnp.asarray(key, jnp.uint32)
    return np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32)
