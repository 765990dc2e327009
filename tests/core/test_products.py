"""Products with defined bits: IEEE sums in integers, and the kernel's order of operations in exact rational numbers.

The sums of matrix units themselves are held against mmasim in tests/clients.
"""

import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from blockfp.definition import numerics, wide
from blockfp.definition.bits import NAN
from blockfp.definition.matrix_units import SUMMATIONS
from blockfp.definition.products import Operand, product
from blockfp.formats import Format

fmaf = ctypes.CDLL("libm.so.6").fmaf
fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3

EDGES = (0, 1, 0x7F800000, 0x7F7FFFFF, 0x3F800000, 0x800000, 0x7FFFFF, 0x7FC00000, 0x400000, 0x1F800000, 0x7F800001)


def patterns(count, rng):
    """fp32 bits: edges, any bits, and numbers near 1."""
    signs = rng.integers(0, 2, count) << 31
    near = (127 + rng.integers(-12, 12, count)) << 23 | rng.integers(0, 1 << 23, count)
    kinds = [rng.choice(EDGES, count), rng.integers(0, 1 << 31, count), near, near]
    return (np.choose(rng.integers(0, 4, count), kinds) | signs).astype(np.uint32).view(np.int32)


def test_multiply_add_is_ieee():
    rng, count = np.random.default_rng(0), 40_000
    a, b, c = (patterns(count, rng) for _ in range(3))
    with np.errstate(all="ignore"):
        undone = (-(a.view(np.float32) * b.view(np.float32))).view(np.int32) + rng.integers(-2, 3, count, dtype=np.int32)
    c = np.where(rng.random(count) < 0.3, undone, c)
    triples = zip(*(x.view(np.float32).tolist() for x in (a, b, c)), strict=True)
    want = np.array([fmaf(*triple) for triple in triples], np.float32)
    np.testing.assert_array_equal(wide.multiply_add(a, b, c), np.where(np.isnan(want), NAN, want.view(np.int32)))


def fused(a, b, c):
    return np.float32(fmaf(float(a), float(b), float(c)))


def cut(x: Fraction, unit: Fraction) -> Fraction:
    return Fraction(int(x / unit)) * unit


def exponent(value: Fraction, least: int) -> int:
    """The exponent of a number, at least that of the smallest normal one."""
    found = least
    while abs(value) >= Fraction(2) ** (found + 1):
        found += 1
    return found


def hopper_step(a, b, c):
    """c + a . b as "MMA-Sim" describes wgmma of FP8: 13 bits below the largest exponent, and 13 in the accumulator."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    exponents = [exponent(x, -6) + exponent(y, -6) for x, y in pairs]
    if c:
        exponents.append(exponent(c, -126))
    if not exponents:
        return Fraction(0)
    unit = Fraction(2) ** (max(exponents) - 13)
    total = sum((cut(x * y, unit) for x, y in pairs), cut(c, unit))
    return cut(total, Fraction(2) ** (exponent(total, -126) - 13))


def stated(a, scale_a, b, scale_b, *, blocks):
    """One element of the kernel's product; scale_x(i) is the scale of block i."""
    total = np.float32(0)
    for block, start in enumerate(range(0, len(a), 128)):
        sums = Fraction(0)
        for first in range(start, min(start + 128, len(a)), 32):
            end = min(first + 32, start + 128)
            sums = hopper_step(a[first:end], b[first:end], sums)
        factor = scale_a(block) * scale_b(block) if blocks else np.float32(1)
        total = fused(factor, np.float32(float(sums)), total)
    return total if blocks else total * scale_a(0) * scale_b(0)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32"),
        ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e4m3_row", "fp8_e4m3_1x128_fp32"),
        ("fp8_e4m3", "fp8_e4m3_128x128_fp32"),
    ],
)
@pytest.mark.parametrize("k", [300, 33])
def test_the_kernels_order_of_operations(left, right, k):
    rng, m, n = np.random.default_rng(0), 3, 4
    x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 3, (m, k)))).astype(np.float32)
    y = rng.standard_normal((n, k)).astype(np.float32)
    formats = [Format.parse(name) for name in (left, right)]
    sides = [numerics.quantize(each, format) for each, format in zip((x, y), formats, strict=True)]
    bias, addend = rng.standard_normal(n).astype(np.float32), rng.standard_normal((m, n)).astype(ml_dtypes.bfloat16)
    blocks = not all(format.per_tensor for format in formats)

    def scale(side, format, row):
        rows = side.scales if format.block is None else side.scales.repeat(format.block[0], 0)
        return lambda block: rows[min(row, len(rows) - 1), min(block, rows.shape[1] - 1)]

    values = [side.codes.view(ml_dtypes.float8_e4m3fn).astype(float) for side in sides]
    fractions = [[[Fraction(v) for v in row] for row in side] for side in values]
    want = np.empty((m, n), np.float32)
    for i in range(m):
        for j in range(n):
            of_a, of_b = scale(sides[0], formats[0], i), scale(sides[1], formats[1], j)
            want[i, j] = stated(fractions[0][i], of_a, fractions[1][j], of_b, blocks=blocks)
    a, b = (Operand(side.codes, side.scales, format) for side, format in zip(sides, formats, strict=True))
    np.testing.assert_array_equal(product(a, b, "hopper_fp8"), want)
    want = want + bias + addend.astype(np.float32)
    np.testing.assert_array_equal(product(a, b, "hopper_fp8", bias=bias, addend=addend), want)
    rounded = product(a, b, "hopper_fp8", bias=bias, addend=addend, dtype="bfloat16")
    np.testing.assert_array_equal(rounded.view(np.int16), want.astype(ml_dtypes.bfloat16).view(np.int16))


