"""JAX's code of the CUDA path: dense, aligned and grouped products, with kernels that the definition carries out."""

from functools import partial, wraps

import emulated_cuda_in_jax
import emulated_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, ops
from blockfp.jax_backend.linear import grouped

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.recipes import Cast

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


RAGGED = ("fp8_current", "fp8_block", "fp8_row", "mxfp8", "nvfp4")
"""A recipe of each kind of scale."""


@pytest.mark.parametrize(
    ("recipe", "shape"), [*((name, (48, 96, 128)) for name in RECIPES), *((name, (40, 33, 50)) for name in RAGGED)]
)
def test_layers(recipe, shape):
    tokens, n, k = shape
    x, w, gradient = values((tokens, k), 0), values((n, k), 1) * 0.1, values((tokens, n), 2)
    assert_close_to_the_cpus(lambda x, w: bfp.linear(x, w, recipe=recipe, key=7), x, w, gradient)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu_tanh", False)])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_layers_behind_an_activation(recipe, activation, gated):
    x, w, gradient = values((64, 128), 0), values((96, 128), 1) * 0.1, values((64, 96), 2)
    up = values((64, 128), 3) if gated else None
    layer = partial(bfp.linear, recipe=recipe, key=7, activation=activation)
    assert_close_to_the_cpus(lambda x, w: layer(x, w, up=up), x, w, gradient)


def test_transposed_weights_are_the_librarys():
    """XLA would make them of all of a scan's layers before the loop."""
    w = bfp.quantize_params(values((3, 96, 128), 1) * 0.1, "fp8_current")
    x = values((48, 128), 0)

    def loss(w, x):
        return jax.lax.scan(lambda x, w: (bfp.linear(x, w, recipe="fp8_current")[:, :1] * x, None), x, w)[0].sum()

    wanted = jax.jit(bfp.grad(loss, (0, 1)))(w, x)
    with emulated_cuda_in_jax.launches():
        found = jax.block_until_ready(jax.jit(bfp.grad(loss, (0, 1)))(w, x))
        assert emulated_cuda_in_jax.calls.count("transpose") == 3
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0.05, atol=0.5)


@pytest.mark.parametrize("spoiled", [None, jnp.inf, jnp.nan])
def test_amaxes_of_large_arrays_are_found_as_they_are_made(spoiled, monkeypatch):
    x, w, gradient = values((48, 128), 0), values((2, 96, 128), 1) * 0.1, values((48, 96), 2)
    x = x if spoiled is None else x.at[7, 5].set(spoiled)
    optimizer, measures = bfp.adamw(1e-2), []

    def step(x, w):
        params = bfp.quantize_params(w, "fp8_current")
        y, back = jax.vjp(lambda x: bfp.linear(x * 2, jax.tree.map(lambda part: part[0], params), recipe="fp8_current"), x)
        updates, _ = optimizer.update(w, optimizer.init(params, w), params)
        return y, back(gradient), jax.tree.leaves(updates)

    @wraps(emulated_kernels.quantize)
    def quantize(*arguments):
        # Whether the kernel looks for the amax.
        measures.append(arguments[14])
        emulated_kernels.quantize(*arguments)

    made = []
    for cached in (ops._CACHED, 0):
        monkeypatch.setattr(ops, "_CACHED", cached)
        measures.clear()
        with emulated_cuda_in_jax.launches(quantize=quantize):
            made.append([np.asarray(each, np.float32) for each in jax.tree.leaves(jax.jit(step)(x, w))])
        assert len(measures) == 6
        assert set(measures) == {int(cached > 0)}
    jax.tree.map(np.testing.assert_array_equal, *made)


