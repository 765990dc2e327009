"""The rules of tokens that travel as codes: whose rows are their own, whose values stay, and the order they arrive in."""

import numpy as np
import pytest
from samples import DTYPES, KINDS, sample

import blockfp
from blockfp.formats import FORMATS
from blockfp.sharding.experts import Row, arrivals, why_not_sent, why_not_twice


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_that_may_be_sent_are_quantized_alike_wherever_they_lie(format):
    x = sample("exponents", (130, 160))
    order = np.random.default_rng(0).permutation(130)
    whole, part = blockfp.quantize(x, format), blockfp.quantize(x[order][:70], format)
    same = whole.scales.shape[0] == 130 and np.array_equal(whole.scales[order][:70], part.scales)
    same = same and np.array_equal(whole.codes[order][:70], part.codes)
    assert same == (why_not_sent(format) is None and not format.has_tensor_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [f for f in FORMATS if not (why_not_sent(f) or why_not_twice(f))], ids=str)
def test_values_stay_where_they_are_quantized_twice(format, dtype):
    for kind in KINDS:
        values = blockfp.quantize(sample(kind, (24, 300), dtype), format).dequantize()
        # An Inf is what rounding up the largest numbers gave: a layer shows it as overflow.
        beyond = np.isinf(values.astype(np.float32)).any(axis=1)
        again = blockfp.quantize(values, format).dequantize()
        np.testing.assert_array_equal(again[~beyond].astype(np.float32), values[~beyond].astype(np.float32))


def test_values_change_where_scales_are_no_powers_of_two():
    format = blockfp.Format.parse("fp8_e4m3_1x128_fp32")
    assert why_not_twice(format)
    values = blockfp.quantize(sample("gaussian", (24, 300)), format).dequantize()
    assert (blockfp.quantize(values, format).dequantize() != values).any()


def test_rows_arrive_by_expert_then_by_rank_then_by_token():
    chosen = [np.array([[3, 0], [-1, 3]]), np.array([[0, 2], [3, -1]])]
    assert arrivals(chosen, 4) == [
        [[Row(0, 0, 1), Row(1, 0, 0)], []],
        [[Row(1, 0, 1)], [Row(0, 0, 0), Row(0, 1, 1), Row(1, 1, 0)]],
    ]
    with pytest.raises(ValueError, match="experts = 3 must be a multiple of the 2 ranks"):
        arrivals(chosen, 3)
