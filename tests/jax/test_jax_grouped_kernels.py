"""`grouped_linear` as it calls the CUDA library, whose part NumPy plays here: with garbage wherever kernels write nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import cuda
from blockfp.jax_backend.linear import grouped, grouped_codes, grouped_products

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import alignment, groups, layout, numerics, rotation
from blockfp.definition.numerics import Quantized
from blockfp.recipes import Cast

SIZES = (150, 0, 37, 128)
TOKENS, IN, OUT = 340, 144, 80
KEY = np.array([1, 2], np.uint32)


def played_rows(ends, tokens):
    return jnp.asarray(ends, jnp.int32)


def played_quantize(x, words, keys, multiplier, *, format, count, eps, rows, columns, keyed=(False, False), rotate=False):
    def on_host(columnwise):
        def run(x, ends, keys, multiplier):
            x, ends = np.asarray(x), [int(end) for end in ends]
            options = {"keys": np.asarray(keys)[:, int(columnwise)].astype(np.int64)} if keyed[columnwise] else {}
            if rotate and columnwise:
                options["turn"] = rotation.rotate
            if multiplier is not None:
                options["multiplier"] = np.asarray(multiplier).reshape(1, 1)
            parts = groups.quantize_groups(x, ends, format, columnwise=columnwise, eps=eps, **options)
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

    return on_host(False) if rows else None, on_host(True) if columns else None


def played_align(x, format, columns, *, turned=False):
    if turned:
        rows, columns = columns, x.codes.shape[-2]
        x = numerics.transpose(x.codes, x.scales, format, columns=rows)
    made = alignment.align(x[0], x[1], format, columns=columns)

    def filled(x, to):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % to)])

    return Quantized(filled(made.codes, 16), filled(made.scales.swapaxes(-1, -2), 4), None)


def played_transpose(codes, format, columns):
    width = format.element.bits
    return layout.pack(layout.unpack(codes, width, columns).swapaxes(-1, -2), width)


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
        monkeypatch.setattr(module, "on_device", lambda kernel, definition, *operands: kernel(*operands))
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
