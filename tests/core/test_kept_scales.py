"""Scales of weights without masters: against the independent statement, and by what they are for."""

import numpy as np
import pytest
import statement
from held_formats import FORMATS, OTHER_CHOICES
from samples import sample

from blockfp.definition import layout, numerics
from blockfp.formats import Format

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
KEY = 0x123456789ABCDEF0
SHAPE = (37, 150)


def decoded(q, format, columns=None):
    return numerics.dequantize(*q, format, "float32", columns=columns or SHAPE[1])


def random_halves(shape, key=KEY):
    return statement.random_bytes((key >> 32, key & 0xFFFFFFFF), 0, int(np.prod(shape)), 2).reshape(shape)


def moved(format, change, seed=0):
    """A quantized array and what its values have become."""
    x = sample("gaussian", SHAPE, seed=seed) * np.exp2(np.random.default_rng(seed).integers(-3, 3, (SHAPE[0], 1)))
    q = numerics.quantize(x.astype(np.float32), format)
    return q, change(decoded(q, format)).astype(np.float32)


def some_columns(y):
    """Some grow, some shrink, some become zero, in blocks of all kinds."""
    rng = np.random.default_rng(1)
    y = y * np.where(rng.random(y.shape) < 0.05, np.exp2(rng.integers(-9, 10, y.shape)), 1)
    y[3:9] *= 2.0**-20
    y[10:14] = 0
    y[:, 70:90] *= 100
    return y


def specials(y):
    y[4, 5], y[9, 140], y[20, 33] = np.nan, np.inf, -np.nan
    return y


CHANGES = {
    "nothing": lambda y: y,
    "a little": lambda y: y * 1.0003 - 1e-4,
    "all grow": lambda y: y * 37.0,
    "all shrink": lambda y: y * 1e-3,
    "some": some_columns,
    "specials": specials,
}


@BY_NAME
@pytest.mark.parametrize("change", CHANGES)
def test_as_stated(format, change):
    q, y = moved(format, CHANGES[change])
    got = numerics.requantize(y, format, q.scales, q.tensor_scale, key=KEY)
    tensor = None if q.tensor_scale is None else float(q.tensor_scale)
    codes, scales, tensor_scale = statement.requantize(y, format.name, q.scales, tensor, random_halves(SHAPE))
    np.testing.assert_array_equal(got.scales, scales)
    np.testing.assert_array_equal(statement.unpack(got.codes, format.element.bits, SHAPE[1]), codes)
    assert (got.tensor_scale is None and tensor_scale is None) or got.tensor_scale == tensor_scale


@BY_NAME
def test_scales_of_every_kind_go_on(format):
    """Zero, NaN, subnormal, negative and enormous ones; and amaxes of every binade."""
    rng = np.random.default_rng(2)
    x = sample("exponents", SHAPE).astype(np.float32)
    shape = layout.scales_shape(SHAPE, format)
    if format.scale.dtype == "uint8":
        scales = rng.integers(0, 256, shape).astype(np.uint8)
    else:
        scales = np.exp2(rng.integers(-149, 128, shape)).astype(np.float32)
        scales.ravel()[: min(5, scales.size)] = np.array([0, np.nan, np.inf, -1.0, 1e-45], np.float32)[: scales.size]
    tensor_scale = np.array(1e-3, np.float32) if format.scale.two_level else None
    got = numerics.requantize(x, format, scales, tensor_scale, key=KEY)
    found = numerics.amax(x, format)
    y = decoded(got, format)
    fresh = numerics.amax(y, format)
    # The largest element of a block is no further than a spacing from where it was: nothing saturates.
    largest, kept = (a.blocks.view(np.float32).astype(np.float64) for a in (found, fresh))
    told = (largest > 2.0**-100) & (largest < 3e38)
    if format.scale.two_level:  # E4M3 scales reach only so far below the tensor's largest
        told &= largest > 2.0**-12 * float(found.tensor.view(np.float32))
    assert (np.abs(kept - largest) <= largest * 2.0 ** -min(format.element.mantissa_bits, 4))[told].all()


