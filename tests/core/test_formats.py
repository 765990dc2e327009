"""Formats as values (names, identity, contracts of the elements), shapes, packing, and the layouts of scales."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import statement

from blockfp import formats
from blockfp.definition import layout, numerics, scaling
from blockfp.formats import ELEMENTS, FORMATS, NAMES, Format

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def test_the_names():
    expected = {f"fp8_{e}{s}" for e in ("e4m3", "e5m2") for s in ("", "_pow2")}
    expected |= {f"fp8_{e}_row{s}" for e in ("e4m3", "e5m2") for s in ("", "_pow2")}
    expected |= {f"fp8_{e}_{b}{s}" for e in ("e4m3", "e5m2") for b in ("1x128", "128x128") for s in ("", "_fp32")}
    mx = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
    expected |= {f"{m}{b}{r}" for m in mx for b in ("", "_32x32") for r in ("", "_floor")}
    chosen = ("_4over6", "_4over6_448", "_4over6_mse", "_4over6_448_mse")
    expected |= {f"nvfp4{rule}{b}" for rule in ("", *chosen) for b in ("", "_16x16")}
    expected.add("nvfp4_guarded")
    assert set(NAMES) == expected
    assert len(NAMES) == len(FORMATS) == 51


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_name_is_an_identity(format):
    assert Format.parse(format.name) is format
    assert Format.parse(format) is format
    assert pickle.loads(pickle.dumps(format)) is format
    assert copy.copy(format) is copy.deepcopy(format) is format
    assert str(format) == format.name
    assert {format: 1}[Format.parse(str(format))] == 1
    assert (format.element.name, format.block) == statement.describe(format.name)[:2]
    with pytest.raises(AttributeError):
        format.block = (1, 1)


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'mxfp8_e4m3'"):
        Format.parse("mxfp8_e4m4")
    with pytest.raises(ValueError, match="did you mean 'mxfp8_e4m3'"):
        Format.parse("MXFP8_E4M3")
    with pytest.raises(ValueError, match=r"blockfp\.formats\.NAMES"):
        Format.parse("?")
    with pytest.raises(TypeError, match="int: 8"):
        Format.parse(8)


def test_constants_are_the_named_formats():
    assert formats.MXFP8.name == "mxfp8_e4m3"
    assert formats.FP8_BLOCK_128x128.block == (128, 128)
    assert formats.NVFP4.scale.two_level
    assert {f.name for f in FORMATS if f.per_row} == {f for f in NAMES if "_row" in f}
    assert {f.name for f in FORMATS if f.has_tensor_scale and f.block} == {f for f in NAMES if f.startswith("nvfp4")}
    assert all(f.has_tensor_scale for f in FORMATS if f.block is None)
    assert {f.scale.name for f in FORMATS if f.scale.power_of_two} == {"pow2", "e8m0_ceil", "e8m0_floor"}
    assert all(f.scale.e8m0 == f.name.startswith("mx") for f in FORMATS)
    assert formats.MXFP4.bytes_per_element == 0.5 + 1 / 32


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_an_element_keeps_its_contract(element):
    values = statement.values(element.name)
    assert values[element.max_code] == element.max == values[-1]
    assert 2.0**element.emax <= element.max < 2.0 ** (element.emax + 1)
    assert values[1] == 2.0 ** (element.emin - element.mantissa_bits)
    assert element.packed == (element.bits < 8)
    assert element.has_nan == (element.name in statement.OWN_NAN)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_elements_agree_with_ml_dtypes(name):
    """All codes decode alike, and nearest rounding agrees wherever ml_dtypes doesn't overflow."""
    element, dtype = ELEMENTS[name], ML_DTYPES[name]
    one = np.array([0x3F800000], np.int32)
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    decoded = scaling.scaled(codes.astype(np.int32), element, one).view(np.float32)
    np.testing.assert_array_equal(decoded, codes.view(dtype).astype(np.float32))
    for source in (np.float16, ml_dtypes.bfloat16):
        x = np.arange(1 << 16, dtype=np.uint16).view(source)
        x = x[np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) <= element.max)]
        # Scale exponent 127 is the factor 1: MX's encoding is then the element's rounding.
        format = Format.parse({"e4m3": "mxfp8_e4m3", "e5m2": "mxfp8_e5m2"}.get(name, f"mxfp{element.bits}_{name}"))
        rows = np.resize(x, (-(-x.size // 32), 32))
        packed = numerics.encode(rows, format, np.full((rows.shape[0], 1), 127, np.uint8))
        codes = statement.unpack(packed, element.bits, 32).reshape(-1)[: x.size]
        np.testing.assert_array_equal(codes, x.astype(dtype).view(np.uint8))


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


def test_repeated_scales():
    scales = np.arange(6, dtype=np.uint8).reshape(3, 2)
    repeated = layout.repeat_scales(scales, 16, 40)
    assert repeated.shape == (40, 2)
    np.testing.assert_array_equal(repeated, scales[np.arange(40) // 16])
