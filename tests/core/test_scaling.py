"""Scale rules at their edges, and delayed scaling as a state transition."""

import numpy as np
import pytest
import statement

from blockfp.definition import scaling
from blockfp.formats import E4M3, E5M2, ELEMENTS

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
