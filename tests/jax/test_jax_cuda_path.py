"""JAX's code of the CUDA path, with kernels that the definition carries out: the results of the CPU's own path."""

import emulated_cuda_in_jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockfp.jax as bfp
from blockfp import recipes

# Delayed scaling has its scales from outside.
RECIPES = [name for name in recipes.RECIPES if name != "fp8_delayed"]


def values(shape, seed, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2_128x128", "mxfp8_e4m3", "mxfp6_e2m3_32x32", "mxint8", "nvfp4"])
def test_arrays(format):
    x = values((2, 64, 96), 0, jnp.float32)
    for key in (None, 11):
        wanted = bfp.quantize(x, format, key=key)
        with emulated_cuda_in_jax.launches():
            found = bfp.quantize(x, format, key=key)
            back = jax.block_until_ready(found.dequantize(jnp.float32))
            assert emulated_cuda_in_jax.calls
        np.testing.assert_array_equal(found.codes, wanted.codes)
        np.testing.assert_array_equal(found.scales, wanted.scales)
        np.testing.assert_array_equal(back, wanted.dequantize(jnp.float32))


def assert_close_to_the_cpus(function, x, w, gradient):
    """Holds values and gradients of a function of x and w against those of the CPU's own path."""

    def step(x, w):
        y, back = jax.vjp(function, x, w)
        return y, back(gradient)

    wanted = jax.jit(step)(x, w)
    with emulated_cuda_in_jax.launches():
        found = jax.block_until_ready(jax.jit(step)(x, w))
        assert emulated_cuda_in_jax.calls
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        # Sums in another order move some values over a rounding's border.
        assert np.linalg.norm(ours - theirs) <= 0.05 * np.linalg.norm(theirs)


@pytest.mark.parametrize("shape", [(48, 96, 128), (40, 33, 50)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers(recipe, shape):
    tokens, n, k = shape
    x, w, gradient = values((tokens, k), 0), values((n, k), 1) * 0.1, values((tokens, n), 2)
    assert_close_to_the_cpus(lambda x, w: bfp.linear(x, w, recipe=recipe, key=7), x, w, gradient)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_row"])
def test_layers_of_groups(recipe):
    """One of four experts has no rows. (A scale for each row has no columns of groups.)"""
    x, w, gradient = values((60, 64), 0), values((4, 96, 64), 1) * 0.1, values((60, 96), 2)
    counts = jnp.array([20, 0, 9, 31], jnp.int32)
    assert_close_to_the_cpus(lambda x, w: bfp.grouped_linear(x, w, counts, recipe=recipe, key=7), x, w, gradient)
