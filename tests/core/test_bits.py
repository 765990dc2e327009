"""The integer arithmetic, against NumPy's IEEE arithmetic and against exact rational numbers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from samples import KINDS, all_patterns, bits_of, sample

from blockfp.definition import bits


def positive_patterns(count, seed=0):
    """Finite positive fp32 patterns, from the smallest subnormal to the largest value."""
    rng = np.random.default_rng(seed)
    pattern = rng.integers(1, bits.INFINITY, count, dtype=np.int32)
    edges = np.array([1, 2, 0x7FFFFF, 0x800000, 0x800001, bits.ONE, bits.ONE + 1, bits.FP32_MAX], np.int32)
    subnormal = rng.integers(1, 0x800000, count // 8, dtype=np.int32)
    return np.concatenate([edges, subnormal, pattern])[:count]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_exact(dtype):
    x = all_patterns(dtype)
    wide = bits.from_float(x)
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(wide[~nan], expected.view(np.int32)[~nan])
    assert ((wide[nan] & bits.MAGNITUDE) > bits.INFINITY).all()
    again = bits.to_float(wide, dtype)
    np.testing.assert_array_equal(bits_of(again)[~nan], bits_of(x)[~nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_narrowing_rounds_once(dtype):
    for kind in KINDS:
        x = sample(kind, (64, 64))
        narrowed = bits.to_float(x.view(np.int32), np.dtype(dtype).name)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(dtype)
        nan = np.isnan(expected)
        np.testing.assert_array_equal(bits_of(narrowed)[~nan], bits_of(expected)[~nan])
        assert np.isnan(narrowed[nan]).all()
        assert len(set(bits_of(narrowed)[nan].tolist())) <= 1


def test_division_is_ieee():
    a, b = positive_patterns(200_000, 1), positive_patterns(200_000, 2)[::-1].copy()
    with np.errstate(over="ignore", under="ignore"):
        expected = (a.view(np.float32) / b.view(np.float32)).view(np.int32)
    np.testing.assert_array_equal(bits.divide(a, b), expected)


def test_sums_and_distances_are_ieee():
    rng = np.random.default_rng(6)
    special = rng.choice(np.array([0, 1, 0x7FFFFF, 0x800000, bits.FP32_MAX, bits.INFINITY, bits.NAN], np.int32), 30_000)
    alike = (rng.integers(118, 136, 100_000, dtype=np.int32) << 23) | rng.integers(0, 1 << 23, 100_000, dtype=np.int32)
    tiny = rng.integers(0, 1 << 26, 50_000, dtype=np.int32)
    a = np.concatenate([positive_patterns(100_000, 7), alike, tiny, special])
    # Every number with another, with one not far from it, and with itself.
    near = np.clip(a.astype(np.int64) + rng.integers(-(1 << 25), 1 << 25, a.size), 0, bits.INFINITY).astype(np.int32)
    for b in (rng.permutation(a), near, a):
        x, y = a.view(np.float32), b.view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for found, expected in ((bits.add(a, b), x + y), (bits.distance(a, b), np.abs(x - y))):
                np.testing.assert_array_equal(found, np.where(np.isnan(expected), np.float32(np.nan), expected).view(np.int32))


def test_products_are_ieee():
    rng = np.random.default_rng(2)
    special = rng.choice(
        np.array([0, 1, 0x7FFFFF, 0x800000, bits.ONE, bits.FP32_MAX, bits.INFINITY, bits.NAN], np.int32), 30_000
    )
    a = np.concatenate([rng.integers(0, bits.INFINITY, 100_000, dtype=np.int32), special])
    # Many products are subnormal, or round to zero or to a normal number.
    towards = np.clip(rng.integers(97, 137, a.size) - (a >> 23), 0, 254).astype(np.int32) << 23
    for b in (a, rng.permutation(a), towards | rng.integers(0, 1 << 23, a.size, dtype=np.int32)):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            expected = a.view(np.float32) * b.view(np.float32)
        found = bits.product(a, b)
        np.testing.assert_array_equal(found, np.where(np.isnan(expected), bits.NAN, expected.view(np.int32)))


def test_multiplication_is_ieee_with_an_unbounded_exponent():
    a, b = positive_patterns(200_000, 3), positive_patterns(200_000, 4)[::-1].copy()
    significand, exponent = bits.multiply(bits.split(a), bits.split(b))
    exact = a.view(np.float32).astype(np.float64) * b.view(np.float32).astype(np.float64)
    fraction, power = np.frexp(exact)
    rounded = np.ldexp(fraction.astype(np.float32).astype(np.float64), power)
    np.testing.assert_array_equal(np.ldexp(significand / 2.0**23, exponent), rounded)


def test_fp32_rounds_once_even_to_subnormals():
    rng = np.random.default_rng(5)
    significand = rng.integers(1 << 27, 1 << 28, 3000, dtype=np.int32)
    exponent = rng.integers(-155, 130, 3000, dtype=np.int32)
    pattern = bits.fp32(significand, exponent, 27)
    for s, e, p in zip(significand.tolist(), exponent.tolist(), pattern.tolist(), strict=True):
        exact = Fraction(s) * Fraction(2) ** (e - 27)
        value = Fraction(2) ** 200 if p == bits.INFINITY else Fraction(float(np.int32(p).view(np.float32)))
        if p == bits.INFINITY:
            assert exact >= Fraction(float(np.float32(3.4028235e38))) + Fraction(2) ** 103
            continue
        ulp = Fraction(2) ** (max(e, -126) - 23)
        assert abs(value - exact) <= ulp / 2
        assert abs(value - exact) < ulp / 2 or p % 2 == 0


def test_constants():
    assert bits.constant_bits(1.0) == bits.ONE
    assert bits.constant_bits(1 / 6) == int(np.float32(1 / 6).view(np.int32))
    for name, dtype in (("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        assert bits.LARGEST_FINITE[name] == int(np.float32(ml_dtypes.finfo(dtype).max).view(np.int32))
