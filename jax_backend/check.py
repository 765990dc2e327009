"""The adapter of JAX for `blockfp check`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition.numerics import Quantized
from blockfp.formats import Format
from blockfp.kernels.products import BLOCK_SCALES

from .arrays.array import QuantizedArray
from .arrays.quantize import quantize
from .implementations import choice
from .linear.products import least_cublas


class JaxBackend:
    """`blockfp.jax` behind NumPy arrays: quantize and dequantize jitted by XLA on the default device."""

    name = "jax"

    @property
    def version(self) -> str:
        version = f"JAX {jax.__version__} on {', '.join(sorted({device.device_kind for device in jax.devices()}))}"
        missing = choice.missing_cublas(least_cublas(BLOCK_SCALES)) if jax.default_backend() == "gpu" else None
        return version if missing is None else f"{version}, without products of FP8 blocks: {missing}"

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        q = quantize(jnp.asarray(x), format)
        tensor_scale = None if q.tensor_scale is None else np.asarray(q.tensor_scale)
        return Quantized(np.asarray(q.codes), np.asarray(q.scales), tensor_scale)

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        codes, scales = jnp.asarray(q.codes), jnp.asarray(q.scales)
        tensor_scale = None if q.tensor_scale is None else jnp.asarray(q.tensor_scale)
        whole = QuantizedArray.from_parts(codes, scales, tensor_scale, format=format, columns=columns, dtype=dtype)
        return np.asarray(whole.dequantize())
