"""Dequantize: codes and scales from global memory, values back to it, each once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from blockfp.formats import Format

from . import blocks, mosaic
from .rowwise import ELEMENTS, programs_rows, start


def rows(codes: jax.Array, scales: jax.Array, format: Format, dtype: str) -> jax.Array:
    """Values of an 8-bit format with 1xB blocks, or of one scale per tensor.

    Args:
        codes: [n, B], n a multiple of 32 or at least 4096 / B.
        scales: [n], or (1,) for one scale per tensor.
        dtype: name of the output's dtype.
    """
    total, block = codes.shape
    count = programs_rows(total, ELEMENTS // block)
    layout = mosaic.row_layout(block, 8)

    def body(codes, scales, values):
        at = mosaic.slice_of(start(0, total, count), count)
        code = mosaic.load(codes, at, layout)
        if format.per_tensor:
            decode = scales[0]
        else:
            decode = blocks.decode_scale(mosaic.load(scales, at, layout.reduce(1)), format)
            decode = mosaic.spread(decode, code.shape, (0,), layout)
        values[at] = blocks.values(code, decode, format.element, dtype)

    [values] = mosaic.call(
        body,
        codes,
        scales,
        out=[jax.ShapeDtypeStruct(codes.shape, jnp.dtype(dtype))],
        grid=(-(-total // count),),
        name=f"blockfp_{format}_dequantize",
    )
    return values


def squares(codes: jax.Array, scales: jax.Array, format: Format, dtype: str) -> jax.Array:
    """Values of an 8-bit format with square blocks.

    Args:
        codes: [rows, columns], multiples of the block.
        scales: one for each block.
        dtype: name of the output's dtype.
    """
    m, n = codes.shape
    block = format.block[0]  # pyright: ignore[reportOptionalSubscript]
    height = min(ELEMENTS // block, block)
    layout = mosaic.row_layout(block, 8)

    def body(codes, scales, values):
        row, column = mosaic.program(0), mosaic.program(1)
        at = (mosaic.slice_of(row * height, height), mosaic.slice_of(column * block, block))
        code = mosaic.load(codes, at, layout)
        decode = blocks.decode_scale(scales[row * height // block, column], format)
        values[at] = blocks.values(code, decode, format.element, dtype)

    [values] = mosaic.call(
        body,
        codes,
        scales,
        out=[jax.ShapeDtypeStruct((m, n), jnp.dtype(dtype))],
        grid=(m // height, n // block),
        name=f"blockfp_{format}_dequantize",
    )
    return values
