"""Statistics against values worked out by hand or by another formula."""

import math

import ml_dtypes
import numpy as np
import pytest
from held_formats import FORMATS

from blockfp.check.measure import Statistics, measure, scale_exponents
from blockfp.definition import numerics
from blockfp.formats import Format


def measured(x, format):
    format = Format.parse(format)
    q = numerics.quantize(x, format)
    return measure(x, q, numerics.dequantize(*q, format, x.dtype.name, columns=x.shape[-1]), format)


def test_sqnr_and_relative_error():
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    q = numerics.quantize(x, "mxfp8_e4m3")
    values = numerics.dequantize(*q, "mxfp8_e4m3", "float32", columns=256).astype(np.float64)
    result = measured(x, "mxfp8_e4m3")
    noise = ((x - values) ** 2).mean()
    assert result.sqnr_db == pytest.approx(10 * math.log10((x.astype(np.float64) ** 2).mean() / noise))
    kept = values != 0
    assert result.largest_relative_error == pytest.approx((np.abs(x - values)[kept] / np.abs(x)[kept]).max())
    assert result.stored_bytes == 64 * 256 + 64 * 8
    assert result.original_bytes == 4 * 64 * 256


def test_nothing_lost():
    result = measured(np.ones((2, 32), np.float32), "mxfp8_e4m3")
    assert result.sqnr_db == math.inf
    assert math.isnan(measured(np.zeros((2, 32), np.float32), "mxfp8_e4m3").sqnr_db)


def test_saturated_under_the_floor_rule_only():
    # 500 = 1.95 * 2^8: the floor rule's scale is 1, and E4M3 ends at 448; 460 rounds to 448 and is not beyond it.
    x = np.full((1, 32), 460.0, np.float32)
    x[0, :3] = 500, -500, 460
    assert measured(x, "mxfp8_e4m3_floor").saturated == 2
    assert measured(x, "mxfp8_e4m3").saturated == 0


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_only_the_floor_rule_saturates(format):
    x = np.random.default_rng(2).standard_normal((130, 260)).astype(np.float32)
    if not format.name.endswith("_floor"):
        # NVFP4's block scales are rounded to E4M3, down at times.
        assert measured(x, format).saturated_share <= (0.02 if format.scale.two_level else 0)


def test_infinity_saturates_and_is_excluded():
    x = np.ones((1, 32), np.float32)
    x[0, 0], x[0, 1] = np.inf, np.nan
    result = measured(x, "fp8_e4m3")
    assert (result.saturated, result.excluded) == (1, 2)
    # A NaN takes its block with it where the element has none.
    assert measured(x, "mxfp4_e2m1").excluded == 32


def test_flushed_to_zero():
    x = np.full((1, 32), 1e-3, np.float32)
    x[0, :4] = 6.0, 0.0, -0.0, -1e-3
    result = measured(x, "mxfp4_e2m1")
    assert result.flushed == 29
    assert result.flushed_share == 29 / 32
    assert result.largest_relative_error == 0


def test_mxint8_counts_negative_codes():
    x = np.array([[-127.75 / 64, 127.75 / 64] + [0.5] * 30], np.float32)
    assert measured(x, "mxint8_floor").saturated == 2


@pytest.mark.parametrize(("format", "exponents"), [("fp8_e4m3", {-9: 1}), ("mxfp8_e4m3", {-8: 2}), ("nvfp4", {-3: 4})])
def test_scale_exponents(format, exponents):
    x = np.ones((2, 32), np.float32)
    assert scale_exponents(numerics.quantize(x, format), Format.parse(format)) == exponents


def test_scales_without_an_exponent_are_not_counted():
    x = np.zeros((2, 32), np.float32)
    x[0, 0] = np.nan
    assert scale_exponents(numerics.quantize(x, "mxfp4_e2m1"), Format.parse("mxfp4_e2m1")) == {-127: 1}
    assert not scale_exponents(numerics.quantize(x, "nvfp4"), Format.parse("nvfp4"))


def test_statistics_of_parts_add_up():
    x = np.random.default_rng(3).standard_normal((256, 64)).astype(ml_dtypes.bfloat16)
    total = Statistics()
    for rows in (x[:128], x[128:]):
        total.add(measured(rows, "mxfp6_e3m2"))
    whole = measured(x, "mxfp6_e3m2")
    assert total.sqnr_db == pytest.approx(whole.sqnr_db)
    assert (total.exponents, total.flushed, total.stored_bytes) == (whole.exponents, whole.flushed, whole.stored_bytes)
