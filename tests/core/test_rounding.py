"""Stochastic rounding: the generator, its index, and that it is unbiased."""

import numpy as np
import pytest
import statement
from held_formats import FORMATS

from blockfp.definition import numerics, rounding
from blockfp.formats import Format

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
