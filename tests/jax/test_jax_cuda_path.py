"""JAX's code of the CUDA path: dense, aligned and grouped products, with kernels that the definition carries out."""

import math
from functools import partial

import emulated_cuda_in_jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.linear import grouped, grouped_codes, grouped_products, operands, products

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import alignment, groups, layout, numerics, rotation
from blockfp.definition.numerics import Quantized
from blockfp.formats import FORMATS
from blockfp.kernels import calls, routes
from blockfp.kernels.calls import format_numbers
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


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_row"])
def test_layers_of_groups(recipe):
    """One of four experts has no rows. (A scale for each row has no columns of groups.)"""
    x, w, gradient = values((60, 64), 0), values((4, 96, 64), 1) * 0.1, values((60, 96), 2)
    counts = jnp.array([20, 0, 9, 31], jnp.int32)
    assert_close_to_the_cpus(lambda x, w: bfp.grouped_linear(x, w, counts, recipe=recipe, key=7), x, w, gradient)


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


def quantize_aligned(out, x, *, element, block_rows, block_columns, rule):
    format = next(f for f in FORMATS if format_numbers(f) == (element, block_rows, block_columns, rule))
    (recorded, *both), stored = out[:5], out[5:]
    assert recorded.shape == (1,)
    assert not any(map(math.prod, [one.shape for one in stored]))

    def run(x):
        made = [jnp.zeros(1, jnp.int32)]
        for turned, codes in ((x, both[0]), (x.T, both[2])):
            q = numerics.quantize(np.ascontiguousarray(turned), format)
            one = alignment.align(q.codes, q.scales, format, columns=turned.shape[1])
            made.append(np.pad(one.codes, ((0, 0), (0, codes.shape[1] - turned.shape[1]))))
            made.append(np.pad(one.scales.T, ((0, 0), (0, -turned.shape[0] % 4)), constant_values=np.nan))
        return *made, *(np.zeros(one.shape, one.dtype) for one in stored)

    return jax.pure_callback(lambda x: run(np.asarray(x)), tuple(out), x)


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
        assert set(attributes) == set(calls.SIGNATURES[name][1])
        return {"align": align, "product": product, "quantize_aligned": quantize_aligned}[name](out, *arrays, **attributes)

    def hopper(a, b, *, platform, capability=None, exact=False, **sizes):
        chosen = routes.route(a, b, platform="cuda", capability=(9, 0), exact=exact, **sizes)
        return chosen if chosen.mode == "aligned" else routes.route(a, b, platform="cpu")

    monkeypatch.setattr(cuda, "_call", call)
    monkeypatch.setattr(cuda, "cublas_version", lambda: 0)
    monkeypatch.setattr(products, "route", hopper)
    monkeypatch.setattr(products, "capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "missing_product", lambda version: None)
    monkeypatch.setattr(operands.explicit, "on_device", lambda kernel, definition, *arrays: kernel(*arrays))
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


SIZES = (150, 0, 37, 128)
TOKENS, IN, OUT = 340, 144, 80
KEY = np.array([1, 2], np.uint32)


def played_rows(ends, tokens):
    return jnp.asarray(ends, jnp.int32)


def played_quantize(x, words, keys, multiplier, cast, count):
    format = cast.format

    def made(columnwise):
        def run(x, ends, keys, multiplier):
            x, ends = np.asarray(x), [int(end) for end in ends]
            options = {"keys": np.asarray(keys)[:, int(columnwise)].astype(np.int64)} if cast.random[columnwise] else {}
            if cast.rotate and columnwise:
                options["turn"] = rotation.rotate
            if multiplier is not None:
                options["multiplier"] = np.asarray(multiplier).reshape(1, 1)
            parts = groups.quantize_groups(x, ends, format, columnwise=columnwise, eps=cast.eps, **options)
            last = list(groups.groups_of(ends, x.shape[0]))[-1]
            codes, scales, tensor_scale = (None if part is None else np.array(part) for part in parts)
            nan = np.nan if scales.dtype == np.float32 else 0xFF
            along = groups.UNIT if format.block is None else groups.UNIT // format.block[1]
            if columnwise:
                codes[:, layout.packed_columns(last.end_column, format.element.bits) :] = 0x7F
                if groups.ordered(format):
                    scales[last.end_column // groups.UNIT :] = nan
                elif format.block is not None:
                    scales[:, last.end_column // groups.UNIT * along :] = nan
            else:
                codes[last.end :] = 0x7F
            empty = np.diff([0, *ends]) == 0
            if format.block is None:
                scales[empty] = nan
            if tensor_scale is not None:
                tensor_scale[empty] = np.nan
            return [part for part in (codes, scales, tensor_scale) if part is not None]

        found = groups.shapes(x.shape, count, format, columnwise=columnwise)
        like = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in found]
        parts = jax.pure_callback(run, like, x, words, keys, multiplier)
        return Quantized(*parts, *[None] * (3 - len(parts)))

    return made(False) if cast.row else None, made(True) if cast.column else None


def on_host(function, *arrays):
    """A function of NumPy arrays, called by the program: none of it is traced and compiled."""
    like = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in function(*(np.zeros(x.shape, x.dtype) for x in arrays))]
    return jax.pure_callback(lambda *given: function(*map(np.asarray, given)), like, *arrays)


def played_align(x, format, columns, *, turned=False):
    def run(codes, scales):
        length = columns
        if turned:
            length = codes.shape[-2]
            codes, scales = numerics.transpose(codes, scales, format, columns=columns)
        made = alignment.align(codes, scales, format, columns=length)
        return filled(made.codes, 16), filled(made.scales.swapaxes(-1, -2), 4)

    def filled(x, to):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % to)])

    return Quantized(*on_host(run, x.codes, x.scales), None)


