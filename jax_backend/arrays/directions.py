"""Quantizing along columns: the transposed array's codes and scales, alone or from the same read as the rowwise ones."""

from __future__ import annotations

import jax
import numpy as np
from jax.core import Tracer

from blockfp.definition import numerics
from blockfp.definition.rounding import Key
from blockfp.formats import Format

from ..implementations import implementations, ops
from ..implementations.turning import turn
from .array import QuantizedArray, carried, of_parts


def quantize_columnwise(
    x: jax.Array,
    format: Format | str,
    *,
    key: Key | None = None,
    rotate: bool = False,
    implementation: str | None = None,
) -> QuantizedArray:
    """`quantize(x.mT)` without the transposed array in memory where there is a kernel for that.

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
    choice = implementations.choose(implementation, "columnwise", format, stochastic=key is not None, rotate=rotate)
    parts = ops.quantize_columnwise(x, ops.key_array(key), format=format, choice=choice, rotate=rotate)
    q = of_parts(parts, format, x.mT)
    if not isinstance(x, Tracer):
        return q
    return carried(q, turn(x.mT) if rotate else x.mT)


def quantize_both(
    x: jax.Array, format: Format | str, *, implementation: str | None = None
) -> tuple[QuantizedArray, QuantizedArray]:
    """(`quantize(x)`, `quantize(x.mT)`) to nearest, from one read of x where there is a kernel for that.

    Args:
        x: float32, float16 or bfloat16 [..., rows, columns].
        format: a `Format` or its name.
        implementation: as for `quantize`.

    Raises:
        TypeError, ValueError, RuntimeError: as `quantize`.
    """
    format = _checked(x, format)
    choice = implementations.choose(implementation, "both", format)
    row, column = ops.quantize_both(x, format=format, choice=choice)
    return carried(of_parts(row, format, x), x), carried(of_parts(column, format, x.mT), x.mT)


def _checked(x, format: Format | str) -> Format:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"x must be a JAX or NumPy array, got {type(x).__name__}")
    numerics.check_input(x)
    return Format.parse(format)
