"""The optimizer's formulas: against plain float64 arithmetic, and what moments in fewer bits keep and lose."""

import math

import ml_dtypes
import numpy as np
import pytest
from same_bits import assert_same_bits

from blockfp.definition import adamw

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
    """0.999 of a moment is nearer to the moment than to the next number that FP8 or bfloat16 has; 0.9999 of one by less than
    1/512 of the spacing."""
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
