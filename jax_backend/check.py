"""The adapters of JAX for `blockfp check`: `blockfp.jax` as users get it, and each program of the definition that it has."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition.matrix_units import Summation
from blockfp.definition.numerics import Quantized
from blockfp.definition.products import Operand
from blockfp.formats import MXFP8, Format
from blockfp.kernels import native
from blockfp.kernels.products import BLOCK_SCALES

from .arrays.array import QuantizedArray
from .arrays.quantize import quantize
from .implementations import choice
from .implementations.activations import FUNCTIONS, Making
from .implementations.pallas.backend import Pallas
from .implementations.product import product
from .linear.products import least_cublas


class JaxBackend:
    """`blockfp.jax` behind NumPy arrays, on the default device: with the kernel libraries, where they are."""

    name = "jax"
    implementation: ClassVar[str | None] = None

    @property
    def version(self) -> str:
        version = f"JAX {jax.__version__} on {', '.join(sorted({device.device_kind for device in jax.devices()}))}"
        if self.implementation is None:
            why, runs = choice.missing("ffi"), next(name for name in choice.NAMES if choice.missing(name) is None)
            version += f', casts by "{runs}"' + ("" if why is None else f' (not "ffi": {why})')
        missing = choice.missing_cublas(least_cublas(BLOCK_SCALES)) if jax.default_backend() == "gpu" else None
        return version if missing is None else f"{version}, without products of FP8 blocks: {missing}"

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        q = quantize(jnp.asarray(x), format, implementation=self.implementation)
        tensor_scale = None if q.tensor_scale is None else np.asarray(q.tensor_scale)
        return Quantized(np.asarray(q.codes), np.asarray(q.scales), tensor_scale)

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        codes, scales = jnp.asarray(q.codes), jnp.asarray(q.scales)
        tensor_scale = None if q.tensor_scale is None else jnp.asarray(q.tensor_scale)
        whole = QuantizedArray.from_parts(codes, scales, tensor_scale, format=format, columns=columns, dtype=dtype)
        return np.asarray(whole.dequantize(implementation=self.implementation))

    @property
    def summations(self) -> tuple[str, ...]:
        return native.summations()

    def product(self, a: Operand, b: Operand, summation: Summation, **options: Any) -> np.ndarray:
        """Multiplies on the CPU, where JAX has products with defined bits."""
        with jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(product(a.converted(jnp.asarray), b.converted(jnp.asarray), summation, **options))


class JaxXla(JaxBackend):
    """The definition, jitted by XLA: what runs where XLA splits a program, in `jax.export`, and without the libraries."""

    name = "jax-xla"
    implementation = "xla"

    @property
    def summations(self) -> tuple[str, ...]:
        return ()


class JaxPallas:
    """The Pallas kernels: on a GPU that has them, else interpreted on the CPU, where JAX can.

    XLA's arithmetic on CPUs, which interprets them, flushes subnormal numbers, scales among them: blocks of these and of Inf
    may differ.
    """

    name = "jax-pallas"

    def __init__(self):
        """
        Raises:
            ImportError: they can't run here.
        """
        self._on_gpu = choice.has_gpu()
        why = choice.missing("pallas") if self._on_gpu else None
        if why is not None:
            raise ImportError(why)
        from .implementations.pallas import arrays, mosaic

        if not self._on_gpu and not mosaic.CAN_INTERPRET:
            why = f"JAX {jax.__version__} can't interpret them on a CPU, JAX 0.11 can"
            raise ImportError(f"they need a CUDA device: {why}")
        self._kernels, self._interpreted = arrays, nullcontext if self._on_gpu else mosaic.interpreted
        # Interpreted kernels share what stands for a GPU's memory.
        self._one_at_a_time = threading.Lock()

    @property
    def version(self) -> str:
        if not self._on_gpu:
            return f"JAX {jax.__version__}, interpreted on the CPU"
        making = {name: self._kernels.refusal_of_making(Making(name, "bfloat16", True), MXFP8) for name in FUNCTIONS}
        cast = [name for name, why in making.items() if why is None]
        version = f"JAX {jax.__version__}, on the GPU; casts the output of {', '.join(cast) or 'no activation'}"
        return "; ".join([version, *(why for why in making.values() if why is not None)])

    def _run(self, operation: str, format: Format, function: Any, *arrays: Any) -> Any:
        why = Pallas().refusal(operation, format=format)
        if why is not None:
            raise NotImplementedError(why)
        with self._one_at_a_time, self._interpreted():
            # A new function for each call: programs that aren't interpreted are others.
            return jax.block_until_ready(jax.jit(lambda *arrays: function(*arrays))(*arrays))

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        # A format that it can't decode either isn't had.
        self._run("dequantize", format, lambda: None)
        made = self._run("quantize", format, lambda x: self._kernels.quantize(x, format), jnp.asarray(x))
        return Quantized(*(None if part is None else np.asarray(part) for part in made))

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        parts = [None if part is None else jnp.asarray(part) for part in q]
        decode = lambda *parts: self._kernels.dequantize_array(*parts, format, dtype, columns=columns)  # noqa: E731
        return np.asarray(self._run("dequantize", format, decode, *parts))
