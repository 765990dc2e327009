"""The XLA backend: the definition on JAX arrays, compiled for any device and partitionable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from blockfp.definition import numerics
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rotation import rotate as rotated
from blockfp.formats import Format

from .backend import Backend, keys_of_both


class Xla(Backend):
    """The definition (`blockfp.definition.numerics`), traced."""

    name = "xla"

    def amax(self, x, *, format: Format) -> Amax:
        return numerics.amax(x, format)

    def quantize(self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None) -> Quantized:
        given: dict[str, Any] = {}
        if amax is not None and amax.dtype == jnp.float32:
            given["multiplier"] = amax
        elif amax is not None and format.per_tensor:
            given["amax"] = Amax(amax.reshape((1,) * x.ndim), None, None)
        elif amax is not None:
            given["amax"] = numerics.amax(x, format)._replace(tensor=amax.reshape(()))
        return numerics.quantize(x, format, key=key, eps=eps, nominal=nominal, materialize=materialize, **given)

    def quantize_columnwise(self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False) -> Quantized:
        return self.quantize(rotated(x.mT) if rotate else x.mT, key, amax, format=format, eps=eps)

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        row_key, column_key = keys_of_both(key)
        row = self.quantize(x, row_key, amax, format=format, eps=eps)
        if not format.square or rotate or key is not None:
            return row, self.quantize_columnwise(x, column_key, amax, format=format, eps=eps, rotate=rotate)
        codes, scales = numerics.transpose(row.codes, row.scales, format, columns=x.shape[-1])
        return row, Quantized(codes, scales, row.tensor_scale)

    def dequantize(
        self, codes, scales, tensor_scale, *, format: Format, dtype: str, columns: int, origin: tuple[int, int] = (0, 0)
    ) -> jax.Array:
        return numerics.dequantize(
            codes, scales, tensor_scale, format, dtype, columns=columns, origin=origin, materialize=materialize
        )


XLA = Xla()


# ---- materializing


def materialize(x: jax.Array) -> jax.Array:
    """Stores x, so that XLA doesn't fuse its computation into the loops that use it.

    XLA:CPU removes optimization barriers before fusion, but keeps calls marked as not inlineable.
    """
    return jax.lax.platform_dependent(x, cpu=_uninlined, default=jax.lax.optimization_barrier)


def _uninlined(x: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return _itself(x)


@jax.jit
def _itself(x: jax.Array) -> jax.Array:
    return x | x
