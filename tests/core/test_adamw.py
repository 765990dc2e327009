"""The optimizer's formulas against float64 arithmetic; flips of codes and OsciReset's paths against loops over weights."""

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from same_bits import assert_same_bits

import blockfp
from blockfp.definition import adamw, layout, oscillation
from blockfp.definition.oscillation import OsciReset
from blockfp.formats import NAMES, Format

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def reference(weight, gradients, lr, betas, eps, weight_decay, decoupled):
    """The algorithm as the papers have it, in float64."""
    weight, first, second = weight.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        g = g.astype(np.float64)
        if decoupled:
            weight = weight - lr * weight_decay * weight
        else:
            g = g + weight_decay * weight
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g * g
        weight = weight - lr * (first / (1 - betas[0] ** t)) / (np.sqrt(second / (1 - betas[1] ** t)) + eps)
    return weight, first, second


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_update_is_the_papers(decoupled, betas):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 40)).astype(np.float32)
    gradients = [rng.standard_normal((8, 40)).astype(np.float32) for _ in range(20)]
    settings = SETTINGS | {"betas": betas}
    w, m, v = weight, np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        w, m, v = adamw.update(w, m, v, g, adamw.coefficients(t, 1e-2, decoupled=decoupled, **settings))
    assert {w.dtype, m.dtype, v.dtype} == {np.dtype(np.float32)}
    for got, expected in zip((w, m, v), reference(weight, gradients, 1e-2, decoupled=decoupled, **settings), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_constants_from_arrays_are_those_from_numbers():
    for step in (1, 2, 10, 100_000):
        numbers = adamw.coefficients(step, 3e-4, **SETTINGS)
        arrays = adamw.coefficients(np.asarray([float(step)]), np.asarray([3e-4]), **SETTINGS)
        np.testing.assert_allclose(np.float32(arrays.rate[0]), np.float32(numbers.rate), rtol=1e-6)
        np.testing.assert_allclose(np.float32(arrays.unbias2[0]), np.float32(numbers.unbias2), rtol=1e-6)
    assert numbers.rate == pytest.approx(-3e-4)
    assert adamw.coefficients(1, 1.0, **SETTINGS).unbias2 == pytest.approx(1 / math.sqrt(0.001), rel=1e-12)


def test_without_a_learning_rate_nothing_moves():
    weight = np.array([[0.0, -0.0, 1e-45, np.inf, np.nan, -3.0]], np.float32)
    gradient = np.array([[1.0, -1.0, 1.0, np.inf, 1.0, np.nan]], np.float32)
    for lr in (0.0, np.zeros((), np.float32)):
        c = adamw.coefficients(1, lr, **SETTINGS)
        assert adamw.stands_still(c)
        with np.errstate(invalid="ignore"):
            moved, first, _ = adamw.update(weight, np.zeros_like(weight), np.zeros_like(weight), gradient, c)
        assert_same_bits(moved, weight)
        assert first[0, 0] != 0
    assert not adamw.stands_still(adamw.coefficients(1, 1e-30, **SETTINGS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"betas": (1.0, 0.9)}, "betas must be"),
        ({"eps": -1.0}, "eps must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"moments": "int8"}, "'float32', 'bfloat16', 'fp8'"),
    ],
)
def test_settings_that_mean_nothing(change, message):
    with pytest.raises(ValueError, match=message):
        adamw.check_settings(**({"lr": 1e-3, "moments": "float32"} | SETTINGS | change))


def moments(seed=0, shape=(16, 300)):
    rng = np.random.default_rng(seed)
    first = (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 3, (shape[0], 1)))).astype(np.float32)
    return first, (first * first * np.exp2(rng.uniform(-8, 8, shape))).astype(np.float32)


@pytest.mark.parametrize("second", [False, True])
def test_fp8_moments_are_close_and_kept(second):
    moment = moments()[second]
    codes, scales = adamw.store_fp8(moment, second=second, key=7)
    assert (codes.dtype, codes.shape, scales.shape) == (np.uint8, (16, 300), (16, 3))
    values = adamw.load_fp8(codes, scales, second=second)
    # One spacing of E4M3 is 1/8 at most, of the square root for the second moment; below 2^-6 of the scale's 1 it is 2^-9.
    root, expected = (np.sqrt(values), np.sqrt(moment)) if second else (values, moment)
    spacing = np.maximum(np.abs(expected) / 8, np.repeat(scales, 128, -1)[:, :300] * 2.0**-9 * 2)
    assert (np.abs(root - expected) <= spacing).all()
    # What was stored is stored again as it is, to nearest and at random, with other neighbours too.
    for key in (None, 8, 9):
        again = adamw.store_fp8(values, second=second, key=key)
        assert_same_bits(adamw.load_fp8(*again, second=second), values)


