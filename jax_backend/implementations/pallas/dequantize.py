"""Dequantization: reads codes and scales from global memory and writes values, each once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from blockfp.formats import Format

from . import blocks, mosaic
from .rowwise import ELEMENTS, programs_rows, square_layout, start


def rows(codes: jax.Array, scales: jax.Array, format: Format, dtype: str) -> jax.Array:
    """Returns values [n, B] of an 8-bit format with 1xB blocks or one scale per tensor.

    Codes are [n, B], n a multiple of 32 or at least 4096 / B; scales are [n], or (1,) for one scale per tensor.
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
        mosaic.store(values, at, blocks.values(code, decode, format.element, dtype))

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
    """Returns values of an 8-bit format with square blocks.

    Codes are [rows, columns], multiples of the block, with at least 128 columns; scales have one entry per block.
    """
    m, n = codes.shape
    block = format.block[0]  # pyright: ignore[reportOptionalSubscript]
    if block == 128:
        layout, grid = mosaic.row_layout(128, 8), (m // 32, n // 128)
    else:
        layout, grid = square_layout(), (m // 32, -(-n // 128))
        codes = codes.reshape(m, n // 32, 32)

    def body(codes, scales, values):
        row = mosaic.program(0)
        if block == 128:
            at = (mosaic.slice_of(row * 32, 32), mosaic.slice_of(mosaic.program(1) * 128, 128))
            decode = blocks.decode_scale(scales[row // 4, mosaic.program(1)], format)
        else:
            at = (mosaic.slice_of(row * 32, 32), mosaic.slice_of(start(1, n // 32, 4), 4))
            decode = blocks.decode_scale(mosaic.load(scales, (row, at[1]), layout.reduce((0, 2))), format)
            decode = mosaic.spread(decode, (32, 4, 32), (1,), layout)
        mosaic.store(values, at, blocks.values(mosaic.load(codes, at, layout), decode, format.element, dtype))

    [values] = mosaic.call(
        body,
        codes,
        scales,
        out=[jax.ShapeDtypeStruct(codes.shape, jnp.dtype(dtype))],
        grid=grid,
        name=f"blockfp_{format}_dequantize",
    )
    return values.reshape(m, n)
