"""The Pallas backend: kernels written with Mosaic GPU."""

from __future__ import annotations

from typing import Any

import jax

from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format

from ..activations import Making
from ..backend import Backend, amax_of_tensor, refusal_of_amax


def _kernels() -> Any:
    # Importing Mosaic is slow, and with JAX 0.10 needs an optional package.
    from . import arrays

    return arrays


class Pallas(Backend):
    """The Pallas kernels (`arrays`)."""

    name = "pallas"
    platform = "cuda"

    def missing(self) -> str | None:
        if jax.default_backend() != "gpu":
            return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
        capability = float(getattr(jax.devices()[0], "compute_capability", 0))
        if capability < 9:
            return f"Mosaic GPU needs compute capability 9.0 or above, and this device has {capability}"
        try:
            _kernels()
        except ImportError as error:
            return str(error)
        return None

    def refusal(
        self,
        operation: str,
        *,
        format: Format,
        stochastic: bool = False,
        eps: float = 0.0,
        rotate: bool = False,
        origin: tuple[int, int] = (0, 0),
        making: Making | None = None,
        **options: Any,
    ) -> str | None:
        if operation == "amax":
            return refusal_of_amax(operation, format)
        if eps:
            return f"the Pallas kernels lift no amax, and eps is {eps}"
        if rotate:
            return "the Pallas kernels don't rotate"
        if any(o % b for o, b in zip(origin, format.block or (1, 1), strict=True)):
            return f"the Pallas kernels begin with whole blocks, and origin {origin} lies inside one of {format}"
        if stochastic:
            return "the Pallas kernels round to nearest"
        why = _kernels().refusal(operation, format)
        return _kernels().refusal_of_making(making, format) if why is None and making is not None else why

    def amax(self, x, *, format: Format) -> Amax:
        return amax_of_tensor(_kernels().tensor_amax(x), x)

    def quantize(self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None) -> Quantized:
        if amax is None and nominal is None:
            return _kernels().quantize_batched(x, format)
        return _kernels().quantize(x, format, nominal, amax=amax)

    def quantize_columnwise(self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False) -> Quantized:
        return _kernels().columnwise_quantize(x, format, rows=False, amax=amax)[1]

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        return _kernels().columnwise_quantize(x, format, rows=True, amax=amax)  # pyright: ignore[reportReturnType]

    def quantize_made(
        self, gate: jax.Array, up: jax.Array | None, *, activation: str, format: Format, rows: bool, columns: bool
    ) -> tuple[Quantized | None, Quantized | None]:
        """Computes `quantize` and `quantize_columnwise` of what an activation makes, from one read of gate and up.

        Without `rows`, or without `columns`, that result is None. An Inf makes scales NaN (`backend.marked`).
        """
        return _kernels().quantize_made(gate, up, activation, format, rows=rows, columns=columns)

    def dequantize(
        self, codes, scales, tensor_scale, *, format: Format, dtype: str, columns: int, origin: tuple[int, int] = (0, 0)
    ) -> jax.Array:
        return _kernels().dequantize_batched(codes, scales, tensor_scale, format, dtype, columns)
