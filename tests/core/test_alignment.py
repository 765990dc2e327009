"""Aligned MX operands: the bound of docs/numerics.md, and which codes don't change, held against exact rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from blockfp.definition import alignment, layout, numerics
from blockfp.definition.scaling import scaled
from blockfp.formats import FORMATS, Format

MX = [f for f in FORMATS if alignment.can_align(f)]
BOUND = {"e4m3": Fraction(1, 240 << 10), "e2m3": Fraction(1, 240 << 10), "e5m2": Fraction(1, 1 << 32)}
BOUND |= {"e3m2": Fraction(1, 1 << 18), "e2m1": Fraction(1, 1 << 18)}
UNCHANGED_UP_TO = {"e3m2": 9, "e2m3": 11, "e2m1": 14}


def exact(codes, scales, format, columns):
    """The values, exact in float64, [rows, columns]: a code has 4 bits, and no scale has a limit here."""
    code = np.arange(1 << format.element.bits, dtype=np.int32)
    values = scaled(code, format.element, np.full_like(code, 0x3F800000)).view(np.float32).astype(np.float64)
    if scales.dtype == np.uint8:
        powers = np.where(scales == 0xFF, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    else:
        powers = scales.astype(np.float64)
    tall, wide = format.block
    powers = powers.repeat(tall, -2)[: len(codes)].repeat(wide, -1)[:, :columns]
    return values[layout.unpack(codes, format.element.bits, columns)] * powers


def largest(codes, scales, format, columns):
    """The largest magnitude of those that share a scale with each element once they are aligned; NaN and Inf count as MAX."""
    element = format.element
    code = layout.unpack(codes, element.bits, columns) & ((1 << (element.bits - 1)) - 1)
    values = exact(layout.pack(np.minimum(code, element.max_code), element.bits), scales, format, columns)
    blocks = layout.split_blocks(np.nan_to_num(values), (format.block[0], 128))
    most = np.broadcast_to(blocks.max((-3, -1), keepdims=True), blocks.shape)
    return layout.join_blocks(most, values.shape)


def data(kind, rows, columns, rng):
    if kind == "gaussian":
        return rng.standard_normal((rows, columns))
    if kind == "swiglu":
        gate, up = rng.standard_normal((2, rows, columns)) * 2
        return gate / (1 + np.exp(-gate)) * up
    if kind == "heavy tails":
        return rng.standard_t(2, (rows, columns))
    if kind == "outlier columns":
        return rng.standard_normal((rows, columns)) * np.exp(3 * rng.standard_normal(columns))
    if kind == "a block far above the others":
        x = rng.standard_normal((rows, columns))
        x[:, columns // 3] *= 2.0**20
        return x
    # Every binade of fp32 side by side, subnormals, zeros and the largest.
    x = np.ldexp(rng.uniform(1, 2, (rows, columns)), rng.integers(-149, 128, (rows, columns)))
    x[rng.random((rows, columns)) < 0.2] = 0
    return x * rng.choice([-1, 1], (rows, columns))


KINDS = ("gaussian", "swiglu", "heavy tails", "outlier columns", "a block far above the others", "every binade")


def assert_within_the_bound(codes, scales, aligned, format, columns):
    before = exact(codes, scales, format, columns)
    after = exact(aligned.codes, aligned.scales, alignment.aligned_format(format), columns)
    finite = np.isfinite(before)
    np.testing.assert_array_equal(after[~finite], before[~finite])
    np.testing.assert_array_equal(np.signbit(after[finite]), np.signbit(before[finite]))
    change = np.abs(np.where(finite, after - np.where(finite, before, 0), 0))
    assert (change <= largest(codes, scales, format, columns) * float(BOUND[format.element.name])).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", MX, ids=str)
def test_no_element_changes_by_more_than_the_bound(format, kind):
    rng = np.random.default_rng(3)
    rows, columns = (33, 200) if format.block[0] == 1 else (40, 200)
    x = data(kind, rows, columns, rng).astype(np.float32)
    q = numerics.quantize(x, format)
    aligned = alignment.align(q.codes, q.scales, format, columns=columns)
    assert_within_the_bound(q.codes, q.scales, aligned, format, columns)


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("format", MX, ids=str)
def test_a_product_is_within_the_bound_of_the_exact_one(format, kind):
    """Sums of Fractions: the bound of an operand times the sum of the other's magnitudes, block by block."""
    rng = np.random.default_rng(4)
    rows, columns = 2, 320
    values, sides, tops = [], [], []
    for _ in range(2):
        q = numerics.quantize(data(kind, rows, columns, rng).astype(np.float32), format)
        aligned = alignment.align(q.codes, q.scales, format, columns=columns)
        values.append(exact(q.codes, q.scales, format, columns))
        tops.append(largest(q.codes, q.scales, format, columns))
        sides.append(exact(aligned.codes, aligned.scales, alignment.aligned_format(format), columns))
    bound = BOUND[format.element.name]
    as_fractions = [[[Fraction(v) for v in row] for row in x] for x in (*values, *sides, *tops)]
    for i in range(rows):
        for j in range(rows):
            a, b, s, t, top_a, top_b = (x[row] for x, row in zip(as_fractions, (i, j) * 3, strict=True))
            change = sum(x * y - u * v for x, y, u, v in zip(a, b, s, t, strict=True))
            assert abs(change) <= bound * sum(p * abs(y) + q * abs(u) for y, u, p, q in zip(b, s, top_a, top_b, strict=True))


