"""Applies the kernels to whole arrays: leading axes, ragged ends and small arrays, with the definition's bits.

Kernels take matrices of whole blocks of at least one program's size. Other arrays are padded with zeros, which don't change
amaxes, and codes and scales are cut out: exact, but a copy slower. Activations make zeros of zeros.

Where x may be a `Source`, an activation makes it, and its output is marked: an Inf makes all scales NaN (`backend.marked`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition import bits, layout, numerics, scaling
from blockfp.definition.numerics import Quantized
from blockfp.formats import E2M1, Format

from ..activations import Making
from ..backend import unless
from . import agreement, columnwise, dequantize, fp4, mosaic, rowwise
from .source import Source

_ROW = 32  # elements per row for formats without blocks
_SMALLEST = 128  # minimum number of rows per program


def refusal(operation: str, format: Format) -> str | None:
    """Returns why there is no kernel, or None; `operation` is "quantize", "quantize_columnwise", "quantize_both" or
    "dequantize"."""
    if format.per_row:
        return f"no Pallas kernel does {operation} of a scale for each row, {format}"
    if format.scale.four_over_six and operation != "dequantize":
        return f"no Pallas kernel chooses between two scales of a block, as {operation} of {format} does"
    has_codes = format.element.bits == 8 or format.name.startswith("nvfp4")
    if operation == "quantize" and has_codes:
        return None
    if (
        operation in ("quantize_columnwise", "quantize_both")
        and format.element.bits == 8
        and (format.per_tensor or not format.square)
    ):
        return None if mosaic.CAN_TRANSPOSE else f"the Pallas kernel that does {operation} of {format} needs JAX 0.11 or newer"
    if operation == "dequantize" and (has_codes or (format.element is E2M1 and not format.square)):
        return None
    return f"no Pallas kernel does {operation} of {format}"


def refusal_of_making(making: Making, format: Format) -> str | None:
    """Returns why no kernel makes what it quantizes, or None; the first call compares the kernels' activation with XLA's."""
    what = f"{making.activation} in {making.dtype}"
    if jnp.dtype(making.dtype).itemsize != 2:
        return f"the Pallas kernels compute activations of 16-bit numbers, not {what}"
    if format.block is not None and format.block[0] != 1:
        return f"the Pallas kernels compute activations in blocks of one row, not {what} in those of {format}"
    gates = agreement.differing(making)
    return f"the Pallas kernels' {what} differs from XLA's, as at {', '.join(map(str, gates))}" if gates else None


def tensor_amax(x: jax.Array | Source) -> jax.Array:
    """Returns int32 (): the fp32 bits of x's largest magnitude, ignoring NaN."""
    x = Source.of(x)
    return jnp.max(rowwise.amax(jax.tree.map(_flat, x))) if x.gate.size else jnp.int32(0)


