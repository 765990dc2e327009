"""Quantization along rows, along columns, or both from one read, with straight-through gradients; `keep_codes`, by which a
backward recomputes a function from codes of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from blockfp.definition import checks
from blockfp.definition.rounding import Key
from blockfp.formats import Format, FormatName
from blockfp.sharding.reducing import check_reduce_format

from ..implementations import ops
from ..implementations.derivatives import hadamard
from .array import QuantizedArray, with_derivative, wrap_parts


def quantize(
    x: jax.Array, format: Format | FormatName, *, key: Key | None = None, implementation: str | None = None
) -> QuantizedArray:
    """Quantizes an array in blocks of its last two axes.

    Args:
        x: float32, float16 or bfloat16, with two or more axes; a JAX, NumPy or traced array.
        format: a `Format` or its name; `blockfp.formats.NAMES` lists the names.
        key: None rounds to nearest even; an integer seed, two uint32 words or a key of `jax.random.key` round stochastically.
        implementation: "ffi" (the CPU or CUDA library), "pallas" or "xla", all with the same bits; the first available one by
            default. A program that XLA partitions over several devices uses "xla"; shard_map can use any.

    Raises:
        TypeError: x is not an array of a supported dtype.
        ValueError: x has fewer than two axes, or the format, key or implementation is invalid.
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
    x: jax.Array, format: Format | FormatName, *, key: Key | None = None, implementation: str | None = None
) -> jax.Array:
    """Quantizes and dequantizes x in its own dtype, with a straight-through gradient.

    Arguments and errors are those of `quantize`.
    """
    return quantize(x, format, key=key, implementation=implementation).dequantize(implementation=implementation)


def quantize_columnwise(
    x: jax.Array,
    format: Format | FormatName,
    *,
    key: Key | None = None,
    rotate: bool = False,
    implementation: str | None = None,
) -> QuantizedArray:
    """Quantizes x.mT; kernels do it without storing the transposed array.

    Args:
        x: float32, float16 or bfloat16 [..., rows, columns].
        format: a `Format` or its name.
        key, implementation: as for `quantize`; random bits are indexed by the transposed array's elements.
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
    x: jax.Array, format: Format | FormatName, *, implementation: str | None = None
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantizes x and x.mT to nearest; kernels read x only once.

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


def _checked(x, format: Format | FormatName) -> Format:
    """Returns the parsed format; raises TypeError or ValueError if x can't be quantized."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"x must be a JAX or NumPy array, got {type(x).__name__}: use jnp.asarray, or blockfp.torch.quantize for PyTorch"
        )
    # Check before JAX sees x: jnp.asarray would silently convert float64 to float32.
    checks.check_input(x)
    return Format.parse(format)


# ---- DLPack


def from_torch(q) -> QuantizedArray:
    """Converts a `blockfp.torch.QuantizedTensor` to JAX on the same device, without a copy if possible.

    Codes and scales are passed by DLPack. XLA on CPU needs 64-byte alignment, which PyTorch's allocations have but slices may
    not; JAX copies those. If memory is shared, updating `q` in place changes the result, which JAX assumes never happens.

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


def keep_codes(function: Callable[..., Any], format: Format | str) -> Callable[..., Any]:
    """Returns a function whose backward recomputes it from codes of its first argument, which are all that is kept of that.

    It takes the place of `jax.checkpoint(function)`, whose policies can't choose what is kept of arguments. The forward is
    unchanged. Gradients are those of `function` at the values of the codes: half of bfloat16's bytes with MXFP8, of every
    layer's input in a `lax.scan`. Other arguments are kept as they are. Blocks run along the last axis and are counted from the
    whole array, so no mesh changes a code; inside `shard_map` the array is a device's own, whose last axis must hold whole
    blocks. It has derivatives in reverse mode, once.

    Args:
        function: takes an activation [.., features] of float32, float16 or bfloat16 and other trees of arrays, all by position.
            Arrays that gradients are taken of must be arguments, not closed over.
        format: a `Format` or its name, with blocks in one row and no scale of the tensor, such as "mxfp8_e4m3".

    Raises:
        TypeError, ValueError: the format is unknown or has other blocks; (when differentiated) x can't be quantized.

    Example:
        >>> body = lambda x, layer: (keep_codes(block, "mxfp8_e4m3")(x, layer), None)
        >>> y, _ = jax.lax.scan(body, x, layers)
    """
    format = check_reduce_format(format, "format")

    @jax.custom_vjp
    def run(x: jax.Array, *rest: Any) -> Any:
        return function(x, *rest)

    def forward(x: jax.Array, *rest: Any) -> Any:
        q = quantize(x, format)
        # Not the array itself, which is differentiable.
        return function(x, *rest), (q.codes, q.scales, rest, jnp.empty(0, x.dtype), jnp.empty((0, x.shape[-1])))

    def backward(kept: Any, cotangent: Any) -> Any:
        codes, scales, rest, like, columns = kept
        x = QuantizedArray(codes, scales, None, format, columns.shape[-1], like.dtype).dequantize()
        return jax.vjp(function, x, *rest)[1](cotangent)

    run.defvjp(forward, backward)
    return wraps(function)(lambda x, *rest: run(x, *rest))
