"""Errors of the library's functions for arguments that would be read or written outside an array."""

import numpy as np
import pytest
from adamw_cases import Parameter, table
from same_bits import assert_same_bits

from blockfp.definition import adamw
from blockfp.formats import Format
from blockfp.kernels import native
from blockfp.kernels.calls import DTYPE_NUMBERS, format_numbers

MX, FP8 = format_numbers(Format.parse("mxint8")), format_numbers(Format.parse("fp8_e4m3"))
FP32 = DTYPE_NUMBERS["float32"]


def lent(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda f: f.amax(lent(4, 64), lent(4, 3, dtype="int32"), None, None, FP32, *MX, 0, 0),
            r"blocks must be an int32 for each block: contiguous, 8 entries of 32 bits; it is int32 \[4, 3\] on cpu",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, *MX, -32, 0),
            r"origin must not be negative; it is \(-32, 0\)",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, 9, 1, 32, 7, 0, 0),
            "the format has element 9 and scale rule 7, which this library does not know",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, *MX[:2], 24, MX[3], 0, 0),
            "block columns must be 0, 16, 32, 64, 128 or those of a whole row, 1073741824, and are 24",
        ),
        (
            lambda f: f.rotate(lent(4, 64), lent(4, 63), FP32),
            r"out must be like x: contiguous, 256 entries of 32 bits; it is float32 \[4, 63\] on cpu",
        ),
        (
            lambda f: f.rotate(lent(64), lent(64), FP32),
            r"x must have two or more axes and 32 bits an element; it is float32 \[64\] on cpu",
        ),
        (
            lambda f: f.rotate(lent(4, 64), lent(64, 4).T, FP32),
            r"it is float32 \[4, 64\] on cpu, not contiguous",
        ),
        (lambda f: f.adamw(lent(1, 3, dtype="int64")), r"table must have this library's rows, .* int64 \[1, 3\] on cpu"),
        (
            lambda f: f.dequantize_arrays(lent(4, 64, dtype="uint8"), lent(3, 1), lent(0), lent(4, 64), 2, *FP8, 0, 0),
            r"scales must be there for each block, 1 of 32 bits a tensor; it is float32 \[3, 1\] on cpu",
        ),
    ],
)
def test_arguments_are_named_with_what_they_are(call, message):
    with pytest.raises(ValueError, match=message):
        call(native.library())


def test_a_table_with_a_bad_row_changes_nothing():
    c = adamw.coefficients(1, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    mx = Format.parse("mxfp8_e4m3_32x32")
    good, bad = Parameter((64, 64), format=mx), Parameter((64, 64), format=mx)
    before = [np.copy(x) for x in (good.weight, good.out, good.out_scales)]
    steps = [good.step(c, 1), bad.step(c, 1)]
    rows = table(steps)
    other = table([s._replace(format=Format.parse("mxfp8_e5m2_32x32")) for s in steps])
    element = np.flatnonzero(rows.view(np.int32)[1] != other.view(np.int32)[1])[0]
    rows.view(np.int32)[1, element] = 9
    with pytest.raises(ValueError, match="the format has element 9"):
        native.library().adamw(rows)
    assert_same_bits((good.weight, good.out, good.out_scales), tuple(before))
