"""NumPy arrays on the GPU, and results there held against NumPy's."""

from arrays import to_numpy, to_torch
from same_bits import assert_same_bits

__all__ = ["assert_same", "to_gpu", "to_numpy"]


def to_gpu(x):
    return to_torch(x, "cuda")


def assert_same(got, expected, what):
    """Bits of every field of a result; torch tensors against NumPy arrays."""
    assert_same_bits(tuple(map(to_numpy, got)), tuple(expected), what)
