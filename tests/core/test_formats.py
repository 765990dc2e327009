"""Formats as values: names, identity, contracts of the elements."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import statement

from blockfp import formats
from blockfp.definition import numerics, scaling
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
