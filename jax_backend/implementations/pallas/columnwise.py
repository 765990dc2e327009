"""Columnwise kernels: load a tile to shared memory, read it transposed, and write its codes from there.

What an activation makes replaces the gate in its tile, so that it is computed once for both directions.

Columnwise quantization of x is rowwise quantization of its transpose: codes [columns, rows], scales along them. With
`rows=True` the same read of x also gives rowwise codes and scales. Beyond the ends of x the copy engine reads zeros, which
don't change amaxes, and writes nothing; threads write the scales to arrays of whole tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.formats import Format

from . import blocks, mosaic
from .rowwise import as_stored, kernel_name, scales_type
from .source import Source


def quantize(x: Source, format: Format, nominal: str, *, rows: bool) -> list[jax.Array]:
    """Returns columnwise [codes, scales] of an 8-bit format with 1xB blocks; with `rows`, rowwise [codes, scales] come first.

    x is [m, n], m a multiple of 128 and at least a tile's rows (`tile_shape`), n a multiple of its columns. Scales cover whole
    tiles. Formats are FP8 1x128, MXFP8 and MXINT8. If an activation makes x, the amaxes of all tiles come last, int32.
    """
    m, n = x.shape
    block = format.block[1]  # pyright: ignore[reportOptionalSubscript]
    height, width = tile_shape(format, x, rows=rows)
    bytewise = format.scale.dtype == "uint8"

    def body(*refs):
        inputs, outputs, amaxes, *scratch = mosaic.divided(
            refs, len(x.arrays), 4 if rows else 2, bool(x.activation), len(x.arrays), 1 + rows, 1
        )
        if rows:
            top, left = mosaic.program(0) * height, mosaic.program(1) * width
        else:
            # Concurrent programs write neighbouring codes and scales of the same columns.
            top, left = mosaic.program(1) * height, mosaic.program(0) * width
        down, across = mosaic.slice_of(top, height), mosaic.slice_of(left, width)
        tile, staged = _fetch(x, [ref.at[down, across] for ref in inputs], *scratch)
        codes, scales = outputs[-2:]
        largest: Any = 0
        for i in range(0, height, 128):
            parts = []
            word: Any = 0
            for k in range(i, i + 128, block):
                code, stored, amax = encode(mosaic.load_transposed(tile, mosaic.slice_of(k, block)))
                parts.append(code)
                largest = jnp.maximum(largest, amax)
                # Pack the scales of 128 rows into a word; bytes would be written one by one, each to its own row.
                word = word | stored << (k - i) // 4
            mosaic.store(scales, (across, top // 128 + i // 128), word if bytewise else word.view(jnp.float32))
            staged[0][:, mosaic.slice_of(i, 128)] = jnp.concatenate(parts, axis=1)
        for i in range(0, height if rows else 0, 64):
            parts, values = [], mosaic.load_rows(tile, mosaic.slice_of(i, 64))
            for k in range(0, width, block):
                code, stored, _ = encode(values[:, k : k + block])
                parts.append(code)
                mosaic.store(outputs[1], (left // block + k // block, mosaic.slice_of(top + i, 64)), as_stored(stored, format))
            staged[1][mosaic.slice_of(i, 64)] = jnp.concatenate(parts, axis=1)
        pairs = [(staged[0], codes.at[across, down])]
        for ref in amaxes:
            ref[mosaic.program(0), mosaic.program(1)] = jnp.max(largest)
        mosaic.send(*pairs, *([(staged[1], outputs[0].at[down, across])] if rows else []))

    def encode(values):
        amax = blocks.largest(values, (1,))
        stored, multiplier = blocks.scales(values, (1,), format, nominal, amax)
        multiplier = mosaic.spread(multiplier, values.shape, (0,), mosaic.WGMMA)
        return blocks.codes(blocks.to_fp32(values), multiplier, format.element, on_gpu=mosaic.on_gpu()), stored, amax

    down, across = -(-m // height), n // width
    grid = (down, across) if rows else (across, down)
    rowwise = [jax.ShapeDtypeStruct((m, n), jnp.uint8), scales_type((n // block, down * height), format)]
    outputs = mosaic.call(
        body,
        *x.arrays,
        out=[
            *(rowwise if rows else []),
            jax.ShapeDtypeStruct((n, m), jnp.uint8),
            jax.ShapeDtypeStruct((n, down * height // 128), jnp.int32 if bytewise else jnp.float32),
            *([jax.ShapeDtypeStruct(grid, jnp.int32)] if x.activation else []),
        ],
        grid=grid,
        scratch=_scratch(x, height, width, rows=rows),
        name=kernel_name(x, format, "both" if rows else "columnwise"),
    )
    if bytewise:
        last = 3 if rows else 1
        outputs[last] = lax.bitcast_convert_type(outputs[last], jnp.uint8).reshape(n, -1)
    if rows:
        # Written along the rows of x, so that neighbours are adjacent in memory.
        outputs[1] = outputs[1].T
    return outputs


def cast(x: Source, multiplier: jax.Array, format: Format, *, rows: bool) -> list[jax.Array]:
    """Returns [codes of x transposed] of FP8 with one scale per tensor; with `rows`, the codes of x come first.

    x is that of `quantize`; `multiplier` is float32 of shape (1,).
    """
    m, n = x.shape
    height, width = tile_shape(format, x, rows=rows)

    def body(*refs):
        inputs, [multiplier], outputs, *scratch = mosaic.divided(refs, len(x.arrays), 1, 1 + rows, len(x.arrays), 1 + rows, 1)
        down = mosaic.slice_of(mosaic.program(0) * height, height)
        across = mosaic.slice_of(mosaic.program(1) * width, width)
        tile, staged = _fetch(x, [ref.at[down, across] for ref in inputs], *scratch)
        for i in range(0, height, 32):
            part = mosaic.slice_of(i, 32)
            staged[0][:, part] = encode(mosaic.load_transposed(tile, part), multiplier)
        for i in range(0, height if rows else 0, 64):
            part = mosaic.slice_of(i, 64)
            staged[1][part] = encode(mosaic.load_rows(tile, part), multiplier)
        pairs = [(staged[0], outputs[-1].at[across, down])]
        mosaic.send(*pairs, *([(staged[1], outputs[0].at[down, across])] if rows else []))

    def encode(values, multiplier):
        return blocks.codes(blocks.to_fp32(values), multiplier[0], format.element, on_gpu=mosaic.on_gpu())

    return mosaic.call(
        body,
        *x.arrays,
        multiplier,
        out=[*([jax.ShapeDtypeStruct((m, n), jnp.uint8)] if rows else []), jax.ShapeDtypeStruct((n, m), jnp.uint8)],
        grid=(-(-m // height), n // width),
        scratch=_scratch(x, height, width, rows=rows, swizzle=32),
        name=kernel_name(x, format, "both" if rows else "columnwise"),
    )


def _scratch(x: Source, height: int, width: int, *, rows: bool, swizzle: int = 128) -> list[Any]:
    """Returns the types of tiles for the arrays of x, tiles for codes, columnwise first, and a barrier."""
    return [
        *(mosaic.tile(height, width, x.dtype) for _ in x.arrays),
        mosaic.tile(width, height, jnp.uint8, swizzle=swizzle),
        *([mosaic.tile(height, width, jnp.uint8)] if rows else []),
        mosaic.Barrier(num_arrivals=len(x.arrays)),
    ]


def _fetch(x: Source, parts: list[Any], tiles: list[Any], staged: list[Any], barriers: list[Any]) -> tuple[Any, list[Any]]:
    """Returns (the tile of what is quantized, the tiles for codes): fetches parts of the arrays of x, and makes it of them."""
    mosaic.fetch(zip(parts, tiles, strict=True), barriers[0])
    if x.activation:
        height, width = tiles[0].shape

        def make(i: Any, carry: None) -> None:
            rows = mosaic.slice_of(i * 64, 64)
            for k in range(0, width, 64):
                part = rows, mosaic.slice_of(k, 64)
                tiles[0][part] = x.made([mosaic.load_rows(tile, part) for tile in tiles])

        lax.fori_loop(0, height // 64, make, None)
        mosaic.commit()
    return tiles[0], staged


def tile_shape(format: Format, x: Source, *, rows: bool) -> tuple[int, int]:
    """Returns (rows, columns) of a program's tile; these ran fastest on an H200.

    A wide tile leaves few programs per multiprocessor, which is enough if a block takes few instructions.
    """
    if rows:
        return (128, 128) if format.block is not None and format.block[1] == 128 else (256, 64)
    few = format.block is not None and format.element.has_nan and format.scale.name != "fp32"
    return (256, 128) if few and x.dtype.itemsize * len(x.arrays) == 2 else (256, 64)
