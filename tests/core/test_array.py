"""The NumPy face: what its constructor takes, and refuses by name."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import blockfp

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