def test_a_second_moment_never_becomes_zero():
    moment = np.full((1, 128), 1e-30, np.float32)
    moment[0, 0], moment[0, 1] = 1.0, 0.0
    values = adamw.load_fp8(*adamw.store_fp8(moment, second=True, key=3), second=True)
    assert values[0, 0] == 1.0
    assert values[0, 1] == 0.0
    assert (values[0, 2:] > 0).all()
    assert (values[0, 2:] < 2.0**-31).all()


@pytest.mark.parametrize("store", ["fp8", "bfloat16"])
@pytest.mark.parametrize("beta2", [0.999, 0.9995, 0.9999])
def test_a_second_moment_can_fall(store, beta2):
    """0.999 of a moment rounds back to it in FP8 and bfloat16; 0.9999 is nearer by less than 1/512 of the spacing."""
    moment = np.ones((64, 128), np.float32)
    moment[:, 0] = 300.0  # keeps the scale where it is
    steps = 400
    for t in range(1, steps + 1):
        moment[:, 1:] *= np.float32(beta2)
        key = adamw.rounding_key(5, t, 0, adamw.SECOND)
        if store == "fp8":
            moment = adamw.load_fp8(*adamw.store_fp8(moment, second=True, key=key), second=True)
        else:
            moment = adamw.round_to_bfloat16(moment, key).astype(np.float32)
    # The square root is what FP8 keeps and is right on average; its variance makes the moment some percent larger.
    log = np.log(moment[:, 1:].astype(np.float64).mean()) / np.log(beta2)
    assert log == pytest.approx(steps, rel=0.08)


def test_bfloat16_at_random_is_right_on_average_and_at_its_edges():
    x = np.full((1, 1 << 14), 1 + 1 / 512, np.float32)  # a quarter of the way to the next bfloat16
    rounded = adamw.round_to_bfloat16(x, 1).astype(np.float32)
    assert set(np.unique(rounded)) == {np.float32(1.0), np.float32(1 + 1 / 128)}
    assert rounded.mean() == pytest.approx(1 + 1 / 512, abs=1e-4)
    special = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -1.5, np.finfo(np.float32).max]], np.float32)
    got = adamw.round_to_bfloat16(special, 1).astype(np.float32)
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert_same_bits(got[:, :2], special[:, :2])
    assert np.isnan(got[0, 2])
    assert_same_bits(got[:, 3:5], special[:, 3:5])
    assert got[0, 6] == -1.5
    assert got[0, 7] == largest


