"""Comparison of two sets of results that sees NaN, the sign of zero, dtypes and shapes."""

import numpy as np
from samples import bits_of


def parts_of(q):
    """Codes, scales and tensor scale, or None, of a quantized array of any face."""
    return q.codes, q.scales, q.tensor_scale


def assert_same_parts(got, expected):
    """Quantized arrays of any faces, or the definition's results, with the same codes, scales and tensor scales."""
    assert_same_bits(parts_of(got), parts_of(expected))


def assert_same_bits(actual, expected, what="", source=None):
    """Compares dtypes, shapes and bits of arrays, or tuples; `what` and the bits in `source` are told where they differ."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected), what
        for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{what} [{number}]", source)
        return
    if expected is None:
        assert actual is None, what
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    different = bits_of(actual) != bits_of(expected)
    if different.any():
        at = tuple(np.argwhere(different)[0])
        found = f"{bits_of(actual)[at]:#x}, not {bits_of(expected)[at]:#x}"
        came = f", of bits {bits_of(source)[at]:#x}" if source is not None and source.shape == actual.shape else ""
        raise AssertionError(f"{what}: {int(different.sum())} differ, first at {at}: {found}{came}")
