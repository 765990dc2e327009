"""`grouped_linear` on a GPU: each group is the `linear` of its rows, whatever kernels and products carry either out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition.rounding import gradient_key
from blockfp.recipes import RECIPES

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
operands = pytest.importorskip("blockfp.jax_backend.linear.operands")

SIZES = (150, 0, 70, 131)
TOKENS, IN, OUT = 384, 256, 384
KEY = np.array([1, 2], np.uint32)
# Of the norm: tensor cores that accumulate fast add in fp32 with 14 bits or more.
NEAR = 2.0**-9


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_group_is_a_layer_of_its_own(recipe, monkeypatch):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), "bfloat16") for size in (IN, OUT))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), "bfloat16"), recipe)
    state = None
    if recipes.parse(recipe).delayed:
        state = bfp.DelayedState(jnp.zeros(4), jnp.float32(60), jnp.zeros(4), jnp.float32(900))

    def run(layer, x, q, g, *sizes):
        def loss(x, q):
            y = layer(x, q, *sizes, recipe=recipe, key=KEY, state=state)
            y, new = (y, None) if state is None else y
            return (y * g).sum().astype(jnp.float32), (y, new)

        (_, (y, new)), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, q)
        return y, *gradients, new

    y, dx, dw, new = jax.jit(lambda *arrays: run(bfp.grouped_linear, *arrays))(x, q, g, jnp.asarray(SIZES))
    for i in (0, 2, 3):
        rows = slice(sum(SIZES[:i]), sum(SIZES[: i + 1]))
        # A layer without groups folds no group's number in.
        monkeypatch.setattr(operands, "gradient_key", lambda key, way, coordinate, i=i: gradient_key(key, way, coordinate, i))
        own = jax.tree.map(lambda leaf, i=i: leaf[i], q)
        *wants, _ = jax.jit(lambda *arrays: run(bfp.linear, *arrays))(x[rows], own, g[rows])
        for got, want in zip((y[rows], dx[rows], dw[i]), wants, strict=True):
            got, want = (np.asarray(a, np.float64) for a in (got, want))
            assert np.linalg.norm(got - want) <= NEAR * np.linalg.norm(want)
    assert not jnp.any(y[sum(SIZES) :])
    if new is not None:
        assert new.input_amax_history[0] == jnp.abs(x[: sum(SIZES)]).max().astype(jnp.float32)