def test_a_shard_of_rows_and_of_blocks_stores_what_the_whole_does():
    first, second = moments(3, (10, 512))
    for moment, is_second in ((first, False), (second, True)):
        codes, scales = adamw.store_fp8(moment, second=is_second, key=11)
        half = adamw.round_to_bfloat16(moment, 11)
        for rows, columns in ((slice(3, 7), slice(0, 512)), (slice(0, 10), slice(256, 512))):
            origin = (rows.start, columns.start)
            part = adamw.store_fp8(moment[rows, columns], second=is_second, key=11, origin=origin, shape=(10, 512))
            assert_same_bits(part, (codes[rows, columns], scales[rows, columns.start // 128 : columns.stop // 128]))
            assert_same_bits(
                adamw.round_to_bfloat16(moment[rows, columns], 11, origin=origin, shape=(10, 512)), half[rows, columns]
            )


def test_keys_differ_by_step_parameter_and_purpose():
    keys = {adamw.rounding_key(1, step, p, what) for step in (1, 2) for p in (0, 1) for what in (2, 3, 4)}
    assert len(keys) == 12
    array = adamw.rounding_key(np.array([0, 1], np.int32), np.array(2, np.int32), 1, adamw.SECOND)
    assert tuple(int(w) & 0xFFFFFFFF for w in array) == adamw.rounding_key(1, 2, 1, adamw.SECOND)


ELEMENTS = {Format.parse(name).element.name: Format.parse(name).element for name in NAMES}


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_ordinals_are_the_order_of_values(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)[None]
    values = decoded(codes, element)
    # -2 is never written.
    finite = np.isfinite(values) & ((codes != 0x80) | (element.signed != "complement"))
    ordinals = oscillation.ordinals(codes, element)
    assert ordinals.dtype == np.int32
    order = np.argsort(values[finite], kind="stable")
    assert (np.diff(ordinals[finite][order]) >= 0).all()
    steps = np.diff(np.unique(ordinals[finite]))
    assert (steps == 1).all()
    assert set(ordinals[values == 0]) == {0}


def decoded(codes, element):
    """The values of codes, from the definition of an element alone."""
    found = []
    for code in codes[0].tolist():
        if element.signed == "complement":
            found.append((code - 256 if code >= 128 else code) / 64)
            continue
        sign, magnitude = code >> (element.bits - 1), code & ((1 << (element.bits - 1)) - 1)
        exponent, mantissa = magnitude >> element.mantissa_bits, magnitude & ((1 << element.mantissa_bits) - 1)
        if magnitude > element.max_code:
            value = np.nan
        elif exponent:
            value = (1 + mantissa / 2**element.mantissa_bits) * 2.0 ** (exponent - element.bias)
        else:
            value = mantissa / 2**element.mantissa_bits * 2.0 ** (1 - element.bias)
        found.append(-value if sign else value)
    return np.array([found])


def test_flips_are_changes_against_the_last_one():
    walks = np.array([[0, 1, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 3, 3], [0, 5, -5, 5, 4, 4, 3]]).T
    direction, counts, mean = np.zeros(4, np.int8), np.zeros(4, int), np.zeros(4, np.float32)
    for before, now in pairwise(walks):
        flipped, direction = oscillation.flips(before, now, direction)
        counts += flipped
        mean = oscillation.frequency(mean, flipped, 0.25)
    assert counts.tolist() == [2, 0, 0, 3]
    assert direction.tolist() == [1, 1, 0, -1]
    assert direction.dtype == np.int8
    # By hand: flips in the steps 2 and 4 of 6, and in 2, 3 and 4.
    expected = [0.25 * (0.75**4 + 0.75**2), 0, 0, 0.25 * (0.75**4 + 0.75**3 + 0.75**2)]
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_paths_and_reset():
    """A weight at an edge between two codes, one that wanders, one that rests; by NumPy's quantization."""
    format, settings = "mxfp4_e2m1", OsciReset(period=10, window=6, threshold=8.0, start=2)
    weight = np.zeros((1, 32), np.float32)
    weight[0, :4] = [6.0, 1.24, 0.9, 1.0]
    steps = np.zeros((12, 1, 32), np.float32)
    steps[:, 0, 1] = [0.02 * (-1) ** i for i in range(12)]
    steps[:, 0, 2] = 0.05
    quantized = blockfp.quantize(weight, format).dequantize()
    paths, travelled = (np.zeros_like(weight),) * 2, np.zeros((2, 1, 32))
    for number, step in enumerate(steps, 1):
        before = (weight, quantized)
        weight = weight + step
        quantized = blockfp.quantize(weight, format).dequantize()
        at = oscillation.place(number, settings)
        assert at == (number - 2 if number > 2 else at)
        if not 1 <= at <= settings.window:
            continue
        paths = tuple(map(oscillation.lengthen, paths, before, (weight, quantized), [at == 1] * 2))
        travelled += [np.abs(weight - before[0]), np.abs(quantized - before[1])]
        if at == settings.window:
            np.testing.assert_allclose(paths[0], travelled[0], rtol=1e-6)
            np.testing.assert_allclose(paths[1], travelled[1], rtol=1e-6)
            which = oscillation.oscillates(*paths, settings.threshold)
            assert np.flatnonzero(which).tolist() == [1]
            return
    raise AssertionError("no window ended")


def test_places_of_steps():
    settings = OsciReset(period=4, window=2, start=3)
    numbers = [oscillation.place(step, settings) for step in range(1, 12)]
    assert numbers == [-2, -1, 0, 1, 2, 3, 4, 1, 2, 3, 4]
    assert oscillation.place(np.arange(1, 12), settings).tolist() == numbers


def test_wrong_settings():
    assert oscillation.check_settings([20, 5, 8, 0]) == OsciReset(20, 5, 8, 0)
    for wrong, what in (
        (OsciReset(period=0), "period must be an integer from 1, got 0"),
        (OsciReset(window=300), "window must be at most period, 200, got 300"),
        (OsciReset(start=-1), "start must be"),
        (OsciReset(window=1.5), "window must be an integer"),
        (OsciReset(threshold=float("nan")), "threshold must be a finite number above 0, got nan"),
    ):
        with pytest.raises(ValueError, match=what):
            oscillation.check_settings(wrong)
    for wrong in (True, "on", (1, 2)):
        with pytest.raises(TypeError, match="osci_reset must be None or an OsciReset"):
            oscillation.check_settings(wrong)


def test_codes_are_unpacked_first():
    q = blockfp.quantize(np.array([[0.5, -6.0, 0.0, 6.0]], np.float32), "mxfp4_e2m1")
    codes = layout.unpack(q.codes, 4, 4)
    assert oscillation.ordinals(codes, q.format.element).tolist() == [[1, -7, 0, 7]]
