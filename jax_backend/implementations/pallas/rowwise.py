"""Rowwise kernels: each program loads its blocks from global memory to registers and writes codes and scales.

Many small programs keep more loads in flight than a pipeline through shared memory: with 32 elements per thread they run as
fast as a copy. The last program of an axis is moved back to end at the axis's end; it and its neighbour write the same results
where they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from blockfp.formats import Format

from . import blocks, mosaic
from .source import Source

ELEMENTS = 4096  # elements per program


def quantize(x: Source, format: Format, nominal: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (codes, scales, amaxes) of an 8-bit format with blocks, for matrices x [rows, columns] of whole blocks.

    Formats are FP8 blocks, MXFP8 and MXINT8; `nominal` is that of `numerics.quantize`. The amaxes, int32, are those of each
    program's part of what an activation made; other sources have None. Only blocks of one row take an activation.
    """
    block_rows, block_columns = format.block  # pyright: ignore[reportGeneralTypeIssues]
    if block_rows == 1:
        return _rows(x, format, nominal)
    square = _squares if block_columns == 32 else _large_squares
    return *square(x.gate, format, nominal), None


def _rows(x: Source, format: Format, nominal: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rows, columns = x.shape
    block = format.block[1]  # pyright: ignore[reportOptionalSubscript]
    total = rows * columns // block
    count = programs_rows(total, ELEMENTS // block)
    grid = -(-total // count)
    layout = mosaic.row_layout(block, 8)

    def body(*refs):
        inputs, (codes, scales, *amaxes) = refs[: len(x.arrays)], refs[len(x.arrays) :]
        at = mosaic.slice_of(start(0, total, count), count)
        values = x.made([mosaic.load(ref, at, layout) for ref in inputs])
        amax = blocks.largest(values, (1,))
        stored, multiplier = blocks.scales(values, (1,), format, nominal, amax)
        multiplier = mosaic.spread(multiplier, values.shape, (0,), layout)
        mosaic.store(codes, at, blocks.codes(blocks.to_fp32(values), multiplier, format.element, on_gpu=mosaic.on_gpu()))
        mosaic.store(scales, at, as_stored(stored, format))
        for ref in amaxes:
            ref[mosaic.program(0)] = jnp.max(amax)

    codes, scales, *amaxes = mosaic.call(
        body,
        *(one.reshape(total, block) for one in x.arrays),
        out=[
            jax.ShapeDtypeStruct((total, block), jnp.uint8),
            scales_type((total,), format),
            *([jax.ShapeDtypeStruct((grid,), jnp.int32)] if x.activation else []),
        ],
        grid=(grid,),
        name=kernel_name(x, format, "rowwise"),
    )
    return codes.reshape(rows, columns), scales.reshape(rows, columns // block), amaxes[0] if amaxes else None


def _squares(x: jax.Array, format: Format, nominal: str) -> tuple[jax.Array, jax.Array]:
    """Quantizes 32x32 blocks, one per warp."""
    rows, columns = x.shape
    across = columns // 32
    layout = square_layout()

    def body(x, codes, scales):
        row = mosaic.program(0)
        first = start(1, across, 4)
        at = (mosaic.slice_of(row * 32, 32), mosaic.slice_of(first, 4))
        values = mosaic.load(x, at, layout)
        stored, multiplier = blocks.scales(values, (2, 0), format, nominal)
        multiplier = mosaic.spread(multiplier, values.shape, (1,), layout)
        mosaic.store(codes, at, blocks.codes(blocks.to_fp32(values), multiplier, format.element, on_gpu=mosaic.on_gpu()))
        mosaic.store(scales, (row, mosaic.slice_of(first, 4)), as_stored(stored, format))

    codes, scales = mosaic.call(
        body,
        x.reshape(rows, across, 32),
        out=[jax.ShapeDtypeStruct((rows, across, 32), jnp.uint8), scales_type((rows // 32, across), format)],
        grid=(rows // 32, -(-across // 4)),
        name=f"blockfp_{format}",
    )
    return codes.reshape(rows, columns), scales


def _large_squares(x: jax.Array, format: Format, nominal: str) -> tuple[jax.Array, jax.Array]:
    """Quantizes 128x128 blocks, one per program."""
    rows, columns = x.shape
    layout = mosaic.row_layout(128, 8)

    def body(x, codes, scales):
        row, column = mosaic.program(0), mosaic.program(1)
        at = (mosaic.slice_of(row * 128, 128), mosaic.slice_of(column * 128, 128))
        values = mosaic.load(x, at, layout)
        stored, multiplier = blocks.scales(values, (1, 0), format, nominal)
        multiplier = mosaic.spread(multiplier, values.shape, (), layout)
        mosaic.store(codes, at, blocks.codes(blocks.to_fp32(values), multiplier, format.element, on_gpu=mosaic.on_gpu()))
        scales[row, column] = as_stored(stored, format)

    codes, scales = mosaic.call(
        body,
        x,
        out=[jax.ShapeDtypeStruct((rows, columns), jnp.uint8), scales_type((rows // 128, columns // 128), format)],
        grid=(rows // 128, columns // 128),
        name=f"blockfp_{format}",
    )
    return codes, scales


def cast(x: Source, multiplier: jax.Array, format: Format) -> jax.Array:
    """Returns the codes of x [n, 32] in FP8 with one scale per tensor; `multiplier` is float32 (1,)."""
    total = x.shape[0]
    count = programs_rows(total, ELEMENTS // 32)
    layout = mosaic.row_layout(32, 8)

    def body(*refs):
        *inputs, multiplier, codes = refs
        at = mosaic.slice_of(start(0, total, count), count)
        values = blocks.to_fp32(x.made([mosaic.load(ref, at, layout) for ref in inputs]))
        mosaic.store(codes, at, blocks.codes(values, multiplier[0], format.element, on_gpu=mosaic.on_gpu()))

    [codes] = mosaic.call(
        body,
        *x.arrays,
        multiplier,
        out=[jax.ShapeDtypeStruct(x.shape, jnp.uint8)],
        grid=(-(-total // count),),
        name=kernel_name(x, format, "rowwise"),
    )
    return codes


def made(x: Source) -> jax.Array:
    """Returns what an activation makes of x [n, 32], stored."""
    total = x.shape[0]
    count = programs_rows(total, ELEMENTS // 32)
    layout = mosaic.row_layout(32, 8)

    def body(*refs):
        at = mosaic.slice_of(start(0, total, count), count)
        mosaic.store(refs[-1], at, x.made([mosaic.load(ref, at, layout) for ref in refs[:-1]]))

    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return mosaic.call(body, *x.arrays, out=out, grid=(-(-total // count),), name=f"blockfp_{x.activation}")[0]


def amax(x: Source) -> jax.Array:
    """Returns the int32 bits of the largest magnitude in each program's part of x [n, 32]; the caller takes their maximum."""
    total = x.shape[0]
    count = programs_rows(total, ELEMENTS // 32)
    layout = mosaic.row_layout(32, 8)
    grid = -(-total // count)

    def body(*refs):
        *inputs, amax = refs
        at = mosaic.slice_of(start(0, total, count), count)
        amax[mosaic.program(0)] = blocks.largest(x.made([mosaic.load(ref, at, layout) for ref in inputs]), (1, 0))

    [partial] = mosaic.call(body, *x.arrays, out=[jax.ShapeDtypeStruct((grid,), jnp.int32)], grid=(grid,), name="blockfp_amax")
    return partial


def square_layout() -> mosaic.Layout:
    """Layout of [32 rows, 4 blocks, 32 columns], with one block per warp."""
    tiling = mosaic.plgpu.Tiling(((32, 4, 32), (32, 1, 32), (8, 1, 32), (8,)))
    return mosaic.plgpu.Layout.TILED(tiling, warp_dims=(-9,), lane_dims=(-4, -2), vector_dim=-1)


def kernel_name(x: Source, format: Format, direction: str = "") -> str:
    """Returns the name by which a profile shows a kernel."""
    return "_".join(part for part in ("blockfp", x.activation, str(format), direction) if part)


def programs_rows(total: int, most: int) -> int:
    """Returns the rows per program, given the total number of rows (128 or more) and the maximum per program."""
    return most if total >= most else 128


def start(axis: int, total: int, count: int) -> jax.Array:
    """Returns the first of this program's `count` items of an axis of `total`."""
    first = mosaic.program(axis) * count
    return first if total % count == 0 else jnp.minimum(first, total - count)


def as_stored(stored: jax.Array, format: Format) -> jax.Array:
    """Converts scales to their storage dtype."""
    return stored.view(jnp.float32) if format.scale.dtype == "float32" else stored.astype(jnp.uint8)


def scales_type(shape: Sequence[int], format: Format) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of stored scales."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(format.scale.dtype))
