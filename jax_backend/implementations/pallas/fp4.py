"""Kernels for packed E2M1: NVFP4 quantization, and dequantization of NVFP4 and MXFP4.

Two codes share a byte, so kernels process pairs of neighbours: 16-bit inputs and outputs as 32-bit words of a pair, fp32 as two
arrays of every other element.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.formats import Format

from . import blocks, mosaic
from .rowwise import ELEMENTS, kernel_name, programs_rows, start
from .source import Source


def quantize(x: Source, multiplier: jax.Array, tensor_scale: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Returns NVFP4 (codes, scales) of matrices x [rows, columns] of whole blocks, 1x16 or 16x16.

    `multiplier` is the tensor's (`scaling.nvfp4_multiplier`), float32 (1,); `tensor_scale` is its reciprocal.
    """
    m, n = x.shape
    square = format.square
    across = n // 16
    vector = 1 if x.dtype == jnp.float32 else 4  # strided elements can't be read as vectors
    if square:
        lead, count, grid = (m, across), (16, 8), (m // 16, -(-across // 8))
        layout, axes, spread = _square_layout(vector), (2, 0), (1,)
    else:
        total = m * across
        lead, count = (total,), (programs_rows(total, ELEMENTS // 16),)
        grid, layout, axes, spread = (-(-total // count[0]),), mosaic.row_layout(8, 8 if vector == 4 else 1), (1,), (0,)

    def body(*refs):
        *inputs, multiplier, tensor_scale, codes, scales = refs
        if square:
            at = (mosaic.slice_of(mosaic.program(0) * 16, 16), mosaic.slice_of(start(1, across, 8), 8))
            scales_at = (mosaic.program(0), at[1])
        else:
            at = scales_at = (mosaic.slice_of(start(0, lead[0], count[0]), count[0]),)
        pairs = zip(*(_load_pair(words, at, layout, x.dtype) for words in inputs), strict=True)
        pair = [blocks.to_fp32(x.made(values)) for values in pairs]
        amax = jnp.maximum(*(blocks.largest(values, axes) for values in pair))
        nan = blocks.holds_nan(pair[0], axes) | blocks.holds_nan(pair[1], axes)
        stored, encode = blocks.nvfp4_scales(amax, nan, multiplier[0], tensor_scale[0], format, on_gpu=mosaic.on_gpu())
        encode = mosaic.spread(encode, pair[0].shape, spread, layout)
        low, high = (blocks.e2m1_codes(values, encode, on_gpu=mosaic.on_gpu()) for values in pair)
        mosaic.store(codes, at, (low | (high << 4)).astype(jnp.uint8))
        mosaic.store(scales, scales_at, stored.astype(jnp.uint8))

    codes, scales = mosaic.call(
        body,
        *(_pairs(one, lead) for one in x.arrays),
        multiplier,
        tensor_scale,
        out=[
            jax.ShapeDtypeStruct((*lead, 8), jnp.uint8),
            jax.ShapeDtypeStruct((m // 16, across) if square else lead, jnp.uint8),
        ],
        grid=grid,
        name=kernel_name(x, format),
    )
    return codes.reshape(m, n // 2), scales.reshape(m // format.block[0], across)  # pyright: ignore[reportOptionalSubscript]


def dequantize(codes: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None, format: Format, dtype: str) -> jax.Array:
    """Returns values [n, B] of packed E2M1 with 1xB blocks.

    Codes are [n, B / 2], n a multiple of 32 or at least 4096 / B; scales are [n]; `tensor_scale` is float32 (1,) for NVFP4.
    """
    total, width = codes.shape
    count = programs_rows(total, ELEMENTS // (2 * width))
    wide = dtype == "float32"
    layout = mosaic.row_layout(width, 1 if wide else 4)

    def body(codes, scales, *refs):
        at = mosaic.slice_of(start(0, total, count), count)
        byte = mosaic.load(codes, at, layout).astype(jnp.int32)
        stored = mosaic.load(scales, at, layout.reduce(1))
        if tensor_scale is None:
            decode = blocks.decode_scale(stored, format)
        else:
            decode = blocks.e4m3_values(stored) * refs[0][0]
        decode = mosaic.spread(decode, byte.shape, (0,), layout)
        sides = (blocks.e2m1_values(code, on_gpu=mosaic.on_gpu()) for code in (byte & 0xF, byte >> 4))
        pair = [blocks.rounded(values * decode, dtype) for values in sides]
        if wide:
            for side, values in enumerate(pair):
                mosaic.store(refs[-1], (at, slice(None), side), values)
        else:
            low, high = (values.view(jnp.int16).astype(jnp.int32) for values in pair)
            mosaic.store(refs[-1], at, (low & 0xFFFF) | (high << 16))

    out = jax.ShapeDtypeStruct((total, width, 2) if wide else (total, width), jnp.float32 if wide else jnp.int32)
    operands = [codes, scales] if tensor_scale is None else [codes, scales, tensor_scale]
    [values] = mosaic.call(body, *operands, out=[out], grid=(-(-total // count),), name=f"blockfp_{format}_dequantize")
    if not wide:
        values = lax.bitcast_convert_type(values, jnp.dtype(dtype))
    return values.reshape(total, 2 * width)


def _pairs(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Views x as [*shape, 8] words of two 16-bit numbers, or [*shape, 8, 2] fp32 numbers."""
    pairs = x.reshape(*shape, 8, 2)
    return pairs if x.dtype == jnp.float32 else lax.bitcast_convert_type(pairs, jnp.int32)


def _load_pair(words, at, layout, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns float32 arrays of the first and the second numbers of pairs."""
    if dtype == jnp.float32:
        rest = (slice(None),) * (len(words.shape) - 1 - len(at))
        return mosaic.load(words, (*at, *rest, 0), layout), mosaic.load(words, (*at, *rest, 1), layout)
    word = mosaic.load(words, at, layout)
    if dtype == jnp.bfloat16:
        return (word << 16).view(jnp.float32), (word & -0x10000).view(jnp.float32)
    low, high = (half.astype(jnp.int16).view(jnp.float16) for half in (word, word >> 16))
    return blocks.to_fp32(low), blocks.to_fp32(high)


def _square_layout(vector: int):
    """Layout of [16, 8, 8] pairs, with two 16x16 blocks per warp."""
    rows = 8 if vector == 4 else 4
    tiling = mosaic.plgpu.Tiling(((16, 8, 8), (16, 2, 8), (rows, 1, 8), (vector,)))
    lanes = (-4, -2, -6) if vector == 4 else (-4, -2)
    return mosaic.plgpu.Layout.TILED(tiling, warp_dims=(-9,), lane_dims=lanes, vector_dim=-1)
