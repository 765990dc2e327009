"""Scales: rules at their edges, delayed scaling as a state transition, and scales of weights without masters."""

import numpy as np
import pytest
import statement
from held_formats import FORMATS, OTHER_CHOICES
from samples import sample

from blockfp.definition import layout, numerics, scaling
from blockfp.formats import E4M3, E5M2, ELEMENTS, Format

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
KEY = 0x123456789ABCDEF0
SHAPE = (37, 150)


def decoded(q, format, columns=None):
    return numerics.dequantize(*q, format, "float32", columns=columns or SHAPE[1])


def random_halves(shape):
    return statement.random_bytes((KEY >> 32, KEY & 0xFFFFFFFF), 0, int(np.prod(shape)), 2).reshape(shape)


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


EDGES = np.unique(
    np.concatenate(
        [
            np.arange(0, 4000),
            *(np.arange(e << 23, (e << 23) + 3) for e in range(255)),
            *(np.arange((e << 23) - 3, e << 23) for e in range(1, 256)),
            np.random.default_rng(0).integers(0, 0x7F800000, 20000),
        ]
    )
).astype(np.int32)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_e8m0_at_every_exponent(element, rule):
    # Around the rounding of a subnormal product too, where 2^-127 + 2^-150 is a tie.
    near = np.int32(scaling._smallest_above_zero(element)) + np.arange(-40, 40, dtype=np.int32)
    amax = np.concatenate([EDGES[EDGES < 0x7F800000][::7], near[near >= 0], [0x7F800000]]).astype(np.int32)
    expected = [statement.e8m0(float(a), element.name, rule) for a in amax.view(np.float32)]
    np.testing.assert_array_equal(scaling.e8m0_scale(amax, element, f"e8m0_{rule}"), expected)


def test_ceil_never_saturates_and_is_the_smallest_that_does_not():
    amax = EDGES[(EDGES > 0x0C000000) & (EDGES < 0x7F000000)]
    for element in ELEMENTS.values():
        scale = scaling.e8m0_scale(amax, element, "e8m0_ceil").astype(np.float64)
        needed = np.log2(amax.view(np.float32).astype(np.float64) / element.max)
        assert (scale - 127 >= needed - 1e-6).all()
        assert (scale - 127 < needed + 1 + 1e-6).all()


def delayed_step(history, scale, element_max, margin, algorithm):
    """The transition in the words of its formula, on one operand, float64 and fp32 division."""
    last = history[0]
    if last == 0:
        return history, scale
    amax = max([last, *history[1:]]) if algorithm == "max" else last
    moved = [0.0, *history[2:], last] if len(history) > 1 else [0.0]
    return moved, min(float(statement.div32(element_max * 2.0**-margin, amax)), statement.FP32_MAX)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3, -2])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("element", [E4M3, E5M2, [E4M3, E5M2, E5M2]], ids=str)
def test_delayed_scaling(element, length, margin, algorithm):
    rng = np.random.default_rng(length)
    history, scale = np.zeros((length, 3), np.float32), np.ones(3, np.float32)
    expected = [([0.0] * length, 1.0) for _ in range(3)]
    for step in range(8):
        for _ in range(2):
            amax = np.float32(10.0 ** rng.uniform(-44, 38, 3)) * (step != 5)
            amax[step % 3] = [0, np.inf, np.nan][step % 3]
            history = scaling.record(history, amax)
            for (h, _), a in zip(expected, amax.tolist(), strict=True):
                h[0] = max(h[0], a if np.isfinite(a) else 0.0)
        history, scale = scaling.update(history, scale, element, margin=margin, algorithm=algorithm)
        most = [one.max for one in (element if isinstance(element, list) else [element] * 3)]
        expected = [delayed_step(h, s, m, margin, algorithm) for (h, s), m in zip(expected, most, strict=True)]
        np.testing.assert_array_equal(history.T, np.array([h for h, _ in expected], np.float32))
        np.testing.assert_array_equal(scale, np.array([s for _, s in expected], np.float32))


def test_refused_options():
    history, scale = np.zeros((4, 1), np.float32), np.ones(1, np.float32)
    with pytest.raises(ValueError, match="algorithm"):
        scaling.update(history, scale, E4M3, algorithm="mean")
    with pytest.raises(ValueError, match="margin"):
        scaling.update(history, scale, E4M3, margin=200)
    with pytest.raises(ValueError, match="eps"):
        scaling.lift(np.zeros(1, np.int32), -1.0)


@pytest.mark.parametrize("element", ["e2m1", "e3m2", "e2m3"])
def test_rule_ceil_lets_nothing_saturate(element):
    """So rounding stochastically is unbiased without room above: around MAX times powers of two, and everywhere else."""
    format = ELEMENTS[element]
    edge = int(np.float32(format.max).view(np.int32))
    near = np.arange(edge - 2000, edge + 2000, dtype=np.int32)
    patterns = np.concatenate(
        [near + (k << 23) for k in range(-60, 61, 7)] + [np.arange(1 << 10, 1 << 15, dtype=np.int32) << 16]
    )
    patterns = patterns[(patterns >= 0x00800000) & (patterns < 0x7F000000)]
    exponent = scaling.e8m0_scale(patterns, format, "e8m0_ceil").astype(np.int64) - 127
    ratio = patterns.view(np.float32).astype(np.float64) / np.exp2(exponent)
    assert ratio.max() == format.max
    assert ratio.min() > format.max / 2.001