@pytest.mark.parametrize("format", [*FORMATS, *OTHER_CHOICES], ids=str)
@pytest.mark.parametrize("factor", [0.2, 0.999, 1.0, 1.001, 1.9, 40.0])
def test_what_does_not_move_stays_whatever_the_largest_does(format, factor):
    q, y = moved(format, lambda y: y)
    before, at = y.copy(), np.unravel_index(np.abs(y).argmax(), y.shape)
    y[at] *= np.float32(factor)
    got = numerics.requantize(y, format, q.scales, q.tensor_scale, key=KEY)
    after = decoded(got, format)
    changed = after != before
    changed[at] = False
    # Codes that are subnormal under a larger scale alone, as all of INT8's are; no scale is larger where the largest shrinks.
    element = format.element
    if element.signed != "complement":
        code = statement.unpack(got.codes, element.bits, SHAPE[1]) & (1 << element.bits - 1) - 1
        assert (code[changed] <= 1 << element.mantissa_bits).all()
    assert factor > 1.0 or not changed.any()


@BY_NAME
def test_nothing_that_moves_changes_nothing(format):
    q, y = moved(format, lambda y: y)
    for key in (None, 1, 2):
        np.testing.assert_array_equal(decoded(numerics.requantize(y, format, q.scales, q.tensor_scale, key=key), format), y)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_128x128_fp32", "mxfp8_e4m3_32x32", "nvfp4_16x16", "mxint8"])
def test_on_average_values_move_as_they_should(name):
    """Steps of 1/3000 of a spacing, up and down: one random byte would lose them all."""
    format = Format.parse(name)
    x = np.random.default_rng(3).uniform(1, 2, (128, 512)).astype(np.float32)
    q = numerics.quantize(x, format)
    spacing = 2.0**-format.element.mantissa_bits
    for sign in (-1, 1):
        parts, start = q, decoded(q, format, 512).astype(np.float64)
        step = np.float32(sign * spacing / 3000)
        for turn in range(10):
            y = decoded(parts, format, 512) + step
            parts = numerics.requantize(y, format, parts.scales, parts.tensor_scale, key=turn)
        went = (decoded(parts, format, 512).astype(np.float64) - start).mean()
        # Each step moves by a spacing (twice that where a scale has grown) with a probability of 1/3000.
        deviation = 2 * spacing * np.sqrt(10 / 3000 / x.size)
        assert went == pytest.approx(10 * step, abs=5 * deviation)


@BY_NAME
@pytest.mark.parametrize("origin", [(7, 24), (130, 200)])
def test_a_window_is_part_of_the_whole(format, origin):
    x = sample("bf16_valued", (190, 290))
    q = numerics.quantize(x, format)
    y = decoded(q, format, 290) * np.float32(1.7)
    row, column = origin
    window = y[row : row + 45, column : column + 72]
    whole = numerics.requantize(y, format, q.scales, q.tensor_scale, key=5)
    grid, full = ..., numerics.amax(y, format)
    if format.block is not None:
        (r, c) = format.block
        grid = (slice(row // r, -(-(row + 45) // r)), slice(column // c, -(-(column + 72) // c)))
    cut = full._replace(blocks=full.blocks[grid], nan=None if full.nan is None else full.nan[grid])
    place = {"origin": origin, "shape": y.shape}
    part = numerics.requantize(window, format, q.scales[grid], q.tensor_scale, key=5, amax=cut, **place)
    got = numerics.dequantize(*part, format, "float32", columns=72, origin=origin)
    np.testing.assert_array_equal(got, decoded(whole, format, 290)[row : row + 45, column : column + 72])
    np.testing.assert_array_equal(part.scales, whole.scales[grid])


def test_refused():
    x = np.zeros((4, 32), np.float32)
    q = numerics.quantize(x, "mxfp8_e4m3")
    with pytest.raises(ValueError, match="must have shape"):
        numerics.requantize(x, "mxfp8_e4m3", q.scales[:2])
    with pytest.raises(ValueError, match="needs a tensor_scale"):
        numerics.requantize(x, "nvfp4", np.zeros((4, 2), np.uint8))
