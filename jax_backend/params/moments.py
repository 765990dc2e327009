"""Moments of an optimizer's state: in float32, or in bfloat16 or FP8, rounded stochastically with PyTorch's bits.

An FP8 moment is a `QuantizedArray` (`definition.adamw.MOMENT_FORMAT`), so that `named_shardings` places its codes and scales.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from blockfp.definition import adamw, layout
from blockfp.definition.adamw import FIRST, MOMENT_FORMAT, SECOND, Moments
from blockfp.definition.rounding import Key, key_words

from ..arrays.array import QuantizedArray, is_quantized
from ..implementations import explicit
from ..implementations.xla import materialize
from .ieee import square_root


class Storage(NamedTuple):
    """How an optimizer stores moments.

    Attributes:
        moments: "float32", "bfloat16" or "fp8".
        mu_dtype: dtype of the first moment, rounded to nearest, or None.
        words: the key of stochastic rounding.
    """

    moments: str
    mu_dtype: Any
    words: tuple[int, int]

    @classmethod
    def of(cls, moments: str, mu_dtype: Any, key: Key | None) -> Storage:
        """Checks the settings; raises TypeError or ValueError."""
        if moments not in Moments.__args__:
            raise ValueError(f"moments must be one of {', '.join(map(repr, Moments.__args__))}, got {moments!r}")
        if mu_dtype is not None:
            mu_dtype = np.dtype(mu_dtype)
            if mu_dtype.name not in ("float32", "bfloat16", "float16"):
                raise TypeError(f"mu_dtype must be float32, bfloat16 or float16, got {mu_dtype}")
            if moments != "float32":
                raise ValueError(f"mu_dtype={mu_dtype} and moments={moments!r} both store the first moment: give one of them")
        first, second = key_words(0 if key is None else key)
        return cls(moments, mu_dtype, (int(first), int(second)))

    @property
    def rounds(self) -> bool:
        """Whether random bits depend on positions in whole arrays."""
        return self.moments != "float32"

    def zeros(self, weight: jax.Array, *, second: bool) -> Any:
        """Returns a moment of zeros in memory of its own, because a step may donate each (donate_argnums)."""
        if self.moments == "fp8" and weight.ndim >= 2:
            codes = explicit.zeros_beside(weight, weight.shape, jnp.uint8)
            scales = explicit.zeros_beside(weight, layout.scales_shape(weight.shape, MOMENT_FORMAT), jnp.float32) + 1
            return _wrapped(codes, scales)
        # Vectors are small.
        dtype = {"bfloat16": jnp.bfloat16}.get(self.moments, (None if second else self.mu_dtype) or jnp.float32)
        return jnp.zeros_like(weight, dtype=dtype)

    def load(self, kept: Any, *, second: bool) -> jax.Array:
        """Returns a moment in float32."""
        if not is_quantized(kept):
            return kept.astype(jnp.float32)
        return _left_to_xla(partial(_load_fp8, second=second), None, kept.codes, kept.scales)

    def keys(self, step: jax.Array, count: int) -> Any:
        """Returns the keys of the moments of `count` parameters in step `step`, from 1: int32 [count, 2, 2], if needed."""
        if not self.rounds:
            return None
        words = jnp.array(self.words, jnp.uint32)
        # All keys at once: an unrolled Threefry for each would take most of the compile time.
        of_moments = jax.vmap(lambda number, what: adamw.rounding_key(words, step, number, what), (None, 0))
        return jax.vmap(of_moments, (0, None))(jnp.arange(count, dtype=jnp.int32), jnp.array((FIRST, SECOND), jnp.int32))

    def store(self, moment: jax.Array, key: jax.Array | None, *, second: bool) -> Any:
        """Returns a moment as it is stored, rounded by a key of `keys`."""
        if key is None or (self.moments == "fp8" and moment.ndim < 2):
            return moment if second or self.mu_dtype is None else moment.astype(self.mu_dtype)
        moment = lax.stop_gradient(moment)
        if self.moments == "bfloat16":
            rows = moment if moment.ndim >= 2 else moment.reshape(1, -1)
            return _left_to_xla(_round_to_bfloat16, None, rows, key).reshape(moment.shape)
        store = lambda moment, key: _store_fp8(moment, key=key, second=second)  # noqa: E731
        return _wrapped(*_left_to_xla(store, MOMENT_FORMAT, moment, key))


# Traced once for each shape.
_round_to_bfloat16 = jax.jit(adamw.round_to_bfloat16, inline=True)
_load_fp8 = jax.jit(adamw.load_fp8, static_argnames="second", inline=True)
_store_fp8 = jax.jit(
    partial(adamw.store_fp8, materialize=materialize, square_root=square_root), static_argnames="second", inline=True
)


def _wrapped(codes: jax.Array, scales: jax.Array) -> QuantizedArray:
    return QuantizedArray(codes, scales, None, MOMENT_FORMAT, codes.shape[-1], np.dtype(np.float32))


def _left_to_xla(function: Any, format: Any, x: jax.Array, *operands: jax.Array) -> Any:
    """Runs function(x, *operands), whose result is sharded like x, or is codes and scales sharded like x."""
    mesh = explicit.mesh_of(x)
    if mesh is None:
        return function(x, *operands)
    specs: Any = PartitionSpec(*explicit.spec_of(x))
    if format is not None:
        specs = explicit.specs_of_quantized(x, format=format)[:2]
    return explicit.left_to_xla(function, mesh, specs, x, *operands)


def check_whole(what: str, param: Any) -> None:
    """Raises ValueError for a rank's part of a parameter, as far as JAX shows it, where `what` needs the whole."""
    sharded = is_quantized(param) and param.sharding is not None
    if sharded or explicit.varying(param.codes if is_quantized(param) else param):
        raise ValueError(
            f"{what} needs whole parameters, and shard_map gives a rank its part: place parameters and state by "
            "blockfp.jax.named_shardings, and let jax.jit partition the step"
        )