def played_transpose(codes, format, columns):
    width = format.element.bits
    (found,) = on_host(lambda x: [layout.pack(layout.unpack(x, width, columns).swapaxes(-1, -2), width)], codes)
    return found


def played_product(a, b, formats, ends, dtype, *, bias=None, capability, along_k=False, fast=False, ordered=False, bands=False):
    assert bias is None or not along_k

    def values(side, i, group=None):
        codes, scales = side
        if formats is None:
            assert codes.dtype == jnp.bfloat16
            return codes.astype(np.float32), scales[group if scales.size > 1 else 0]
        if formats[i].block is None:
            scale = np.ones((1, 1), np.float32)
            found = numerics.dequantize(codes, scale, None, formats[i], "float32", columns=codes.shape[-1])
            return found, scales[group if scales.size > 1 else 0]
        if formats[i].block == (1, 128) and (i == 0 or ordered or along_k):
            scales = scales.T[: codes.shape[0]]
        return numerics.dequantize(codes, scales, None, formats[i], "float32", columns=codes.shape[-1]), np.float32(1)

    def run(a, b, ends, bias):
        (a, b), ends = (tuple(np.asarray(part) for part in side) for side in (a, b)), np.asarray(ends)
        (m, _), n = a[0].shape, b[0].shape[-2]
        out = np.full((len(ends), m, n) if along_k else (m, n), np.nan, np.float32)
        for group in groups.groups_of([int(end) for end in ends], TOKENS):
            if along_k:
                (left, by), (right, with_) = values(a, 0, group.number), values(b, 1, group.number)
                columns = slice(group.first_column, group.end_column)
                out[group.number] = left[:, columns] @ right[:, columns].T * by * with_
            else:
                own = b[0][group.number], b[1] if b[1].ndim == 1 else b[1][group.number]
                (left, by), (right, with_) = values(a, 0, group.number), values(own, 1, group.number)
                added = 0 if bias is None else np.asarray(bias[group.number], np.float32)
                out[group.begin : group.end] = left[group.begin : group.end] @ right.T * by * with_ + added
        return out

    (m, _), n, count = a[0].shape, b[0].shape[-2], ends.shape[0]
    like = jax.ShapeDtypeStruct((count, m, n) if along_k else (m, n), jnp.float32)
    return jax.pure_callback(run, like, a, b, ends, bias).astype(dtype)


@pytest.fixture
def played(monkeypatch):
    for name, function in (
        *(("group_rows", played_rows), ("quantize_groups", played_quantize)),
        *(("align", played_align), ("transpose", played_transpose), ("multiply_groups", played_product)),
    ):
        monkeypatch.setattr(cuda, name, function)
    for module in (grouped_codes, grouped_products):
        monkeypatch.setattr(module.explicit, "on_device", lambda kernel, definition, *operands: kernel(*operands))
    monkeypatch.setattr(grouped_products, "capability", lambda: (9, 0))
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: True)
    jax.clear_caches()


ALL = [*(recipes.parse(name) for name in recipes.RECIPES if name != "fp8_row"), recipes.mxfp8(exact_products=True)]
ALL += [
    recipes.qat("nvfp4_16x16", "mxfp8_e4m3"),
    recipes.mxfp8().replace(name="weights in rows", weight=Cast("mxfp8_e4m3")),
    recipes.mxfp8().replace(name="weights across", weight=Cast(None), weight_columnwise=Cast("mxfp8_e4m3")),
    recipes.fp8_current().replace(name="blocks beside one scale", weight=Cast("fp8_e4m3_128x128")),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("recipe", ALL, ids=[f"{recipe}{' exact' * recipe.exact_products}" for recipe in ALL])
def test_the_layer_is_that_of_tiles(recipe, played, monkeypatch):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), jnp.bfloat16) for size in (IN, OUT))
    w = jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), jnp.bfloat16)
    w = bfp.quantize_params(w, recipe) if recipe.weight.format else w
    bias = jnp.asarray(rng.standard_normal((len(SIZES), OUT)), jnp.bfloat16)
    state = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(100)) if recipe.delayed else None

    def run(x, w):
        def loss(x, w):
            y = bfp.grouped_linear(x, w, jnp.asarray(SIZES), bias, recipe=recipe, key=KEY, state=state)
            y = y if state is None else y[0]
            return (y.astype(jnp.float32) * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *gradients

    got = jax.jit(run)(x, w)
    jax.clear_caches()
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)
    for a, b in zip(got, jax.jit(run)(x, w), strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        assert np.isfinite(a).all()
        # bfloat16, of sums in another order; shifted codes.
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=2e-4 * np.abs(b).max())
    assert not np.asarray(got[0], np.float32)[sum(SIZES) :].any()
    assert not np.asarray(got[2], np.float32)[1].any()
