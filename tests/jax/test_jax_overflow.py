"""An Inf or NaN of an input or a gradient shows in every element of the products it is in, whatever the recipe."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.recipes import RECIPES, parse

TOKENS, IN, OUT = 16, 32, 48


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))


def layer(recipe):
    if recipe == "fp8_delayed":
        state = bfp.delayed_state(recipe)
        return lambda x, w: bfp.linear(x, w, recipe=recipe, state=state)[0]
    return partial(bfp.linear, recipe=recipe, key=1 if parse(recipe).gradient.stochastic else None)


def products(f, x, w, g):
    y, pullback = jax.vjp(f, x, w)
    return y, *pullback(g)


def nowhere_finite(a):
    return not jnp.isfinite(a).any()


def check_linear(recipe, variant):
    x, w, g = arrays()
    run = variant(partial(products, layer(recipe)))
    # An operand in high precision keeps it in its row or column.
    casts, everywhere = recipes.parse(recipe), slice(None)
    reached = everywhere if casts.gradient.format else slice(3, 4)
    of_x = everywhere if casts.input_columnwise.format else (everywhere, 4)
    of_g = everywhere if casts.gradient_columnwise.format else 4
    for bad, (in_y, in_dw, in_dx, in_dw_of_g) in {
        -jnp.inf: (everywhere, of_x, reached, of_g),
        # A NaN has a NaN code, or its block a NaN scale: it shows in what depends on it.
        jnp.nan: (3, (everywhere, 4), 3, 4),
    }.items():
        y, dx, dw = run(x.at[3, 4].set(bad), w, g)
        assert nowhere_finite(y[in_y])
        assert nowhere_finite(dw[in_dw])
        chex.assert_tree_all_finite(dx)
        y, dx, dw = run(x, w, g.at[3, 4].set(bad))
        assert nowhere_finite(dx[in_dx])
        assert nowhere_finite(dw[in_dw_of_g])
        chex.assert_tree_all_finite(y)
    y, dx, dw = run(x, w.at[3, 4].set(jnp.inf), g)
    assert nowhere_finite(y)
    assert nowhere_finite(dx)
    chex.assert_tree_all_finite(dw)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe):
    check_linear(recipe, jax.jit)


class Linear(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_compiled_or_not(self):
        check_linear("fp8_current", self.variant)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype):
    x, w, g = arrays(dtype)
    run = jax.jit(partial(products, layer("mxfp8")))
    assert nowhere_finite(run(x.at[3, 4].set(jnp.inf), w, g)[2])
    assert all(map(nowhere_finite, run(x, w, g.at[3, 4].set(jnp.inf))[1:]))
    # The largest finite values are none of it.
    chex.assert_tree_all_finite(run(x, w, jnp.full_like(g, jnp.finfo(dtype).max).at[:, 1:].set(0))[0])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_grouped_linear(recipe):
    x, w, g = arrays()
    options = {"recipe": recipe, "key": 1 if recipe == "nvfp4" else None}
    if recipe == "fp8_delayed":
        options["state"] = bfp.delayed_state(recipe)
    w = jnp.stack([w, -w])

    @jax.jit
    def run(x, g):
        def f(x, w):
            y = bfp.grouped_linear(x, w, jnp.array([5, 7]), **options)
            return y[0] if recipe == "fp8_delayed" else y

        return products(f, x, w, g)

    y, dx, dw = run(x.at[3, 4].set(jnp.inf), g)
    assert nowhere_finite(y[:5])
    assert nowhere_finite(dw[0])
    chex.assert_tree_all_finite((dx, y[5:], dw[1]))
    y, dx, dw = run(x, g.at[8, 4].set(jnp.nan))
    assert nowhere_finite(dx[5:12])
    assert nowhere_finite(dw[1])
    chex.assert_tree_all_finite((y, dx[:5], dw[0]))
    # Rows beyond all groups are nobody's.
    chex.assert_tree_all_finite(run(x.at[14].set(jnp.inf), g))


def test_dot_general():
    x, w, g = arrays()
    product = partial(bfp.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), recipe="mxfp8")
    run = jax.jit(partial(products, product))
    assert all(map(nowhere_finite, run(x, w, g.at[3, 4].set(jnp.inf))[1:]))
    assert nowhere_finite(run(x.at[3, 4].set(jnp.inf), w, g)[2])


@pytest.mark.parametrize("recipe", [*RECIPES, "high_precision"])
def test_optax_skips_the_step(recipe):
    """`apply_if_finite` sees an Inf of the loss's cotangent: parameters stay, and the step is counted."""
    x, w, g = arrays()
    if recipe == "high_precision":
        f, params = lambda x, w: bfp.linear(x, w, recipe="mxfp8", compute="high_precision"), bfp.quantize_params(w, "mxfp8")
    else:
        f, params = layer(recipe), bfp.quantize_params(w, recipe)
    optimizer = bfp.with_masters(optax.apply_if_finite(optax.sgd(0.5), 3))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, scale):
        gradient = bfp.grad(lambda w: (f(x, w) * g * scale).sum())(params)
        updates, state = optimizer.update(gradient, state, params)
        return bfp.apply_updates(params, updates), state

    same, state = step(params, state, jnp.asarray([[jnp.inf]] + [[1.0]] * (TOKENS - 1)))
    chex.assert_trees_all_equal(same, params)
    assert int(state.inner.total_notfinite) == 1
    moved, state = step(params, state, jnp.ones((TOKENS, 1)))
    assert bool(state.inner.last_finite)
    assert (moved.codes != params.codes).any()
