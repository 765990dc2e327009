"""`linear` on one device: every recipe's operands in all three products, under JAX's transformations, and bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operands import KEY, operand
from samples import sample

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.recipes import PRODUCTS, RECIPES, Cast

TOKENS, IN, OUT = 24, 80, 48


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    x *= np.exp2(rng.integers(-4, 4, (TOKENS, 1)))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, g, rng.standard_normal(OUT)))


def expected(arrays, recipe, multiplier=None):
    """y, dx and dw by the definition, and products in float64."""
    recipe = recipes.parse(recipe)
    values = dict(zip(("input", "weight", "gradient"), arrays, strict=False))
    results = []
    for a, b in PRODUCTS.values():
        scales = [None if multiplier is None or o[0] == "weight" else multiplier for o in (a, b)]
        left, right = (operand(values[o[0]], recipe, *o, s) for o, s in zip((a, b), scales, strict=True))
        results.append(left @ right.T)
    return results


def run(arrays, recipe, weight=None, transform=lambda f: f, **options):
    x, w, g, b = arrays
    weight = bfp.quantize_params(w, recipe) if weight is None else weight

    def loss(x, w, b):
        y = transform(partial(bfp.linear, recipe=recipe, key=KEY, **options))(x, w, b)
        return (y * g).sum(), y

    (_, y), grads = jax.jit(bfp.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weight, b)
    return y, *grads


def assert_close(got, want, tolerance=2e-6):
    """Equal but for the order of fp32 sums, relative to the largest entry."""
    want = np.asarray(want, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


# Delayed scaling has a state, and a test of its own.
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_delayed"])
def test_all_three_products(arrays, recipe):
    y, dx, dw, db = run(arrays, recipe)
    want_y, want_dx, want_dw = expected(arrays, recipe)
    assert_close(y, want_y + np.asarray(arrays[3]))
    assert_close(dx, want_dx)
    assert_close(dw, want_dw)
    assert_close(db, np.asarray(arrays[2]).sum(0))


def test_a_weight_in_high_precision_is_quantized_at_its_use(arrays):
    for got, want in zip(run(arrays, "mxfp8", arrays[1]), run(arrays, "mxfp8"), strict=True):
        np.testing.assert_array_equal(got, want)


MIXED = {
    "no weight": recipes.mxfp8().replace(weight=Cast(None)),
    "1-D weight": recipes.mxfp8().replace(weight=Cast("mxfp8_e4m3")),
    "high precision backward": recipes.fp8_current().replace(gradient=Cast(None)),
    "another format backward": recipes.mxfp8().replace(gradient=Cast("nvfp4"), input_columnwise=Cast("fp8_e4m3")),
    "weight columnwise only": recipes.mxfp8().replace(weight=Cast(None), weight_columnwise=Cast("mxfp8_e4m3")),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_recipes(arrays, name):
    recipe = MIXED[name]
    y, dx, dw, _ = run(arrays, recipe, arrays[1] if recipe.weight.format is None else None)
    b = np.asarray(arrays[3], np.float64)
    of = lambda values, operand_name, direction: operand(np.asarray(values), recipe, operand_name, direction)  # noqa: E731
    weight = of(arrays[1], "weight", "rowwise")
    across = weight.T
    if name == "weight columnwise only":
        q = numerics.quantize(np.asarray(arrays[1]).T, "mxfp8_e4m3")
        across = numerics.dequantize(*q, "mxfp8_e4m3", "float32", columns=OUT).astype(np.float64)
    assert_close(y, of(arrays[0], "input", "rowwise") @ weight.T + b)
    assert_close(dx, of(arrays[2], "gradient", "rowwise") @ across.T)
    assert_close(dw, of(arrays[2], "gradient", "columnwise") @ of(arrays[0], "input", "columnwise").T)


def test_high_precision_compute_with_a_quantized_weight(arrays):
    x, _, g, b = (np.asarray(a, np.float64) for a in arrays)
    y, dx, dw, _ = run(arrays, "nvfp4", compute="high_precision")
    weight = operand(arrays[1], recipes.nvfp4(), "weight", "rowwise")
    assert_close(y, x @ weight.T + b)
    assert_close(dx, g @ weight)
    assert_close(dw, g.T @ x)


def test_leading_axes_are_tokens(arrays):
    x, w = arrays[:2]
    q = bfp.quantize_params(w, "mxfp8")
    both = [bfp.linear(a, q, recipe="mxfp8") for a in (x, x.reshape(2, 3, 4, IN))]
    np.testing.assert_array_equal(both[0], both[1].reshape(TOKENS, OUT))
    assert bfp.linear(x[0], q, recipe="mxfp8").shape == (OUT,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_arrays(arrays, dtype):
    x, w, g, b = (a.astype(dtype) for a in arrays)
    y, dx, dw, db = run((x, w, g, b), "fp8_block")
    assert {a.dtype for a in (y, dx, dw, db)} == {jnp.dtype(dtype)}
    want_y, want_dx, want_dw = expected((x, w, g), "fp8_block")
    assert_close(y, want_y + np.asarray(b, np.float64), 2.0**-7)
    assert_close(dx, want_dx, 2.0**-7)
    assert_close(dw, want_dw, 2.0**-7)


def test_an_overflown_float16_gradient_shows(arrays):
    x, w, g, b = (a.astype("float16") for a in arrays)
    _, dx, dw, _ = run((x, w, g.at[3, 4].set(jnp.inf), b), "fp8_current")
    assert jnp.isnan(dx).all()
    assert jnp.isnan(dw).all()


def test_checkpoint_changes_nothing(arrays):
    for got, want in zip(run(arrays, "mxfp8", transform=jax.checkpoint), run(arrays, "mxfp8"), strict=True):
        assert_close(got, want)


def test_vmap_and_scan_over_stacked_layers(arrays):
    x = arrays[0]
    w = jnp.stack([arrays[1][:, :OUT], arrays[1][:, 16 : 16 + OUT]])
    q = bfp.quantize_params(w, "fp8_current")

    def through(w):
        def body(x, w):
            return jnp.tanh(bfp.linear(x, w, recipe="fp8_current")), None

        return (jax.lax.scan(body, x[:, :OUT], w)[0] ** 2).sum()

    def one_by_one(layers):
        y = x[:, :OUT]
        for w in layers:
            y = jnp.tanh(bfp.linear(y, w, recipe="fp8_current"))
        return (y**2).sum()

    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], q) for i in range(2)]
    (value, gradient), (again, each) = jax.jit(bfp.value_and_grad(through))(q), jax.jit(bfp.value_and_grad(one_by_one))(layers)
    assert_close(value, again)
    assert_close(gradient, jnp.stack(each), 1e-5)
    stacked = jax.vmap(lambda w: bfp.linear(x[:, :OUT], w, recipe="fp8_current"))(q)
    assert_close(stacked[1], bfp.linear(x[:, :OUT], layers[1], recipe="fp8_current"))


@pytest.mark.optimized
def test_no_gradient_that_nobody_asked_for(arrays):
    x, w, g, _ = arrays
    q = bfp.quantize_params(w, "mxfp8")
    text = str(jax.make_jaxpr(jax.grad(lambda x: (bfp.linear(x, q, recipe="mxfp8") * g).sum()))(x))
    assert text.count("dot_general") == 2  # forward and dgrad: a weight without a tangent is frozen
    compiled = jax.jit(bfp.grad(lambda q: (bfp.linear(x, q, recipe="mxfp8") * g).sum())).lower(q).compile()
    assert f"f32[{TOKENS},{IN}] dot" not in compiled.as_text().replace("{1,0}", "")


def test_delayed_scaling(arrays):
    x, w, g = arrays[:3]
    recipe = recipes.fp8_delayed(history=2)
    q = bfp.quantize_params(w, recipe)
    state = bfp.delayed_state(recipe)

    @jax.jit
    def step(x, g, state):
        def loss(x, w, state):
            y, state = bfp.linear(x, w, recipe=recipe, state=state)
            return (y * g).sum(), (y, state)

        (_, (y, state)), (dx, dw, seen) = bfp.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, q, state)
        return y, dx, dw, bfp.update_scales(state, seen, recipe)

    y, dx, _, state = step(x, g, state)
    x_amax, g_amax = np.abs(x).max(), np.abs(g).max()
    assert_close(y, expected(arrays, recipe, np.float32(448) / x_amax)[0])
    np.testing.assert_array_equal(state.input_scale, np.float32(448) / x_amax)
    np.testing.assert_array_equal(state.gradient_scale, np.float32(57344) / g_amax)
    np.testing.assert_array_equal(state.input_amax_history, [0, x_amax])
    y, dx, dw, after = step(2 * x, g, state)
    scaled = lambda a, s, name: operand(a, recipe, name, "rowwise", np.asarray(s))  # noqa: E731
    weight = operand(w, recipe, "weight", "rowwise")
    assert_close(y, scaled(2 * x, state.input_scale, "input") @ weight.T)
    assert_close(dx, scaled(g, state.gradient_scale, "gradient") @ weight)
    assert_close(dw, scaled(g, state.gradient_scale, "gradient").T @ scaled(2 * x, state.input_scale, "input"))
    np.testing.assert_array_equal(after.input_scale, np.float32(448) / (2 * x_amax))


@pytest.mark.parametrize("jitted", [False, True])
def test_the_first_step_is_that_of_current_scaling(jitted, arrays):
    """Gradients of 1e-6 would be zeros by a scale of 1."""
    x, w, g = arrays[:3]
    q = bfp.quantize_params(w, "fp8_delayed")

    def gradients(x, w, g, state):
        def loss(x, w):
            y = bfp.linear(x, w, recipe="fp8_current" if state is None else "fp8_delayed", state=state)
            y = y if state is None else y[0]
            return (y * g).sum(), y

        (_, y), found = bfp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
        return y, *found

    run = jax.jit(gradients) if jitted else gradients
    found, wanted = (run(30 * x, q, 1e-6 * g, state) for state in (bfp.delayed_state("fp8_delayed"), None))
    for one, other in zip(found, wanted, strict=True):
        assert np.count_nonzero(one)
        np.testing.assert_array_equal(one, other)


def test_the_largest_gradient_of_several_uses_counts(arrays):
    x, w, g, _ = arrays
    q, state = bfp.quantize_params(w, "fp8_delayed"), bfp.delayed_state("fp8_delayed")

    def loss(state, factors):
        total = 0
        for factor in factors:
            y, state = bfp.linear(x, q, recipe="fp8_delayed", state=state)
            total += (y * g * factor).sum()
        return total

    for factors in ((3.0, 1.0), (1.0, 3.0)):
        seen = jax.grad(loss)(state, factors)
        np.testing.assert_array_equal(seen.gradient_amax_history[0], np.abs(3 * g).max())
        assert not jnp.any(seen.input_amax_history)


def test_states_of_stacked_layers(arrays):
    x, w, g, _ = arrays
    w = jnp.stack([w[:, :OUT], 2 * w[:, :OUT]])
    q = bfp.quantize_params(w, "fp8_delayed")
    states = jax.vmap(lambda _: bfp.delayed_state("fp8_delayed"))(jnp.arange(2))

    def loss(states):
        def body(x, layer):
            y, state = bfp.linear(x, layer[0], recipe="fp8_delayed", state=layer[1])
            return y, state

        y, states = jax.lax.scan(body, x[:, :OUT], (q, states))
        return (y * g).sum(), states

    (_, states), seen = jax.value_and_grad(loss, has_aux=True)(states)
    new = bfp.update_scales({"layers": states}, {"layers": seen}, "fp8_delayed")["layers"]
    assert new.input_scale.shape == (2,)
    np.testing.assert_array_equal(new.input_scale[0], np.float32(448) / np.abs(x[:, :OUT]).max())
    np.testing.assert_array_equal(new.gradient_scale[1], np.float32(57344) / np.abs(g).max())


def test_stochastic_rounding_takes_the_key(arrays):
    x, w, g, b = arrays
    recipe = recipes.mxfp8().replace(gradient=Cast("mxfp8_e4m3", stochastic=True))
    q = bfp.quantize_params(w, recipe)
    gradient = jax.jit(jax.grad(lambda x, key: (bfp.linear(x, q, b, recipe=recipe, key=key) * g).sum()))
    one, other = (gradient(x, jnp.asarray([0, seed], jnp.uint32)) for seed in (KEY, 8))
    assert (one != other).any()
    np.testing.assert_array_equal(gradient(x, jax.random.key(KEY)), one)
    assert_close(one, operand(g, recipe, "gradient", "rowwise") @ operand(w, recipe, "weight", "rowwise"))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("recipe 'mxfp9' is not known", {"recipe": "mxfp9"}),
        ("weight is in mxfp8_e4m3_32x32, and recipe nvfp4 wants nvfp4_16x16", {"recipe": "nvfp4", "key": 1}),
        ("recipe nvfp4 rounds gradients stochastically: pass a key", {"recipe": "nvfp4"}),
        ("recipe fp8_delayed scales by history: pass state", {"recipe": "fp8_delayed"}),
        ("has no state", {"state": bfp.delayed_state("fp8_delayed")}),
        ("in = 80", {"x": jnp.zeros((4, 81))}),
        (r"bias must have shape \(48,\)", {"bias": jnp.zeros(47)}),
        (r"bias must be a float array of shape \[out\]", {"bias": jnp.zeros((1, 48))}),
        ("compute must be", {"compute": "fast"}),
        ("mesh axis 'dp' is unknown here", {"data_axes": ("dp",)}),
        ("sequence = True needs a weight that a tensor-parallel axis cuts", {"sequence": True}),
        (r"weight must be \[out, in\]", {"weight": jnp.zeros((2, 48, 80))}),
    ],
)
def test_bad_values_at_trace_time(arrays, message, change):
    arguments = {"x": arrays[0], "weight": bfp.quantize_params(arrays[1], "mxfp8"), "recipe": "mxfp8"} | change
    static = {name: arguments.pop(name) for name in ("recipe", "compute", "data_axes", "sequence", "key") if name in arguments}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(bfp.linear, **static), **arguments)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("x must be float32, float16 or bfloat16, got int32", {"x": jnp.zeros((4, 80), jnp.int32)}),
        ("weight must be float32, float16 or bfloat16, got float8_e4m3fn", {"weight": jnp.zeros((4, 80), jnp.float8_e4m3fn)}),
        ("x must be an array in high precision, got QuantizedArray", {"x": bfp.quantize(jnp.zeros((4, 80)), "mxfp8_e4m3")}),
        ("weight must be an array or a QuantizedArray, got list", {"weight": [1.0]}),
        ("state must be a DelayedState, got int", {"state": 3, "recipe": "fp8_delayed"}),
    ],
)
def test_bad_types(arrays, message, change):
    arguments = {"x": arrays[0], "weight": bfp.quantize_params(arrays[1], "mxfp8"), "recipe": "mxfp8"} | change
    with pytest.raises(TypeError, match=message):
        bfp.linear(**arguments)


def test_every_kind_of_data_goes_through():
    w = jnp.asarray(sample("special", (OUT, IN)))
    for kind in ("special", "huge", "zeros", "subnormal"):
        x = jnp.asarray(sample(kind, (TOKENS, IN)))
        assert bfp.linear(x, bfp.quantize_params(w, "mxfp8"), recipe="mxfp8").shape == (TOKENS, OUT)
