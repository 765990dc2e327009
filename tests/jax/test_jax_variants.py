"""The face with and without jit and on arrays put on a device, and traces that are made once."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from same_trees import assert_same_tree
from samples import sample

import blockfp
import blockfp.jax as bfp

X = sample("bf16_valued", (2, 40, 70), "float32")
FAMILIES = ("fp8_e4m3", "fp8_e5m2_1x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1", "mxint8", "nvfp4")


class Everywhere(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @parameterized.parameters(*FAMILIES)
    def test_the_bits_are_numpys(self, format):
        expected = blockfp.quantize(X, format)
        q = self.variant(lambda x: bfp.quantize(x, format))(X)
        tensor_scale = None if expected.tensor_scale is None else np.asarray(expected.tensor_scale)
        assert_same_tree((q.codes, q.scales, q.tensor_scale), (expected.codes, expected.scales, tensor_scale))
        assert (q.format, q.shape, q.dtype) == (expected.format, expected.shape, expected.dtype)
        assert_same_tree(self.variant(lambda q: q.dequantize())(q), expected.dequantize())
        if expected.format.element.bits != 6:
            views = self.variant(lambda q: (q.view_codes(), q.view_scales()))(q)
            assert_same_tree(views, (expected.view_codes(), expected.view_scales()))

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("fp8_e4m3", "mxfp8_e4m3", "nvfp4")
    def test_random_bits_are_those_of_the_key(self, format):
        q = self.variant(lambda x, key: bfp.quantize(x, format, key=key))(X, jax.random.key(5))
        words = np.asarray(jax.random.key_data(jax.random.key(5)))
        expected = blockfp.quantize(X, format, key=words)
        assert_same_tree((q.codes, q.scales), (expected.codes, expected.scales))

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_step(self):
        """Sums may be rounded otherwise: the masters are near, and the codes are those of the masters."""
        optimizer, weights = bfp.adamw(0.1), {"w": jnp.asarray(X[0])}
        params = bfp.quantize_params(weights, "mxfp8")

        def step(params, state):
            gradients = bfp.grad(lambda params: (params["w"].dequantize() ** 2).sum())(params)
            updates, state = optimizer.update(gradients, state, params)
            return bfp.apply_updates(params, updates), state

        moved, state = self.variant(step)(params, optimizer.init(params, weights))
        # The first step of Adam goes one learning rate against the gradient's sign.
        values = np.asarray(params["w"].dequantize())
        expected = {"w": X[0] * (1 - 0.1 * 1e-4) - 0.1 * np.sign(values) * (np.abs(values) > 1e-3)}
        near = np.abs(values) > 1e-3
        chex.assert_trees_all_close(
            {"w": np.asarray(state.masters["w"])[near]}, {"w": expected["w"][near]}, rtol=1e-4, atol=1e-4
        )
        assert_same_tree(moved, bfp.quantize_params({"w": state.masters["w"]}, "mxfp8"))


def test_what_is_traced_once():
    """Formats are static by value: other arrays of the same format, and copies out of a pickle, find the compiled program."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def read(q):
        return q.dequantize()

    q = bfp.quantize(jnp.asarray(X), "nvfp4")
    read(q)
    read(bfp.quantize(jnp.asarray(-X), "nvfp4"))
    read(pickle.loads(pickle.dumps(q)))
    read(bfp.QuantizedArray.from_parts(q.codes, q.scales, q.tensor_scale, format="nvfp4", columns=70, dtype="float32"))
    read(jax.tree.map(lambda leaf: leaf, q))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state

    optimizer = bfp.with_masters(optax.lion(0.1))
    params = bfp.quantize_params({"w": jnp.asarray(X)}, "fp8_current")
    state = optimizer.init(params)
    for _ in range(3):
        params, state = step(params, state, {"w": jnp.ones(X.shape)})
