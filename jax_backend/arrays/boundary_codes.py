"""Functions that are recomputed in the backward from codes of their input."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from blockfp.formats import Format
from blockfp.sharding.reducing import check_reduce_format

from .array import QuantizedArray
from .quantize import quantize


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
        return function(x, *rest), (q.codes, q.scales, rest, jax.numpy.empty(0, x.dtype), jax.numpy.empty((0, x.shape[-1])))

    def backward(kept: Any, cotangent: Any) -> Any:
        codes, scales, rest, like, columns = kept
        x = QuantizedArray(codes, scales, None, format, columns.shape[-1], like.dtype).dequantize()
        return jax.vjp(function, x, *rest)[1](cotangent)

    run.defvjp(forward, backward)
    return wraps(function)(lambda x, *rest: run(x, *rest))
