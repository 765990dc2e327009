"""The random Hadamard transform: its matrix, its bits, its corner cases."""

import numpy as np
import pytest
import statement
from samples import DTYPES, bits_of, sample

from blockfp.definition.rotation import GROUP, rotate


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_matrix(dtype):
    x = sample("gaussian", (6, 64), dtype)
    groups = x.astype(np.float64).reshape(6, 4, GROUP)
    expected = np.stack([[statement.hadamard(g) for g in row] for row in groups]).reshape(6, 64)
    z = rotate(x)
    assert z.dtype == x.dtype
    relative = {"float32": 2**-21, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(z.astype(np.float64), expected, atol=relative * 4)


def test_integers_are_exact():
    x = np.random.default_rng(0).integers(-100, 100, (5, 32)).astype(np.float32)
    expected = np.stack([[statement.hadamard(g) for g in row] for row in x.reshape(5, 2, GROUP)]).reshape(5, 32)
    np.testing.assert_array_equal(rotate(x), expected)


def test_the_order_of_the_sums():
    """fp32 stages of stride 1, 2, 4, 8, written out."""
    x = sample("exponents", (1, 16), seed=3)
    x = np.clip(x, -1e30, 1e30).astype(np.float32)
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
    z = np.where(np.abs(x[0]) < 2.0**-100, np.float32(0) * x[0], x[0]) * signs
    for h in (1, 2, 4, 8):
        for i in range(16):
            if not i & h:
                z[i], z[i + h] = z[i] + z[i + h], z[i] - z[i + h]
    np.testing.assert_array_equal(bits_of(rotate(x)[0]), bits_of(z * np.float32(0.25)))


def test_products_are_kept():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((7, 96)), rng.standard_normal((5, 96))
    rotated = [rotate(m.astype(np.float32)).astype(np.float64) for m in (a, b)]
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, a @ b.T, atol=1e-4)


def test_corner_cases():
    tail = sample("gaussian", (3, 40))
    np.testing.assert_array_equal(rotate(tail)[:, 32:], tail[:, 32:])
    np.testing.assert_array_equal(rotate(tail)[:, :32], rotate(tail[:, :32]))
    np.testing.assert_array_equal(rotate(tail[:, 16:], origin=16)[:, :16], rotate(tail)[:, 16:32])
    short = sample("gaussian", (3, 15))
    np.testing.assert_array_equal(rotate(short), short)
    assert rotate(np.zeros((0, 16), np.float32)).shape == (0, 16)
    tiny = np.full((1, 16), 2.0**-101, np.float32)
    np.testing.assert_array_equal(rotate(tiny), np.zeros((1, 16)))
    infinite = np.zeros((1, 16), np.float32)
    infinite[0, :2] = np.inf
    z = rotate(infinite)
    assert np.isinf(rotate(np.full((1, 16), 3e38, np.float32))).any()
    assert np.isnan(z).any()
    assert np.isinf(z).any()
    with pytest.raises(ValueError, match="multiple of 16"):
        rotate(tail, origin=8)
