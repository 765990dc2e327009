"""The NumPy face: its constructor, and codes and scales as ml_dtypes' elements."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from samples import bits_of, sample

import blockfp
from blockfp.definition.layout import split_blocks
from blockfp.formats import FORMATS, Format

Q = blockfp.quantize(np.arange(512, dtype=np.float32).reshape(8, 64), "mxfp8_e4m3_32x32")


def test_a_format_may_be_named():
    named = replace(Q, format="mxfp8_e4m3_32x32", dtype="bfloat16")
    assert named.format is Q.format
    assert named.dequantize().dtype == named.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(named.dequantize("float32"), Q.dequantize())
    np.testing.assert_array_equal(Q.mT.dequantize().T, Q.dequantize())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"codes": [[1]]}, TypeError, "codes must be a NumPy array, got list"),
        ({"scales": None}, TypeError, "scales must be a NumPy array, got NoneType"),
        ({"codes": Q.codes.astype(np.int8)}, TypeError, "codes must be uint8 or float8_e4m3fn for .*, got int8"),
        ({"scales": Q.scales[:, :1]}, ValueError, r"must have shape \(1, 2\), got \(1, 1\)"),
        ({"format": "mxfp9"}, ValueError, "format 'mxfp9' is not known"),
        ({"format": 3}, TypeError, "format must be a Format or its name"),
        ({"columns": 64.0}, TypeError, r"columns must be of integers, got \(64.0,\)"),
        ({"columns": -1}, ValueError, r"columns must be of integers of 0 or more"),
        ({"origin": (-32, 0)}, ValueError, r"origin must be of integers of 0 or more, .* got \(-32, 0\)"),
        ({"origin": (0,)}, ValueError, "origin must be of integers of 0 or more"),
        ({"dtype": np.float64}, TypeError, "dtype must be one of float32, float16, bfloat16, got float64"),
    ],
)
def test_what_does_not_fit_is_named(changed, error, message):
    with pytest.raises(error, match=message):
        replace(Q, **changed)


@pytest.mark.parametrize(("dtype", "error"), [("x", TypeError), (3, TypeError), ("float64", ValueError)])
def test_dtypes_that_values_do_not_come_in(dtype, error):
    with pytest.raises(error, match=f"dtype must be one of float32, float16, bfloat16, got {dtype!r}"):
        Q.dequantize(dtype)


X = sample("bf16_valued", (3, 40, 70), "float32")


def times_scales(elements, scales, format, tensor_scale):
    """The values of elements and scales, by numbers alone."""
    values = elements.astype(np.float64) / (64 if format.element.name == "int8" else 1)
    rows, columns = format.block or values.shape[-2:]
    each = np.repeat(np.repeat(scales.astype(np.float64), rows, axis=-2), min(columns, values.shape[-1]), axis=-1)
    return (
        values * each[..., : values.shape[-2], : values.shape[-1]] * (1 if tensor_scale is None else np.float64(tensor_scale))
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_views_times_scales_are_the_values(format):
    q = blockfp.quantize(X, format)
    elements, scales = q.view_codes(), q.view_scales()
    assert (elements.shape, scales.shape) == (X.shape, q.scales.shape)
    if not format.element.packed:
        assert np.shares_memory(elements, q.codes)
    assert np.shares_memory(scales, q.scales)
    expected = times_scales(elements, scales, format, q.tensor_scale)
    np.testing.assert_allclose(q.dequantize(), expected, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_are_made_of_views(format):
    q = blockfp.quantize(X, format)
    again = blockfp.QuantizedArray.from_parts(
        q.view_codes(), q.view_scales(), q.tensor_scale, format=format, columns=70, dtype="float32"
    )
    for part in ("codes", "scales"):
        assert getattr(again, part).dtype == getattr(q, part).dtype
        np.testing.assert_array_equal(bits_of(getattr(again, part)), bits_of(getattr(q, part)))


def test_arrays_of_casts_by_ml_dtypes():
    """Elements and E8M0 scales that another library has cast itself."""
    format = Format.parse("mxfp8_e5m2")
    scales = np.exp2(np.arange(-3, 5, dtype=np.float32)).reshape(4, 2).astype(ml_dtypes.float8_e8m0fnu)
    elements = sample("bf16_valued", (4, 64), "float32").clip(-100, 100).astype(ml_dtypes.float8_e5m2)
    q = blockfp.QuantizedArray.from_parts(elements, scales, format=format, columns=64, dtype=np.float32)
    expected = split_blocks(elements.astype(np.float32), (1, 32)) * scales.astype(np.float32).reshape(4, 1, 2, 1)
    np.testing.assert_array_equal(q.dequantize(), expected.reshape(4, 64))


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (ml_dtypes.float8_e5m2, np.uint8, "codes must be uint8 or float8_e4m3fn for mxfp8_e4m3, got float8_e5m2"),
        (np.int8, np.uint8, "codes must be uint8 or float8_e4m3fn for mxfp8_e4m3, got int8"),
        (np.uint8, ml_dtypes.float8_e4m3fn, "scales of mxfp8_e4m3 must be uint8 or float8_e8m0fnu, got float8_e4m3fn"),
    ],
)
def test_elements_of_another_format_are_refused(codes, scales, message):
    q = blockfp.quantize(X, "mxfp8_e4m3")
    with pytest.raises(TypeError, match=message):
        blockfp.QuantizedArray.from_parts(
            q.codes.view(codes), q.scales.view(scales), format="mxfp8_e4m3", columns=70, dtype="float32"
        )
