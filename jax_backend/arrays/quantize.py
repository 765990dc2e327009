"""Quantizing arrays: along rows, along columns, and both from one read; each with a straight-through gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp.definition import checks
from blockfp.definition.rounding import Key
from blockfp.formats import Format

from ..implementations import ops
from ..implementations.derivatives import hadamard
from .array import QuantizedArray, with_derivative, wrap_parts


def quantize(
    x: jax.Array, format: Format | str, *, key: Key | None = None, implementation: str | None = None
) -> QuantizedArray:
    """Quantizes an array in blocks of its last two axes.

    Args:
        x: float32, float16 or bfloat16, two or more axes; a NumPy array or a traced one will do.
        format: a `Format` or its name, see `blockfp.formats.NAMES`.
        key: None rounds to nearest even; an integer seed, two uint32 words or a key of `jax.random.key` round
            stochastically.
        implementation: "ffi" (the CPU or CUDA library), "pallas" or "xla", all with the same bits; by default the first of
            them that is there. In a program that XLA splits over several devices that is "xla"; inside shard_map any will do.

    Raises:
        TypeError: x is not an array of a supported dtype.
        ValueError: x has fewer than two axes, or the format, key or implementation is not valid.
        RuntimeError: `implementation` can't run on this machine.

    Example:
        >>> q = bfp.quantize(jnp.ones((4, 64)), "mxfp8_e4m3")
        >>> q.codes.shape, q.scales.shape
        ((4, 64), (4, 2))
        >>> jax.grad(lambda x: (bfp.quantize(x, "nvfp4").dequantize() ** 2).sum())(x)  # straight-through
    """
    format = _checked(x, format)
    parts = ops.quantize(x, ops.key_array(key), format=format, implementation=implementation)
    return with_derivative(wrap_parts(parts, format, x), x)


def fake_quantize(
    x: jax.Array, format: Format | str, *, key: Key | None = None, implementation: str | None = None
) -> jax.Array:
    """Quantizes x and dequantizes it again, in its own dtype, as a product would see it. The gradient is straight-through.

    Takes and raises what `quantize` does.
    """
    return quantize(x, format, key=key, implementation=implementation).dequantize(implementation=implementation)


def quantize_columnwise(
    x: jax.Array,
    format: Format | str,
    *,
    key: Key | None = None,
    rotate: bool = False,
    implementation: str | None = None,
) -> QuantizedArray:
    """Quantizes x.mT, without the transposed array in memory where there is a kernel for that.

    Args:
        x: float32, float16 or bfloat16 [..., rows, columns].
        format: a `Format` or its name.
        key, implementation: as for `quantize`; random bits count the transposed array's elements.
        rotate: apply the random Hadamard transform to x.mT along its last axis first.

    Returns:
        The quantized x.mT, [..., columns, rows]; its gradient is straight-through.

    Raises:
        TypeError, ValueError, RuntimeError: as `quantize`.
    """
    format = _checked(x, format)
    parts = ops.quantize_columnwise(x, ops.key_array(key), format=format, rotate=rotate, implementation=implementation)
    q = wrap_parts(parts, format, x, columnwise=True)
    if not isinstance(x, Tracer):
        return q
    return with_derivative(q, hadamard(x.mT) if rotate else x.mT)


def quantize_both(
    x: jax.Array, format: Format | str, *, implementation: str | None = None
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantizes x and x.mT to nearest, from one read of x where there is a kernel for that.

    Args:
        x: float32, float16 or bfloat16 [..., rows, columns].
        format: a `Format` or its name.
        implementation: as for `quantize`.

    Raises:
        TypeError, ValueError, RuntimeError: as `quantize`.
    """
    format = _checked(x, format)
    row, column = ops.quantize_both(x, format=format, implementation=implementation)
    row, column = wrap_parts(row, format, x), wrap_parts(column, format, x, columnwise=True)
    return (with_derivative(row, x), with_derivative(column, x.mT)) if isinstance(x, Tracer) else (row, column)


def _checked(x, format: Format | str) -> Format:
    """Returns the parsed format; raises TypeError or ValueError where x can't be quantized."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"x must be a JAX or NumPy array, got {type(x).__name__}: use jnp.asarray, or blockfp.torch.quantize for PyTorch"
        )
    # Before JAX sees it: jnp.asarray would silently make float64 to float32.
    checks.check_input(x)
    return Format.parse(format)


# ---- DLPack


def from_torch(q) -> QuantizedArray:
    """Makes a JAX array of a `blockfp.torch.QuantizedTensor`, on the same device and without a copy where that is possible.

    Codes and scales go over through DLPack. XLA's CPU wants 64-byte alignment, which PyTorch's own allocations have and
    slices of them may not; JAX copies those. Where memory is shared, an update of `q` in place changes the result: JAX
    assumes that it doesn't happen.

    Raises:
        TypeError: `q` is not a QuantizedTensor.
    """
    missing = [name for name in ("codes", "scales", "tensor_scale", "format", "origin") if not hasattr(q, name)]
    if missing or not hasattr(q.codes, "data_ptr"):
        raise TypeError(f"q must be a blockfp.torch.QuantizedTensor, got {type(q).__name__}")

    def share(tensor) -> jax.Array | None:
        return None if tensor is None else jnp.from_dlpack(tensor.detach().contiguous())

    return QuantizedArray.from_parts(
        share(q.codes),  # pyright: ignore[reportArgumentType]
        share(q.scales),  # pyright: ignore[reportArgumentType]
        share(q.tensor_scale),
        format=q.format,
        columns=q.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        origin=tuple(q.origin),
    )
