"""y with a bias is rounded once: products of the operands' codes summed in float64, then the bias, then y's dtype."""

from functools import partial

import emulated_cuda_in_jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp
from blockfp import recipes

TOKENS, IN, OUT = 40, 256, 96
DTYPES = ["bfloat16", "float16", "float32"]


def arrays(dtype, groups=()):
    rng = np.random.default_rng(3)
    shapes = ((TOKENS, IN), (*groups, OUT, IN), (*groups, OUT))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def assert_rounded_once(y, x, w, bias, recipe):
    """|error| <= (K + 4) 2^-24 (sum |a||b| + |bias|), and half a unit in the last place of y's dtype."""
    cast = recipes.parse(recipe).input.format
    a = np.asarray(x if cast is None else bfp.quantize(x, cast).dequantize("float32"), np.float64)
    b = np.asarray(w.dequantize("float32") if isinstance(w, bfp.QuantizedArray) else w, np.float64)
    bias = np.asarray(bias, np.float64)
    exact = a @ b.T + bias
    sums = (IN + 4) * 2.0**-24 * (np.abs(a) @ np.abs(b).T + np.abs(bias))
    info = jnp.finfo(y.dtype)
    ulp = np.maximum(2.0 ** (np.floor(np.log2(np.abs(exact) + sums))) * float(info.eps), float(info.smallest_subnormal))
    excess = np.abs(np.asarray(y, np.float64) - exact) / (sums + ulp / 2)
    assert excess.max() <= 1, f"{excess.max():.3} times the bound, {np.mean(excess > 1):.0%} of y beyond it"


def everywhere(layer, *arrays):
    """Results of a layer: run at once, jitted, and beside its derivatives of both kinds."""
    yield layer(*arrays)
    yield jax.jit(layer)(*arrays)
    yield jax.vjp(layer, *arrays)[0]
    yield jax.jit(lambda *arrays: jax.vjp(layer, *arrays)[0])(*arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_linear(recipe, dtype):
    x, w, bias = arrays(dtype)
    q = bfp.quantize_params(w, recipe)
    for y in everywhere(lambda x, bias: bfp.linear(x, q, bias, recipe=recipe, key=1), x, bias):
        assert y.dtype == dtype
        assert_rounded_once(y, x, q, bias, recipe)


def test_of_a_bias_that_y_s_dtype_does_not_hold():
    x, w, _ = arrays("bfloat16")
    q, bias = bfp.quantize_params(w, "mxfp8"), jnp.asarray(np.random.default_rng(4).standard_normal(OUT), jnp.float32)
    for y in everywhere(lambda x, bias: bfp.linear(x, q, bias, recipe="mxfp8"), x, bias):
        assert_rounded_once(y, x, q, bias, "mxfp8")


def test_operands_in_high_precision():
    x, w, bias = arrays("bfloat16")
    q = bfp.quantize_params(w, "mxfp8")
    y = bfp.linear(x, q, bias, recipe="mxfp8", compute="high_precision")
    assert_rounded_once(y, x, q, bias, recipes.for_linear("mxfp8", "high_precision"))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_grouped_linear(recipe):
    sizes = (13, 0, 20)
    x, w, bias = arrays("bfloat16", (3,))
    q = bfp.quantize_params(w, recipe)
    layer = partial(bfp.grouped_linear, recipe=recipe, key=1)
    for y in everywhere(lambda x, bias: layer(x, q, jnp.asarray(sizes), bias), x, bias):
        first = 0
        for group, size in enumerate(sizes):
            rows, own = slice(first, first + size), jax.tree.map(lambda part, i=group: part[i], q)
            if size:
                assert_rounded_once(y[rows], x[rows], own, bias[group], recipe)
            first += size
        assert not y[first:].any()


def test_a_column_parallel_layer():
    x, w, bias = arrays("bfloat16")
    q = bfp.quantize_params(w, "mxfp8")
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    placed = bfp.shard_params(q, mesh, P("tp"))
    body = lambda x, w, bias: bfp.linear(x, w, bias, recipe="mxfp8")  # noqa: E731
    specs = (P(), bfp.partition_specs(placed), P("tp"))
    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "tp")))(x, placed, bias)
    assert_rounded_once(y, x, q, bias, "mxfp8")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_program_that_xla_splits(kind):
    x, w, bias = arrays("bfloat16")
    q = bfp.quantize_params(w, "mxfp8")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = jax.device_put(q, bfp.named_shardings(q, mesh, P("data")))
        tokens = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        y = jax.jit(lambda x, w, bias: bfp.linear(x, w, bias, recipe="mxfp8"))(tokens, placed, bias)
    assert_rounded_once(jax.device_get(y), x, q, bias, "mxfp8")


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_the_cuda_library_adds_it_to_its_sums(recipe, bias_dtype):
    """By the product's own epilogue where codes are multiplied: no pass more over y."""
    x, w, bias = arrays("bfloat16")
    q, bias = bfp.quantize_params(w, recipe), bias.astype(bias_dtype)
    with emulated_cuda_in_jax.launches():
        y = jax.block_until_ready(jax.jit(partial(bfp.linear, recipe=recipe, key=1))(x, q, bias))
        assert ("product" in emulated_cuda_in_jax.calls) == (recipe != "nvfp4")
    assert_rounded_once(y, x, q, bias, recipe)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_bias_is_no_matter_of_dx_and_dw(recipe, dtype):
    """Outside of jit y is the same differentiated or not, and dx and dw don't know of a bias."""
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((24, 96), (40, 96), (40,)))
    layer = partial(bfp.linear, recipe=recipe)
    _, pullback = jax.vjp(layer, x, w)
    y, with_bias = jax.vjp(layer, x, w, bias)
    assert np.array_equal(y, layer(x, w, bias))
    dx, dw, db = with_bias(y)
    assert all(map(np.array_equal, (dx, dw), pullback(y)))
    assert np.array_equal(db, jnp.sum(y, axis=0, dtype=jnp.float32).astype(dtype))
