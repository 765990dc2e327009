"""Integer arithmetic, stochastic rounding and the random Hadamard transform, against NumPy and exact rational numbers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import statement
from held_formats import FORMATS
from samples import DTYPES, KINDS, all_patterns, bits_of, sample

from blockfp.definition import bits, numerics, rounding
from blockfp.definition.rotation import GROUP, rotate
from blockfp.formats import Format


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


# Known answers of the generator's authors (Random123, threefry2x32 with 20 rounds).
KNOWN = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
)


def as_int32(*words):
    return tuple(np.array([w], np.uint32).view(np.int32) for w in words)


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_known_answers(key, counter, expected):
    words = rounding.threefry2x32(as_int32(*key), as_int32(*counter))
    assert tuple(int(w.view(np.uint32)[0]) for w in words) == expected


@pytest.mark.parametrize("columns", [8, 13, 64, 129])
@pytest.mark.parametrize("first_column", [0, 3, 16])
def test_bytes_follow_the_global_index(columns, first_column):
    length = first_column + columns + 5
    rows = np.array([0, 1, 7, 2**20 + 3, 2**31 - 1], np.int32)
    drawn = rounding.random_bytes(99, rows, columns, first_column, length)
    for row, got in zip(rows.tolist(), drawn, strict=True):
        expected = statement.random_bytes((0, 99), row * length + first_column, columns)
        np.testing.assert_array_equal(got, expected)


def test_more_than_2_to_32_elements():
    rows, length = np.array([2**17 + 1, 2**30], np.int32), 2**20 + 8
    drawn = rounding.random_bytes(1, rows, 16, length - 16, length)
    for row, got in zip(rows.tolist(), drawn, strict=True):
        np.testing.assert_array_equal(got, statement.random_bytes((0, 1), row * length + length - 16, 16))


def test_keys():
    words = np.array([0x89ABCDEF, 0x01234567], np.uint32)
    seed = 0x89ABCDEF01234567
    x = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    expected = numerics.quantize(x, "nvfp4", key=seed).codes
    for key in (words, words.view(np.int32), words.astype(np.int64), [0x89ABCDEF, 0x01234567]):
        np.testing.assert_array_equal(numerics.quantize(x, "nvfp4", key=key).codes, expected)
    assert (numerics.quantize(x, "nvfp4", key=seed + 1).codes != expected).any()
    for same in (np.uint64(seed), (np.int64(seed >> 32), np.uint32(seed & 0xFFFFFFFF))):
        np.testing.assert_array_equal(numerics.quantize(x, "nvfp4", key=same).codes, expected)
    outside = (-1, 2**64, np.int64(-1), (1, 2**32), (1, np.int64(-1)), np.array([2**32 + 1, 2]), np.array([1, -2]))
    for key in (*outside, True, "ab", (1,), np.zeros(3, np.uint32), np.zeros(2)):
        with pytest.raises(ValueError, match="key must be"):
            numerics.quantize(x, "nvfp4", key=key)


def test_fold_in():
    # jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1)) and of key(42), 123456789
    assert rounding.fold_in(0, 1) == tuple(int.from_bytes(statement.threefry((0, 0), 1)[i : i + 4], "little") for i in (0, 4))
    key = np.array([7, 0xFFFFFFFF], np.uint32)
    folded = rounding.fold_in(key, 0xFEDCBA98)
    assert tuple(folded.view(np.uint32).tolist()) == rounding.fold_in((7, 0xFFFFFFFF), 0xFEDCBA98)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4_e2m1", "mxfp6_e2m3", "mxint8", "fp8_e5m2_1x128", "nvfp4"])
def test_it_is_unbiased_and_keeps_exact_values(name):
    format = Format.parse(name)
    columns = format.block[1]
    row = np.linspace(-1, 1, columns).astype(np.float32)
    x = np.tile(row, (4096, 1))
    q = numerics.quantize(x, format, key=3)
    mean = numerics.dequantize(*q, format, "float32", columns=columns).mean(0, dtype=np.float64)
    step = 2.0**-format.element.mantissa_bits
    np.testing.assert_allclose(mean, row, atol=5 * step / 64 / 2 + 2**-9 * step)
    exact = numerics.dequantize(*numerics.quantize(x, format), format, "float32", columns=columns)
    again = numerics.quantize(exact, format, key=4)
    if not format.scale.two_level:
        np.testing.assert_array_equal(numerics.dequantize(*again, format, "float32", columns=columns), exact)


# Of each kind of data: how many deviations nvfp4 is short by at the least, and how short.
DATA = {
    "gaussian": (lambda rng, shape: rng.standard_normal(shape), 0.002),
    "log-normal": (lambda rng, shape: np.exp(2 * rng.standard_normal(shape)) * rng.choice([-1, 1], shape), 0.004),
}


def bias_along(x, name, keys):
    """(1 - <x, mean over keys> / <x, x>, its standard error), of blocks whose scales are no subnormal E4M3 numbers."""
    length = x.shape[1]
    told = np.repeat(np.abs(x).reshape(len(x), -1, 16).max(-1), 16, -1) > 2.0**-5 / 448 * np.abs(x).max()
    short = []
    for key in range(keys):
        y = numerics.dequantize(*numerics.quantize(x, name, key=key), name, "float32", columns=length).astype(np.float64)
        short.append(1 - (x * y)[told].sum() / (x.astype(np.float64) ** 2)[told].sum())
    return np.mean(short), np.std(short) / keys**0.5


@pytest.mark.parametrize("data", DATA)
def test_guarded_scales_are_unbiased_where_plain_ones_are_short(data):
    """A block's scale that is rounded down lets its largest elements saturate: in nvfp4_guarded it can't."""
    make, least = DATA[data]
    x = make(np.random.default_rng(5), (64, 512)).astype(np.float32)
    plain, error = bias_along(x, "nvfp4", 24)
    assert plain > max(least, 20 * error)
    guarded, error = bias_along(x, "nvfp4_guarded", 24)
    assert abs(guarded) < 4 * error + 1e-4  # one random byte is right to 1/512 of a spacing
    # The largest code of each block reaches the largest element.
    q = numerics.quantize(x, "nvfp4_guarded")
    largest = numerics.amax(x, "nvfp4").blocks.view(np.float32)
    decoded = numerics.dequantize(np.full_like(q.codes, 0x77), *q[1:], "nvfp4_guarded", "float32", columns=512)
    reach = decoded.reshape(64, -1, 16)[..., 0]
    assert (reach >= largest * np.float32(1 - 2**-22))[largest > 2.0**-5 / 448 * largest.max()].all()


def test_scales_are_never_stochastic():
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    for format in FORMATS:
        nearest, stochastic = numerics.quantize(x, format), numerics.quantize(x, format, key=11)
        np.testing.assert_array_equal(nearest.scales, stochastic.scales)
        assert (nearest.codes != stochastic.codes).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_matrix(dtype):
    x = sample("gaussian", (6, 64), dtype)
    groups = x.astype(np.float64).reshape(6, 4, GROUP)
    expected = np.stack([[statement.hadamard(g) for g in row] for row in groups]).reshape(6, 64)
    z = rotate(x)
    assert z.dtype == x.dtype
    relative = {"float32": 2**-21, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(z.astype(np.float64), expected, atol=relative * 4)


def test_integers_are_exact():
    x = np.random.default_rng(0).integers(-100, 100, (5, 32)).astype(np.float32)
    expected = np.stack([[statement.hadamard(g) for g in row] for row in x.reshape(5, 2, GROUP)]).reshape(5, 32)
    np.testing.assert_array_equal(rotate(x), expected)


def test_the_order_of_the_sums():
    """fp32 stages of stride 1, 2, 4, 8, written out."""
    x = sample("exponents", (1, 16), seed=3)
    x = np.clip(x, -1e30, 1e30).astype(np.float32)
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
    z = np.where(np.abs(x[0]) < 2.0**-100, np.float32(0) * x[0], x[0]) * signs
    for h in (1, 2, 4, 8):
        for i in range(16):
            if not i & h:
                z[i], z[i + h] = z[i] + z[i + h], z[i] - z[i + h]
    np.testing.assert_array_equal(bits_of(rotate(x)[0]), bits_of(z * np.float32(0.25)))


def test_products_are_kept():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((7, 96)), rng.standard_normal((5, 96))
    rotated = [rotate(m.astype(np.float32)).astype(np.float64) for m in (a, b)]
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, a @ b.T, atol=1e-4)


def test_corner_cases():
    tail = sample("gaussian", (3, 40))
    np.testing.assert_array_equal(rotate(tail)[:, 32:], tail[:, 32:])
    np.testing.assert_array_equal(rotate(tail)[:, :32], rotate(tail[:, :32]))
    np.testing.assert_array_equal(rotate(tail[:, 16:], origin=16)[:, :16], rotate(tail)[:, 16:32])
    short = sample("gaussian", (3, 15))
    np.testing.assert_array_equal(rotate(short), short)
    assert rotate(np.zeros((0, 16), np.float32)).shape == (0, 16)
    tiny = np.full((1, 16), 2.0**-101, np.float32)
    np.testing.assert_array_equal(rotate(tiny), np.zeros((1, 16)))
    infinite = np.zeros((1, 16), np.float32)
    infinite[0, :2] = np.inf
    z = rotate(infinite)
    assert np.isinf(rotate(np.full((1, 16), 3e38, np.float32))).any()
    assert np.isnan(z).any()
    assert np.isinf(z).any()
    with pytest.raises(ValueError, match="multiple of 16"):
        rotate(tail, origin=8)
