"""Shapes, packing, and the layouts of scales."""

import numpy as np
import pytest
import statement

from blockfp.definition import layout, numerics
from blockfp.formats import FORMATS


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 7, 8, 31, 64])
def test_packing(bits, columns):
    codes = np.random.default_rng(columns).integers(0, 1 << bits, (3, 2, columns)).astype(np.uint8)
    packed = layout.pack(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (3, 2, layout.packed_columns(columns, bits))
    np.testing.assert_array_equal(layout.unpack(packed, bits, columns), codes)
    np.testing.assert_array_equal(statement.unpack(packed, bits, columns), codes)
    if bits == 4:
        assert packed.shape[-1] == -(-columns // 2)
    if bits == 6:
        assert packed.shape[-1] == 3 * -(-columns // 4)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_shapes_are_those_of_the_arrays(format):
    for shape in ((5, 7), (2, 130, 300), (0, 3)):
        q = numerics.quantize(np.zeros(shape, np.float32), format)
        assert q.codes.shape == layout.codes_shape(shape, format)
        assert q.scales.shape == layout.scales_shape(shape, format)


def test_grid_of_a_shard():
    for size in range(6):
        for origin in range(10):
            touched = {(origin + i) // 4 for i in range(size)}
            assert layout.block_grid(size, 4, origin) == len(touched)


@pytest.mark.parametrize("origin", [(0, 0), (3, 5), (4, 2)])
def test_blocks_come_apart_and_together(origin):
    x = np.arange(2 * 9 * 11).reshape(2, 9, 11)
    blocks = layout.split_blocks(x, (4, 3), origin)
    assert blocks.shape == (2, layout.block_grid(9, 4, origin[0]), 4, layout.block_grid(11, 3, origin[1]), 3)
    np.testing.assert_array_equal(layout.join_blocks(blocks, x.shape, origin), x)
    for i, j in ((0, 0), (8, 10), (5, 4)):
        row, column = i + origin[0] % 4, j + origin[1] % 3
        assert blocks[1, row // 4, row % 4, column // 3, column % 3] == x[1, i, j]


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (200, 9), (256, 8)])
def test_interleaving_follows_the_formula(shape):
    scales = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(np.uint8)
    out = layout.interleave_scales(scales)
    tiles = -(-shape[1] // 4)
    assert out.shape == (2, -(-shape[0] // 128) * tiles * 512)
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert out[1, at] == scales[1, i, j]
    assert out.sum(dtype=np.int64) == scales.sum(dtype=np.int64)
    np.testing.assert_array_equal(layout.deinterleave_scales(out, shape), scales)


def test_repeated_scales():
    scales = np.arange(6, dtype=np.uint8).reshape(3, 2)
    repeated = layout.repeat_scales(scales, 16, 40)
    assert repeated.shape == (40, 2)
    np.testing.assert_array_equal(repeated, scales[np.arange(40) // 16])