def quantize(x: jax.Array | Source, format: Format, nominal: str | None = None, *, amax: jax.Array | None = None) -> Quantized:
    """Quantizes x [..., rows, columns] to nearest as `numerics.quantize` does, in a format that `refusal` accepts.

    `amax` holds the int32 bits () of the tensor's amax for formats with a tensor scale, computed by default. For FP8 per
    tensor, float32 is the multiplier itself (delayed scaling), for arrays alone.
    """
    x = Source.of(x)
    if x.gate.size == 0:
        return numerics.quantize(x.gate, format, nominal=nominal)
    if format.per_tensor:
        whole = tensor_amax(x) if amax is None else amax
        scale, multiplier = _tensor_scale(x.gate.ndim, format, whole)
        codes = rowwise.cast(jax.tree.map(_flat, x), multiplier, format).reshape(-1)[: x.gate.size].reshape(x.shape)
        return _marked(x, whole, Quantized(codes, scale, None))
    matrices, rows = _whole_blocks(x, format)
    tensor_scale = None
    if format.scale.two_level:
        whole = tensor_amax(x) if amax is None else amax
        multiplier = scaling.nvfp4_multiplier(whole.reshape(1), format)
        tensor_scale = scaling.reciprocal(multiplier).view(jnp.float32)
        codes, scales = fp4.quantize(matrices, multiplier.view(jnp.float32), tensor_scale, format)
        tensor_scale = tensor_scale.reshape(())
    else:
        codes, scales, whole = rowwise.quantize(matrices, format, nominal or x.dtype.name)
    codes = _cut(codes, layout.codes_shape(x.shape, format), rows)
    scales = _cut(scales, layout.scales_shape(x.shape, format), rows // format.block[0])  # pyright: ignore[reportOptionalSubscript]
    return _marked(x, whole, Quantized(codes, scales, tensor_scale))


def columnwise_quantize(
    x: jax.Array | Source, format: Format, nominal: str | None = None, *, rows: bool, amax: jax.Array | None = None
) -> tuple[Quantized | None, Quantized]:
    """Computes (`quantize(x)` if `rows` else None, `quantize(x.mT)`) from one read of x [..., rows, columns].

    Formats are FP8 per tensor, or 8-bit with 1xB blocks; `nominal` and `amax` are those of `quantize`.
    """
    x = Source.of(x)
    if x.gate.size == 0:
        first = numerics.quantize(x.gate, format, nominal=nominal) if rows else None
        return first, numerics.quantize(x.gate.mT, format, nominal=nominal)
    height, width = columnwise.tile_shape(format, x, rows=rows)
    m, n = x.shape[-2:]
    down, across = max(_up(m, 128), height), _up(n, width)
    matrices = jax.tree.map(lambda one: _pad(one, down, across).reshape(-1, down, across), x)
    if format.per_tensor:
        whole = tensor_amax(x) if amax is None else amax
        scale, multiplier = _tensor_scale(x.gate.ndim, format, whole)
        codes = _each(lambda matrix: columnwise.cast(matrix, multiplier, format, rows=rows), matrices)
        *row, column = (Quantized(code, scale, None) for code in codes)
    else:
        parts = _each(lambda matrix: columnwise.quantize(matrix, format, nominal or x.dtype.name, rows=rows), matrices)
        whole = parts.pop() if x.activation else None
        *row, column = (Quantized(parts[i], parts[i + 1], None) for i in range(0, len(parts), 2))

    def cut(q: Quantized, shape: tuple[int, ...]) -> Quantized:
        scales = q.scales
        if not format.per_tensor:
            grid = layout.scales_shape(shape, format)
            scales = scales[:, : grid[-2], : grid[-1]].reshape(grid)
        return _marked(x, whole, Quantized(q.codes[:, : shape[-2], : shape[-1]].reshape(shape), scales, None))

    return cut(row[0], x.shape) if rows else None, cut(column, (*x.shape[:-2], n, m))


def quantize_made(
    gate: jax.Array, up: jax.Array | None, activation: str, format: Format, *, rows: bool, columns: bool
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes what an activation makes, along rows and columns; vmap runs one matrix after another."""

    @jax.custom_batching.custom_vmap
    def call(gate, up):
        source = Source(gate, up, activation)
        return columnwise_quantize(source, format, rows=rows) if columns else (quantize(source, format), None)

    @call.def_vmap
    def batched(size, is_batched, *parts):
        made = lax.map(lambda parts: call(*parts), _stacked(size, is_batched, parts))
        return made, jax.tree.map(lambda _: True, made)

    return call(gate, up)


def _each(kernel, matrices: Source) -> list[jax.Array]:
    """Runs a kernel for each matrix and stacks the results."""
    if matrices.shape[0] == 1:
        return [result[None] for result in kernel(jax.tree.map(lambda one: one[0], matrices))]
    return lax.map(kernel, matrices)


def _marked(x: Source, amaxes: jax.Array | None, q: Quantized) -> Quantized:
    return q if x.activation is None or amaxes is None else unless(jnp.max(amaxes) != bits.INFINITY, q)


def dequantize_array(
    codes: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None, format: Format, dtype: str, *, columns: int
) -> jax.Array:
    """Dequantizes as `numerics.dequantize` does, in a format that `refusal` accepts."""
    shape = (*codes.shape[:-1], columns)
    if math.prod(shape) == 0:
        return numerics.dequantize(codes, scales, tensor_scale, format, dtype, columns=columns)
    if format.per_tensor:
        flat = dequantize.rows(_flat(codes), scales.reshape(1), format, dtype)
        return flat.reshape(-1)[: codes.size].reshape(shape)
    block_rows, block = format.block  # pyright: ignore[reportGeneralTypeIssues]
    per_byte = 8 // format.element.bits
    if block_rows == 1:
        across = scales.shape[-1]
        codes = codes.reshape(-1, codes.shape[-1])
        rows = max(codes.shape[0], -(-_SMALLEST // across))
        flat = _pad(codes, rows, across * block // per_byte).reshape(rows * across, block // per_byte)
        flat_scales = _pad(scales.reshape(-1, across), rows, across).reshape(-1)
        if per_byte == 1:
            values = dequantize.rows(flat, flat_scales, format, dtype)
        else:
            scale = None if tensor_scale is None else tensor_scale.reshape(1)
            values = fp4.dequantize(flat, flat_scales, scale, format, dtype)
        return values.reshape(rows, across * block)[: codes.shape[0], :columns].reshape(shape)
    if per_byte == 2:
        # Repeat a square block's scale for each of its rows.
        repeated = layout.repeat_scales(scales, block_rows, codes.shape[-2])
        return dequantize_array(codes, repeated, tensor_scale, Format.parse("nvfp4"), dtype, columns=columns)
    down, across = scales.shape[-2], max(scales.shape[-1], 128 // block)
    padded = _pad(codes, down * block_rows, across * block).reshape(-1, across * block)
    values = dequantize.squares(padded, _pad(scales, down, across).reshape(-1, across), format, dtype)
    return values.reshape(*shape[:-2], down * block_rows, across * block)[..., : shape[-2], :columns]


def quantize_batched(x: jax.Array, format: Format) -> Quantized:
    """Computes `quantize`; vmap runs one call on the whole stack if scales don't span matrices."""

    @jax.custom_batching.custom_vmap
    def call(x):
        return quantize(x, format)

    @call.def_vmap
    def batched(size, is_batched, x):
        if format.has_tensor_scale:
            q = lax.map(call, x)
        else:
            q = call(x)
        return q, jax.tree.map(lambda _: True, q)

    return call(x)


def dequantize_batched(codes, scales, tensor_scale, format: Format, dtype: str, columns: int) -> jax.Array:
    """Computes `dequantize_array`; vmap runs one call on the whole stack if scales don't span matrices."""

    @jax.custom_batching.custom_vmap
    def call(codes, scales, tensor_scale):
        return dequantize_array(codes, scales, tensor_scale, format, dtype, columns=columns)

    @call.def_vmap
    def batched(size, is_batched, *parts):
        parts = _stacked(size, is_batched, parts)
        if format.has_tensor_scale:
            return lax.map(lambda parts: call(*parts), parts), True
        return call(*parts), True

    return call(codes, scales, tensor_scale)


def _stacked(size: int, is_batched: Sequence[bool | None], parts: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
    """Repeats the arrays that vmap doesn't map along a first axis of this size."""
    return tuple(
        part if flag or part is None else jnp.broadcast_to(part, (size, *part.shape))
        for part, flag in zip(parts, is_batched, strict=True)
    )


def _tensor_scale(ndim: int, format: Format, whole: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (stored scale, multiplier of shape (1,)) for one scale per tensor, from its amax or a float32 multiplier."""
    if whole.dtype == jnp.float32:
        pattern = whole.reshape(1).view(jnp.int32)
        return scaling.reciprocal(pattern).view(jnp.float32).reshape((1,) * ndim), whole.reshape(1)
    multiplier = scaling.fp8_multiplier(whole.reshape(1), format.element, format.scale, bits.FP32_MAX)
    scale = scaling.reciprocal(multiplier).view(jnp.float32).reshape((1,) * ndim)
    return scale, multiplier.view(jnp.float32)


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes x to [n, 32], padded with zeros."""
    total = max(_up(x.size, _ROW), _SMALLEST * _ROW)
    flat = x.reshape(-1)
    return (flat if total == x.size else jnp.pad(flat, (0, total - x.size))).reshape(-1, _ROW)


def _whole_blocks(x: Source, format: Format) -> tuple[Source, int]:
    """Returns (matrices of whole blocks for a kernel, their number of rows per matrix of x)."""
    block_rows, block = format.block  # pyright: ignore[reportGeneralTypeIssues]
    m, n = x.shape[-2:]
    if block_rows == 1:
        columns = _up(n, block)
        leading = math.prod(x.shape[:-2])
        # The minimum program size. Only the last matrix needs these rows, but padding all keeps the shape regular.
        rows = max(m, -(-_SMALLEST * block // (columns * leading)))
    else:
        # A program takes four 32x32 blocks side by side, or eight 16x16 blocks.
        rows, columns = _up(m, block_rows), max(_up(n, block), 128)
    return jax.tree.map(lambda one: _pad(one, rows, columns).reshape(-1, columns), x), rows


def _cut(matrix: jax.Array, shape: tuple[int, ...], rows: int) -> jax.Array:
    """Cuts an array of `shape` out of a matrix with `rows` rows per matrix of the array."""
    return matrix.reshape(*shape[:-2], rows, matrix.shape[-1])[..., : shape[-2], : shape[-1]]


def _pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    m, n = x.shape[-2:]
    if (m, n) == (rows, columns):
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, rows - m), (0, columns - n)))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