def every_code(format, rng, shifts):
    """All codes of the element in each of four blocks, the second to fourth under scales that are lower by `shifts`."""
    count = 1 << format.element.bits
    code = np.resize(rng.permutation(count).astype(np.uint8), (max(32, count), 128))
    for block in range(4):
        code[:, 32 * block : 32 * block + 32] = rng.permuted(np.resize(np.arange(count, dtype=np.uint8), code.shape), axis=1)[
            :, :32
        ]
    top = 200
    scales = np.broadcast_to(np.array([top, *(top - s for s in shifts)], np.uint8), (-(-len(code) // format.block[0]), 4))
    return layout.pack(code, format.element.bits), np.ascontiguousarray(scales)


@pytest.mark.parametrize("format", [f for f in MX if f.element.name in UNCHANGED_UP_TO], ids=str)
def test_small_elements_do_not_change_up_to_their_shift(format):
    limit = UNCHANGED_UP_TO[format.element.name]
    codes, scales = every_code(format, np.random.default_rng(0), (limit, limit - 1, 1))
    aligned = alignment.align(codes, scales, format, columns=128)
    before = exact(codes, scales, format, 128)
    np.testing.assert_array_equal(exact(aligned.codes, aligned.scales, alignment.aligned_format(format), 128), before)
    # The limit is no smaller than it has to be: the largest value above, the smallest below.
    above, smallest = format.element.max_code, np.uint8(1)
    row = np.array([[above] + [0] * 31 + [smallest] * 96], np.uint8)
    row = layout.pack(np.repeat(row, format.block[0], axis=0), format.element.bits)
    for shift, same in ((limit, True), (limit + 1, False)):
        scales = np.array([[200] + [200 - shift] * 3], np.uint8)
        aligned = alignment.align(row, scales, format, columns=128)
        now = exact(aligned.codes, aligned.scales, alignment.aligned_format(format), 128)
        assert np.array_equal(now, exact(row, scales, format, 128)) is same


@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 2, 3), (7, 12, 17), (18, 30, 60), (200, 199, 198)])
@pytest.mark.parametrize("format", [f for f in MX if f.scale.name == "e8m0_ceil"], ids=str)
def test_every_code_under_every_shift(format, shifts):
    """Nearest, ties to even, NaN and infinities where they were, and the bound."""
    codes, scales = every_code(format, np.random.default_rng(1), shifts)
    aligned = alignment.align(codes, scales, format, columns=128)
    assert_within_the_bound(codes, scales, aligned, format, 128)
    target, before = alignment.aligned_format(format), exact(codes, scales, format, 128)
    codes = np.arange(target.element.max_code + 1, dtype=np.uint8)[None]
    finite = exact(codes, np.ones((1, 1), np.float32), target, codes.size)[0]
    numbers = np.isfinite(before)
    x = np.abs(before[numbers]) / aligned.scales.repeat(128, 1)[numbers]
    distance = np.abs(x[:, None] - finite)
    ties = distance == distance.min(1, keepdims=True)
    # Of two that are as near, the even one.
    order = np.where(ties, np.arange(len(finite)) % 2, 2)
    np.testing.assert_array_equal(aligned.codes[numbers] & 0x7F, order.argmin(1))


