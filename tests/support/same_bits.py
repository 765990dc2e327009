"""Comparison of two sets of results that sees NaN, the sign of zero, dtypes and shapes."""

import numpy as np
from samples import bits_of


def assert_same_bits(actual, expected):
    """Arrays, or tuples of arrays and None, with the same dtypes, shapes and bits."""
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e)
        return
    if expected is None:
        assert actual is None
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(bits_of(actual), bits_of(expected))
