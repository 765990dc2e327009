"""MX products on FP8 matrix units, with the library's functions carried out by the definition: what is asked of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.linear import products

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import alignment, numerics
from blockfp.formats import FORMATS
from blockfp.kernels import routes
from blockfp.kernels.calls import format_numbers

ELEMENT = {0: "fp8_e4m3_1x128", 1: "fp8_e5m2_1x128"}


def align(out, codes, scales, *, element, block_rows, columns, turned):
    assert not turned
    format = next(f for f in FORMATS if f.scale.e8m0 and format_numbers(f)[:2] == (element, block_rows))
    (rows, wide), (groups, long) = out[0].shape, out[1].shape
    assert (wide, long, groups) == (-(-columns // 16) * 16, -(-rows // 4) * 4, -(-columns // 128))

    def run(codes, scales):
        made = alignment.align(np.asarray(codes), np.asarray(scales), format, columns=int(columns))
        # What is behind the rows is nobody's.
        powers = np.pad(made.scales.T, ((0, 0), (0, long - rows)), constant_values=np.nan)
        return np.pad(made.codes, ((0, 0), (0, wide - columns))), powers

    return jax.pure_callback(run, tuple(out), codes, scales)


def product(outs, a, b, a_scales, b_scales, ends, bias, **numbers):
    out, workspace = outs
    wanted = {"a_block_rows": 1, "a_ordered": 1, "b_ordered": 1, "own": 1, "accumulate": 0}
    assert (ends.size, bias.size, workspace.shape) == (0, 0, (0,))
    assert {name: numbers[name] for name in wanted} == wanted
    assert numbers["b_block_rows"] in (1, 32)

    def values(codes, scales, element):
        of_rows = np.ascontiguousarray(np.asarray(scales)[:, : codes.shape[0]].T)
        return numerics.dequantize(np.asarray(codes), of_rows, None, ELEMENT[element], "float32", columns=codes.shape[1])

    def run(a, b, a_scales, b_scales):
        return (values(a, a_scales, numbers["a_element"]) @ values(b, b_scales, numbers["b_element"]).T).astype(out.dtype)

    return jax.pure_callback(run, out, a, b, a_scales, b_scales), jnp.zeros(0, jnp.uint8)


@pytest.fixture
def library(monkeypatch):
    """Routes of a Hopper GPU on this CPU; a list of the functions that were called."""
    called = []

    def call(name, out, *arrays, **attributes):
        called.append(name)
        assert set(attributes) == set(cuda._ATTRIBUTES[name])
        return {"align": align, "product": product}[name](out, *arrays, **attributes)

    def hopper(a, b, *, platform, capability=None, exact=False, **sizes):
        chosen = routes.route(a, b, platform="cuda", capability=(9, 0), exact=exact, **sizes)
        return chosen if chosen.mode == "aligned" else routes.route(a, b, platform="cpu")

    monkeypatch.setattr(cuda, "_call", call)
    monkeypatch.setattr(cuda, "cublas_version", lambda: 0)
    monkeypatch.setattr(products, "route", hopper)
    monkeypatch.setattr(products, "capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "missing_product", lambda version: None)
    return called


def step(recipe, shape=(40, 72, 24), spread=0.0):
    tokens, inside, outside = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, inside)) * jnp.exp(spread * jax.random.normal(keys[2], (inside,)))
    w = jax.random.normal(keys[1], (outside, inside))
    y, back = jax.vjp(lambda x, w: bfp.linear(x, w, recipe=recipe), x, w)
    return [np.asarray(each) for each in (y, *back(jnp.ones_like(y)))]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_all_products_of_a_layer_unless_exact_ones_are_asked_for(library, name):
    shape = (5, 33, 7)
    got = step(name, shape, spread=3.0)
    # Of the forward, dgrad and wgrad.
    assert library.count("product") >= 3
    library.clear()
    exact = step(recipes.RECIPES[name](exact_products=True), shape, spread=3.0)
    assert not library
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-17 * 33 * 4 * np.abs(y).max())


def test_groups_take_the_same_route(library):
    sizes = jnp.array([5, 0, 11], jnp.int32)
    x, w = jax.random.normal(jax.random.key(0), (16, 64)), jax.random.normal(jax.random.key(1), (3, 32, 64))
    y = bfp.grouped_linear(x, w, sizes, recipe="mxfp8")
    assert "product" in library
    exact = bfp.grouped_linear(x, w, sizes, recipe=recipes.mxfp8(exact_products=True))
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-3)


def test_without_the_library_products_are_exact(library, monkeypatch):
    monkeypatch.setattr(choice, "missing_product", lambda version: "not installed")
    step("mxfp8")
    assert not library