def test_a_nan_scale_and_a_zero_block_say_nothing_of_the_others():
    format = Format.parse("mxfp4_e2m1")
    code = np.full((1, 100), 5, np.uint8)
    code[0, 32:64] = 0
    codes = layout.pack(code, 4)
    alone = alignment.align(codes, np.array([[100, 0, 90, 100]], np.uint8), format, columns=100)
    other = alignment.align(codes, np.array([[100, 254, 90, 0xFF]], np.uint8), format, columns=100)
    assert alone.scales == other.scales
    np.testing.assert_array_equal(alone.codes[0, :96], other.codes[0, :96])
    assert (other.codes[0, 96:] == 0x7F).all()
    infinite = alignment.align(np.full((1, 64), 0x7C, np.uint8), np.array([[0xFF, 100]], np.uint8), "mxfp8_e5m2", columns=64)
    assert (infinite.codes[0, :32] == 0x7F).all()
    assert (infinite.codes[0, 32:] == 0x7C).all()
    everything = alignment.align(codes, np.full((1, 4), 0xFF, np.uint8), format, columns=100)
    assert (everything.codes == 0x7F).all()


def test_the_smallest_scales_are_kept():
    codes, scales = np.array([[1, 0x81, 0x7E] + [0] * 61], np.uint8), np.zeros((1, 2), np.uint8)
    aligned = alignment.align(codes, scales, "mxfp8_e4m3", columns=64)
    np.testing.assert_array_equal(aligned.codes, codes)
    assert aligned.scales == np.float32(2.0**-127)


@pytest.mark.parametrize("format", MX, ids=str)
def test_torch_and_jax_give_the_same_bits(format):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (2, 33, layout.packed_columns(168, format.element.bits)), np.uint8)
    if format.element.name == "e2m3":
        codes &= 0xFF
    scales = rng.integers(0, 256, layout.scales_shape((2, 33, 168), format), np.uint8)
    expected = alignment.align(codes, scales, format, columns=168)
    traced = jax.jit(lambda c, s: alignment.align(c, s, format, columns=168)[:2])(codes, scales)
    for got in (alignment.align(torch.tensor(codes), torch.tensor(scales), format, columns=168)[:2], traced):
        np.testing.assert_array_equal(np.asarray(got[0]), expected.codes)
        np.testing.assert_array_equal(np.asarray(got[1]).view(np.uint32), expected.scales.view(np.uint32))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32)])
def test_empty_arrays(shape):
    q = numerics.quantize(np.zeros(shape, np.float32), "mxfp6_e3m2")
    aligned = alignment.align(q.codes, q.scales, "mxfp6_e3m2", columns=shape[-1])
    assert aligned.codes.shape == shape
    assert aligned.scales.shape == layout.scales_shape(shape, Format.parse("fp8_e4m3_1x128"))


def test_refuses_what_has_no_aligned_form():
    for name in ("mxint8", "nvfp4", "fp8_e4m3_1x128"):
        with pytest.raises(ValueError, match="only MXFP8, MXFP6 and MXFP4"):
            alignment.align(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8), name, columns=32)
