"""Flips of codes and OsciReset's paths, against what loops over single weights give."""

from itertools import pairwise

import numpy as np
import pytest

import blockfp
from blockfp.definition import layout, oscillation
from blockfp.definition.oscillation import OsciReset
from blockfp.formats import NAMES, Format

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
