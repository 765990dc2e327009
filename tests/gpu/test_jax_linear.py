"""JAX's linear layers on a GPU: recipes against the products of their operands, cuBLASLt's products, what XLA compiles."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operands import KEY, operand

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.kernels.products import BLOCK_SCALES
from blockfp.kernels.routes import Route
from blockfp.recipes import PRODUCTS, RECIPES

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from blockfp.jax_backend.implementations import choice
from blockfp.jax_backend.linear import products
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

# Sums of tensor cores: fp32 with 14 bits or more where they accumulate fast.
FAST, PRECISE = 2.0**-10, 2.0**-12
INPUT_SCALE, GRADIENT_SCALE = 60.0, 900.0


def values(shape, seed, scale=1.0, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def sizes(tokens=256, out=384, features=512, dtype="bfloat16"):
    """x, weight and gradient."""
    return (
        values((tokens, features), 0, dtype=dtype),
        values((out, features), 1, 0.1, dtype),
        values((tokens, out), 2, dtype=dtype),
    )


def assert_product(got, a, b, sums):
    """A product of float64 operands within `sums` of its terms' magnitudes and half a unit of its own dtype's last place."""
    value, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    unit = float(jnp.finfo(got.dtype).eps) / 2
    bound = sums * magnitude + 1.01 * unit * np.abs(value) + float(jnp.finfo(got.dtype).tiny)
    error = np.abs(np.asarray(got, np.float64) - value)
    assert got.shape == value.shape
    assert (error <= bound).all(), f"{(error / bound).max():.3} times the bound"


def run(recipe, x, w, g):
    """y, dx and dw of one step under jit."""
    recipe = recipes.parse(recipe)
    weight, state = bfp.quantize_params(w, recipe), None
    if recipe.delayed:
        scales = {"input_scale": jnp.float32(INPUT_SCALE), "gradient_scale": jnp.float32(GRADIENT_SCALE)}
        state = bfp.delayed_state(recipe)
        state = type(state)(**{name: scales.get(name, part) for name, part in vars(state).items()})
    (_, y), (dx, dw) = jax.jit(step, static_argnums=0)(recipe, x, weight, g, state)
    return y, dx, dw


def step(recipe, x, weight, g, state=None):
    def loss(x, weight):
        y = bfp.linear(x, weight, recipe=recipe, key=KEY, state=state)
        y = y if state is None else y[0]
        return jnp.vdot(y, g, preferred_element_type=jnp.float32), y

    return bfp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weight)


def check(recipe, x, w, g):
    recipe, arrays = recipes.parse(recipe), {"input": x, "weight": w, "gradient": g}
    # On several devices XLA multiplies, and chooses how it sums.
    gradients = PRECISE if jax.device_count() == 1 else FAST
    scales = {"input": np.float32(INPUT_SCALE), "gradient": np.float32(GRADIENT_SCALE)} if recipe.delayed else {}
    for got, (a, b), sums in zip(run(recipe, x, w, g), PRODUCTS.values(), (FAST, gradients, gradients), strict=True):
        assert_product(got, *(operand(arrays[o[0]], recipe, *o, scales.get(o[0])) for o in (a, b)), sums)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products(recipe):
    check(recipe, *sizes())


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(recipe, dtype):
    check(recipe, *sizes(dtype=dtype))


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("shape", [(144, 48, 80), (77, 33, 50), (1, 16, 16), (400, 256, 144)])
def test_ragged_shapes(recipe, shape):
    check(recipe, *sizes(*shape))


def test_eps_and_no_tokens():
    for recipe in (recipes.fp8_current(eps=2.0**-4), recipes.fp8_block(eps=2.0**-4)):
        x, w, g = sizes(64, 48, 160)
        y, dx, dw = run(recipe, x * 2**-9, w, g)
        q = numerics.quantize(np.asarray(x * 2**-9), recipe.input.format, eps=recipe.eps)
        a = numerics.dequantize(*q, recipe.input.format, "float32", columns=160).astype(np.float64)
        assert_product(y, a, operand(w, recipe, "weight", "rowwise"), FAST)
        y, dx, dw = run(recipe, x[:0], w, g[:0])
        assert (y.shape, dx.shape, float(jnp.abs(dw).max())) == ((0, 48), (0, 160), 0.0)


def needs_library():
    missing = choice.missing_product(products.least_cublas(BLOCK_SCALES))
    if missing:
        pytest.skip(missing)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e4m3_pow2"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
        ("fp8_e4m3_128x128_fp32", "fp8_e4m3_1x128_fp32"),
        ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ],
)
@pytest.mark.parametrize("shape", [(256, 384, 512), (4, 16, 144), (132, 272, 1040)])
def test_the_library_multiplies_as_the_values_do(a, b, shape):
    needs_library()
    m, n, k = shape
    rows = jnp.exp2(jnp.arange(m) % 7 - 3.0)[:, None]
    left, right = bfp.quantize(values((m, k), 3, dtype="float32") * rows, a), bfp.quantize(values((n, k), 4), b)
    exact = [np.asarray(q.dequantize("float32"), np.float64) for q in (left, right)]
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(partial(products._by_library, dtype=dtype, fast=False))(left, right, None)
        assert_product(got, *exact, PRECISE)
    for bias_dtype in ("float32", "bfloat16"):
        # Added to the sums by the kernel, whatever its dtype.
        bias = values((1, n), 5, dtype=bias_dtype)[0]
        added = jax.jit(partial(products._by_library, dtype=jnp.float32, fast=False))(left, right, bias)
        terms = [np.c_[exact[0], np.ones(m)], np.c_[exact[1], np.asarray(bias, np.float64)]]
        assert_product(added, *terms, PRECISE)
    other = products._dequantized(left, right, None, jnp.float32, Route("dequantize", "float32", False, ""), False)
    assert_product(other, *exact, PRECISE)


@pytest.mark.parametrize(
    ("a", "b"), [("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("fp8_e4m3_128x128", "fp8_e5m2_1x128")]
)
@pytest.mark.parametrize("shape", [(77, 33, 41), (3, 200, 520)])
def test_hopper_multiplies_any_lengths(a, b, shape):
    needs_library()
    if products.capability() != (9, 0):
        pytest.skip("Hopper's kernel")
    m, n, k = shape
    left, right = bfp.quantize(values((m, k), 3, dtype="float32"), a), bfp.quantize(values((n, k), 4), b)
    exact = [np.asarray(q.dequantize("float32"), np.float64) for q in (left, right)]
    lowered = jax.jit(partial(products.product, dtype=jnp.float32, fast=False)).lower(left, right)
    assert "blockfp_product" in lowered.as_text()
    assert_product(lowered.compile()(left, right), *exact, PRECISE)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("relu2", True)])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_a_layer_makes_its_input(recipe, activation, gated):
    """Beside the layer of what XLA makes, whose roundings may fall otherwise here and there."""
    needs_library()
    x, w, _ = sizes()
    up = values(x.shape, 5) if gated else None
    function = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=False), "relu2": lambda x: jax.nn.relu(x) ** 2}

    def apart(x, up):
        made = function[activation](x.astype(jnp.float32)).astype(x.dtype)
        return bfp.linear(made if up is None else made * up, w, recipe=recipe, key=KEY).astype(jnp.float32)

    def together(x, up):
        return bfp.linear(x, w, recipe=recipe, key=KEY, activation=activation, up=up).astype(jnp.float32)

    lowered = jax.jit(together).lower(x, up)
    assert "blockfp_quantize_gated" in lowered.as_text()
    y, wanted = lowered.compile()(x, up), jax.jit(apart)(x, up)
    assert jnp.linalg.norm(y - wanted) <= 0.02 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize("activation", [None, "relu2"])
@pytest.mark.parametrize("scale", [0.0, INPUT_SCALE])
def test_delayed_scaling_finds_amaxes_as_it_casts(scale, activation):
    needs_library()
    x, w, g = sizes()
    weight, state = bfp.quantize_params(w, "fp8_delayed"), bfp.delayed_state("fp8_delayed")
    state = replace(state, input_scale=jnp.float32(scale), gradient_scale=jnp.float32(scale))

    def run(x, weight, state):
        def loss(weight, state):
            y, new = bfp.linear(x, weight, recipe="fp8_delayed", state=state, activation=activation)
            return jnp.vdot(y, g, preferred_element_type=jnp.float32), (y, new)

        return bfp.value_and_grad(loss, (0, 1), has_aux=True)(weight, state)

    compiled = jax.jit(run).lower(x, weight, state).compile()
    assert "blockfp_amax" not in compiled.as_text()
    assert ("blockfp_quantize_gated" in compiled.as_text()) == (activation is not None)
    (_, (y, new)), (_, seen) = compiled(x, weight, state)
    a = np.asarray(x) if activation is None else (np.maximum(np.asarray(x, np.float32), 0) ** 2).astype(jnp.bfloat16)
    assert new.input_amax_history[0] == np.abs(a).max()
    assert seen.gradient_amax_history[0] == np.abs(np.asarray(g)).max()
    recipe = recipes.parse("fp8_delayed" if scale else "fp8_current")
    scales = (np.float32(scale),) if scale else ()
    assert_product(y, operand(a, recipe, "input", "rowwise", *scales), operand(w, recipe, "weight", "rowwise"), FAST)


@pytest.mark.parametrize(("recipe", "count"), [("fp8_current", 3), ("fp8_delayed", 3), ("fp8_block", 3), ("mxfp8", 3)])
def test_codes_go_to_the_matrix_units(recipe, count):
    needs_library()
    if products.capability()[0] != 9:
        pytest.skip("Hopper's table")
    x, w, g = sizes()
    state = bfp.delayed_state(recipe) if recipe == "fp8_delayed" else None
    compiled = jax.jit(partial(step, recipe)).lower(x, bfp.quantize_params(w, recipe), g, state).compile()
    assert len(re.findall(r'custom_call_target="blockfp_product(?:_by_cublas)?"', compiled.as_text())) == count


def test_without_cublas_xla_gets_real_fp8(monkeypatch):
    """Per tensor; its own search may prefer Triton's kernel, so that is left out."""
    monkeypatch.setattr(choice, "missing_product", lambda version: "a test takes it away")
    x, w, g = sizes()
    lowered = jax.jit(partial(step, "fp8_current")).lower(x, bfp.quantize_params(w, "fp8_current"), g)
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', compiled.as_text())) == 3
    check("fp8_current", x, w, g)
    check("fp8_block", x, w, g)


