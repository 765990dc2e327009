"""Columnwise quantization is that of the transposed array, and both from one call are both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_parts
from samples import sample

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.definition.rotation import rotate

SHAPE = (2, 40, 70)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2_32x32", "nvfp4"])
def test_columnwise_and_both(format, implementation):
    x = sample("bf16_valued", SHAPE, "bfloat16")
    want = numerics.quantize(np.swapaxes(x, -1, -2), format)
    assert_same_parts(bfp.quantize_columnwise(x, format, implementation=implementation), want)
    row, column = jax.jit(lambda x: bfp.quantize_both(x, format, implementation=implementation))(x)
    assert_same_parts(column, want)
    assert_same_parts(row, numerics.quantize(x, format))
    assert (row.shape, column.shape) == (SHAPE, (2, 70, 40))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_rotated_and_stochastic(implementation):
    x = sample("gaussian", SHAPE[1:])
    q = bfp.quantize_columnwise(x, "nvfp4", key=3, rotate=True, implementation=implementation)
    assert_same_parts(q, numerics.quantize(rotate(x.T), "nvfp4", key=3))


def test_gradients_are_straight_through():
    x, w = (jnp.asarray(sample(kind, SHAPE)) for kind in ("gaussian", "integers"))

    def loss(x):
        row, column = bfp.quantize_both(x, "mxfp8_e4m3")
        again = bfp.quantize_columnwise(x, "mxint8")
        return (row.dequantize() * w).sum() + (column.dequantize() * w.mT).sum() + (again.dequantize() * 2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * w + 2)


def test_bad_input():
    with pytest.raises(TypeError, match="x must be a JAX or NumPy array, got list"):
        bfp.quantize_both([1.0], "mxint8")
    with pytest.raises(RuntimeError, match="implementation='pallas' can't run here"):
        bfp.quantize_columnwise(jnp.ones((4, 32)), "mxint8", implementation="pallas")
