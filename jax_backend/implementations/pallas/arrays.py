"""Applies the kernels to whole arrays: leading axes, ragged ends and small arrays, with the definition's bits.

Kernels take matrices of whole blocks of at least one program's size. Other arrays are padded with zeros, which don't change
amaxes, and codes and scales are cut out: exact, but a copy slower.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition import bits, layout, numerics, scaling
from blockfp.definition.numerics import Quantized
from blockfp.formats import E2M1, Format

from . import columnwise, dequantize, fp4, mosaic, rowwise

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


def tensor_amax(x: jax.Array) -> jax.Array:
    """Returns int32 (): the fp32 bits of x's largest magnitude, ignoring NaN."""
    return jnp.max(rowwise.amax(_flat(x))) if x.size else jnp.int32(0)


def quantize(x: jax.Array, format: Format, nominal: str | None = None, *, amax: jax.Array | None = None) -> Quantized:
    """Quantizes x [..., rows, columns] to nearest as `numerics.quantize` does, in a format that `refusal` accepts.

    `amax` holds the int32 bits () of the tensor's amax for formats with a tensor scale, computed by default. For FP8 per
    tensor, float32 is the multiplier itself (delayed scaling).
    """
    if x.size == 0:
        return numerics.quantize(x, format, nominal=nominal)
    if format.per_tensor:
        scale, multiplier = _tensor_scale(x, format, amax)
        codes = rowwise.cast(_flat(x), multiplier, format).reshape(-1)[: x.size].reshape(x.shape)
        return Quantized(codes, scale, None)
    matrix, rows = _whole_blocks(x, format)
    tensor_scale = None
    if format.scale.two_level:
        whole = tensor_amax(x) if amax is None else amax
        multiplier = scaling.nvfp4_multiplier(whole.reshape(1), format)
        tensor_scale = scaling.reciprocal(multiplier).view(jnp.float32)
        codes, scales = fp4.quantize(matrix, multiplier.view(jnp.float32), tensor_scale, format)
        tensor_scale = tensor_scale.reshape(())
    else:
        codes, scales = rowwise.quantize(matrix, format, nominal or x.dtype.name)
    return Quantized(
        _cut(codes, layout.codes_shape(x.shape, format), rows),
        _cut(scales, layout.scales_shape(x.shape, format), rows // format.block[0]),  # pyright: ignore[reportOptionalSubscript]
        tensor_scale,
    )


def columnwise_quantize(
    x: jax.Array, format: Format, nominal: str | None = None, *, rows: bool, amax: jax.Array | None = None
) -> tuple[Quantized | None, Quantized]:
    """Computes (`quantize(x)` if `rows` else None, `quantize(x.mT)`) from one read of x [..., rows, columns].

    Formats are FP8 per tensor, or 8-bit with 1xB blocks; `nominal` and `amax` are those of `quantize`.
    """
    if x.size == 0:
        first = numerics.quantize(x, format, nominal=nominal) if rows else None
        return first, numerics.quantize(x.mT, format, nominal=nominal)
    height, width = columnwise.tile_shape(format, x.dtype, rows=rows)
    m, n = x.shape[-2:]
    padded = _pad(x, max(_up(m, 128), height), _up(n, width))
    matrices = padded.reshape(-1, *padded.shape[-2:])
    if format.per_tensor:
        scale, multiplier = _tensor_scale(x, format, amax)
        codes = _each(lambda matrix: columnwise.cast(matrix, multiplier, format, rows=rows), matrices)
        *row, column = (Quantized(code, scale, None) for code in codes)
    else:
        parts = _each(lambda matrix: columnwise.quantize(matrix, format, nominal or x.dtype.name, rows=rows), matrices)
        *row, column = (Quantized(parts[i], parts[i + 1], None) for i in range(0, len(parts), 2))

    def cut(q: Quantized, shape: tuple[int, ...]) -> Quantized:
        scales = q.scales
        if not format.per_tensor:
            grid = layout.scales_shape(shape, format)
            scales = scales[:, : grid[-2], : grid[-1]].reshape(grid)
        return Quantized(q.codes[:, : shape[-2], : shape[-1]].reshape(shape), scales, None)

    return cut(row[0], x.shape) if rows else None, cut(column, (*x.shape[:-2], n, m))


def _each(kernel, matrices: jax.Array) -> list[jax.Array]:
    """Runs a kernel for each matrix and stacks the results."""
    if matrices.shape[0] == 1:
        return [result[None] for result in kernel(matrices[0])]
    return lax.map(kernel, matrices)


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
        parts = [
            part if flag or part is None else jnp.broadcast_to(part, (size, *part.shape))
            for part, flag in zip(parts, is_batched, strict=True)
        ]
        if format.has_tensor_scale:
            return lax.map(lambda parts: call(*parts), tuple(parts)), True
        return call(*parts), True

    return call(codes, scales, tensor_scale)


def _tensor_scale(x: jax.Array, format: Format, whole: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (stored scale, multiplier of shape (1,)) for one scale per tensor."""
    if whole is not None and whole.dtype == jnp.float32:
        pattern = whole.reshape(1).view(jnp.int32)
        return scaling.reciprocal(pattern).view(jnp.float32).reshape((1,) * x.ndim), whole.reshape(1)
    whole = tensor_amax(x) if whole is None else whole
    multiplier = scaling.fp8_multiplier(whole.reshape(1), format.element, format.scale, bits.FP32_MAX)
    scale = scaling.reciprocal(multiplier).view(jnp.float32).reshape((1,) * x.ndim)
    return scale, multiplier.view(jnp.float32)


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes x to [n, 32], padded with zeros."""
    total = max(_up(x.size, _ROW), _SMALLEST * _ROW)
    flat = x.reshape(-1)
    return (flat if total == x.size else jnp.pad(flat, (0, total - x.size))).reshape(-1, _ROW)


def _whole_blocks(x: jax.Array, format: Format) -> tuple[jax.Array, int]:
    """Returns (matrix of whole blocks for a kernel, its number of rows per matrix of x)."""
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
    return _pad(x, rows, columns).reshape(-1, columns), rows


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