one_device = pytest.mark.skipif(jax.device_count() > 1, reason="outside of shard_map XLA may have to split the product")


@one_device
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "nvfp4"])
def test_transformations(recipe):
    x, w, _ = sizes(64, 48, 160)
    stack = jnp.stack([x, x * 3])
    weight = bfp.quantize_params(w, recipe)
    one = jax.jit(partial(bfp.linear, recipe=recipe, key=KEY))
    each = jnp.stack([one(x, weight) for x in stack])
    mapped = jax.jit(jax.vmap(partial(bfp.linear, recipe=recipe, key=KEY), in_axes=(0, None)))(stack, weight)
    np.testing.assert_array_equal(mapped, each)
    scanned = jax.jit(lambda stack: jax.lax.scan(lambda _, x: (None, jax.checkpoint(one)(x, weight)), None, stack)[1])(stack)
    np.testing.assert_array_equal(scanned, each)


@one_device
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_shard_map(recipe):
    """JAX keeps account of the axes that values vary over, which kernels say nothing about."""
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    x, w, g = sizes()
    weight = bfp.quantize_params(w, recipe)
    placed = bfp.shard_params(weight, mesh, P("fsdp"))
    state = bfp.delayed_state(recipe) if recipe == "fp8_delayed" else None

    def gradients(weight, x, g, **options):
        def loss(weight, x):
            y = bfp.linear(x, weight, recipe=recipe, key=KEY, state=state, **options)
            return jnp.vdot(y if state is None else y[0], g, preferred_element_type=jnp.float32)

        return bfp.grad(loss, (0, 1))(weight, x)

    body, cut = partial(gradients, data_axes=("fsdp",)), P("fsdp")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(bfp.partition_specs(placed), cut, cut), out_specs=(cut, cut))
    if recipes.parse(recipe).gradient.stochastic:
        jax.block_until_ready(jax.jit(mapped)(placed, x, g))  # The rank is folded into its key.
        return
    for a, b in zip(jax.jit(mapped)(placed, x, g), jax.jit(gradients)(weight, x, g), strict=True):
        np.testing.assert_array_equal(a, b)