@pytest.mark.parametrize("activation", [None, "relu2"])
@pytest.mark.parametrize("scales", [(0.0, 0.0), (37.5, 100.0), (37.5, 0.0)])
def test_delayed_scaling_finds_amaxes_as_it_casts(scales, activation):
    """Also before its first update, where they make the scales; no pass is for an amax alone."""
    x, gradient = values((48, 128), 0), values((48, 96), 2)
    w = bfp.quantize_params(values((96, 128), 1) * 0.1, "fp8_delayed")
    state = bfp.DelayedState(jnp.zeros(4), jnp.float32(scales[0]), jnp.zeros(4), jnp.float32(scales[1]))

    def step(x, w, state):
        def loss(x, w, state):
            y, new = bfp.linear(x, w, recipe="fp8_delayed", state=state, activation=activation)
            return jnp.vdot(y, gradient, preferred_element_type=jnp.float32), (y, new)

        return bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, state)

    (_, (y, new)), (dx, dw, seen) = jax.jit(step)(x, w, state)
    with emulated_cuda_in_jax.launches():
        found = jax.block_until_ready(jax.jit(step)(x, w, state))
        assert emulated_cuda_in_jax.calls.count("quantize_gated") == (activation is not None)
        assert "amax" not in emulated_cuda_in_jax.calls
    (_, (found_y, found_new)), (found_dx, found_dw, found_seen) = found
    made = np.asarray(x, np.float32) if activation is None else np.maximum(np.asarray(x, np.float32), 0) ** 2
    assert found_new.input_amax_history[0] == np.abs(made).astype(jnp.bfloat16).max()
    assert found_seen.gradient_amax_history[0] == jnp.abs(gradient).max()
    for ours, theirs in zip(jax.tree.leaves((found_new, found_seen)), jax.tree.leaves((new, seen)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in ((found_y, y), (found_dx, dx), (found_dw, dw)):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 0.01 * np.linalg.norm(theirs)


SIZES = (150, 0, 37, 128)
TOKENS, IN, OUT = 340, 144, 80
ALL = [*(recipes.parse(name) for name in recipes.RECIPES if name != "fp8_row"), recipes.mxfp8(exact_products=True)]
ALL += [
    recipes.qat("nvfp4_16x16", "mxfp8_e4m3"),
    recipes.mxfp8().replace(name="weights in rows", weight=Cast("mxfp8_e4m3")),
    recipes.mxfp8().replace(name="weights across", weight=Cast(None), weight_columnwise=Cast("mxfp8_e4m3")),
    recipes.fp8_current().replace(name="blocks beside one scale", weight=Cast("fp8_e4m3_128x128")),
]
"""A scale for each row has no columns of groups."""


@pytest.mark.parametrize("recipe", ALL, ids=[f"{recipe}{' exact' * recipe.exact_products}" for recipe in ALL])
def test_layers_of_groups(recipe):
    """One of four groups has no rows, and behind the last there are rows of none."""
    x, g = values((TOKENS, IN), 0), values((TOKENS, OUT), 1)
    w, bias = values((len(SIZES), OUT, IN), 2), values((len(SIZES), OUT), 3)
    w = bfp.quantize_params(w, recipe) if recipe.weight.format else w
    state = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(100)) if recipe.delayed else None

    def run(x, w):
        def loss(x, w):
            y = bfp.grouped_linear(x, w, jnp.asarray(SIZES), bias, recipe=recipe, key=7, state=state)
            y = y if state is None else y[0]
            return (y.astype(jnp.float32) * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *gradients

    wanted = jax.jit(run)(x, w)
    with emulated_cuda_in_jax.launches():
        got = jax.block_until_ready(jax.jit(run)(x, w))
        assert "group_rows" in emulated_cuda_in_jax.calls
    for a, b in zip(got, wanted, strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        assert np.isfinite(a).all()
        # bfloat16, of sums in another order; shifted codes.
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=2e-4 * np.abs(b).max())
    assert not np.asarray(got[0], np.float32)[sum(SIZES) :].any()
    assert not np.asarray(got[2], np.float32)[1].any()


def step(recipe, shape=(40, 72, 24), spread=0.0):
    tokens, inside, outside = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, inside)) * jnp.exp(spread * jax.random.normal(keys[2], (inside,)))
    w = jax.random.normal(keys[1], (outside, inside))
    y, back = jax.vjp(lambda x, w: bfp.linear(x, w, recipe=recipe), x, w)
    return [np.asarray(each) for each in (y, *back(jnp.ones_like(y)))]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_all_products_of_a_layer_unless_exact_ones_are_asked_for(name):
    shape = (5, 33, 7)
    with emulated_cuda_in_jax.launches():
        got = step(name, shape, spread=3.0)
        # Of the forward, dgrad and wgrad.
        assert emulated_cuda_in_jax.calls.count("product") == 3
        emulated_cuda_in_jax.calls.clear()
        exact = step(recipes.RECIPES[name](exact_products=True), shape, spread=3.0)
        assert set(emulated_cuda_in_jax.calls) == {"quantize", "transpose", "dequantize"}
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-17 * 33 * 4 * np.abs(y).max())


def test_groups_that_run_one_by_one_take_the_same_route(monkeypatch):
    sizes = jnp.array([5, 0, 11], jnp.int32)
    x, w = jax.random.normal(jax.random.key(0), (16, 64)), jax.random.normal(jax.random.key(1), (3, 32, 64))
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)
    with emulated_cuda_in_jax.launches():
        y = bfp.grouped_linear(x, w, sizes, recipe="mxfp8")
        assert "product" in emulated_cuda_in_jax.calls
        assert "group_rows" not in emulated_cuda_in_jax.calls
    exact = bfp.grouped_linear(x, w, sizes, recipe=recipes.mxfp8(exact_products=True))
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-3)


def test_without_the_library_products_are_exact(monkeypatch):
    monkeypatch.setattr(choice, "missing_product", lambda version: "not installed")
    with emulated_cuda_in_jax.launches():
        step("mxfp8")
        assert "product" not in emulated_cuda_in_jax.calls