def test_fp32_in_order_adds_one_product_after_another():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, 100)).astype(ml_dtypes.bfloat16) for rows in (5, 7))
    want = np.zeros((5, 7), np.float32)
    for column in range(100):
        want += np.outer(a[:, column].astype(np.float32), b[:, column].astype(np.float32))
    np.testing.assert_array_equal(product(Operand(a, None), Operand(b, None), "fp32_in_order"), want)


def test_infinities_nan_and_zeros_of_codes():
    """E5M2 has Inf: Inf times zero and Inf minus Inf are NaN, a NaN spoils its row alone, and no sum is -0."""
    codes = np.full((4, 40), 0x3C, np.uint8)
    codes[0, 3], codes[1, (3, 35)], codes[2, 5], codes[3] = 0x7C, (0x7C, 0xFC), 0x7F, 0x80
    other = np.full((2, 40), 0x3C, np.uint8)
    other[1, 3] = 0x80
    one = np.ones((1, 1), np.float32)
    a, b = (Operand(x, one, Format.parse("fp8_e5m2")) for x in (codes, other))
    got = product(a, b, "hopper_fp8")
    np.testing.assert_array_equal(got, [[np.inf, np.nan], [np.nan, np.nan], [np.nan, np.nan], [0, 0]])
    assert not np.signbit(got[3]).any()


@pytest.mark.parametrize(
    ("left", "right", "summation", "message"),
    [
        ("mxfp8_e4m3", "mxfp8_e4m3", "hopper_fp8", "hopper_fp8 takes float32 scales of blocks of 128, rows or the tensor"),
        (
            "fp8_e4m3",
            "fp8_e4m3",
            "hopper_bf16",
            "hopper_bf16 multiplies bfloat16, float16, not e4m3; these do: fp32_in_order, ada",
        ),
        ("fp8_e4m3_1x128", "fp8_e4m3", "blackwell_fp8", "blackwell_fp8 takes float32 scales of the tensor, not fp8_e4m3_1x128"),
        ("fp8_e4m3", "fp8_e4m3", "blackwell_mx", "blackwell_mx takes E8M0 scales of 32 elements, not fp8_e4m3"),
        ("nvfp4", "nvfp4", "blackwell_nvfp4", "blackwell_nvfp4 takes E8M0 scales of 16 elements, not nvfp4"),
        ("fp8_e4m3", "fp8_e4m3", "hopper", "unknown summation 'hopper', expected one of fp32_in_order"),
    ],
)
def test_says_what_a_summation_takes(left, right, summation, message):
    x = np.ones((2, 128), np.float32)
    a, b = (Operand(*numerics.quantize(x, name)[:2], Format.parse(name)) for name in (left, right))
    with pytest.raises(ValueError, match=message):
        product(a, b, summation)


def test_names_are_the_summations_own():
    assert {name: one.name for name, one in SUMMATIONS.items()} == {name: name for name in SUMMATIONS}
