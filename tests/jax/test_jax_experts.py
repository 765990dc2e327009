"""`dispatch` and `combine`: rows of codes to experts and back, on one rank and on eight, and their derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import blockfp
import blockfp.jax as bfp
from blockfp import recipes
from blockfp.recipes import Cast
from blockfp.sharding.experts import arrivals

EXPERTS, TOKENS, CHOICES, IN, OUT = 16, 6, 3, 80, 48
FP32_SCALES = recipes.fp8_block().replace(
    input=Cast("fp8_e4m3_1x128_fp32"), input_columnwise=Cast("fp8_e4m3_1x128_fp32"), name="fp32 scales"
)
SENT = ("mxfp8", "mxfp6", "mxfp4", "fp8_block", FP32_SCALES)


def mesh_of(ranks, name="expert"):
    return jax.make_mesh((ranks,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


@pytest.fixture(scope="module")
def arrays():
    """x, choices and weights of 8 ranks' tokens, g of the result, and the experts' weights."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((8 * TOKENS, IN)) * np.exp2(rng.integers(-3, 3, (8 * TOKENS, 1)))
    # Some experts get most, some none.
    likely = np.arange(EXPERTS) ** 2.0
    chosen = np.stack([rng.choice(EXPERTS, CHOICES, replace=False, p=likely / likely.sum()) for _ in x]).astype(np.int32)
    chosen[5, 1] = chosen[9] = -1
    weights, g = rng.random(chosen.shape), rng.standard_normal((len(x), OUT))
    w = rng.standard_normal((EXPERTS, OUT, IN))
    return (
        jnp.asarray(x, "bfloat16"),
        jnp.asarray(chosen),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(g, "bfloat16"),
        jnp.asarray(w, "bfloat16"),
    )


@pytest.mark.parametrize("recipe", SENT, ids=str)
def test_what_arrives_is_the_quantization_of_what_arrives(recipe, arrays):
    """dispatch(quantize(x)) == quantize(dispatch(x)), over random splits of the tokens among experts."""
    x, chosen = arrays[:2]
    mesh, format = mesh_of(8), recipes.parse(recipe).input.format

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))
    def both(x, chosen):
        send = partial(bfp.dispatch, x, chosen, experts=EXPERTS, axis="expert")
        (values, sizes, _), (q, again, route) = send(), send(recipe=recipe)
        return values, sizes, again, q.codes, q.scales, route.fits[None]

    values, sizes, again, codes, scales, fits = map(np.asarray, both(x, chosen))
    assert fits.all()
    np.testing.assert_array_equal(sizes, again)
    room = 8 * TOKENS * CHOICES
    by_rank = np.asarray(x).reshape(8, TOKENS, IN)
    for rank, experts in enumerate(arrivals(np.asarray(chosen).reshape(8, TOKENS, CHOICES), EXPERTS)):
        rows = [row for expert in experts for row in expert]
        assert list(sizes.reshape(8, -1)[rank]) == [len(expert) for expert in experts]
        begin, end = rank * room, rank * room + len(rows)
        np.testing.assert_array_equal(values[begin:end], by_rank[[r.rank for r in rows], [r.token for r in rows]])
        assert not values[end : begin + room].any()
        want = blockfp.quantize(values[begin:end], format)
        assert_same_bits((codes[begin:end], scales[begin:end]), (want.codes, want.scales))


def layer(x, chosen, weights, w, *, axis=None, sent="mxfp8", bound=None, recipe="mxfp8"):
    tokens, sizes, route = bfp.dispatch(x, chosen, experts=EXPERTS, recipe=sent, axis=axis, bound=bound)
    y = bfp.grouped_linear(tokens, w, sizes, recipe=recipe, expert_axis=axis)
    return bfp.combine(y, route, weights, recipe=sent)


def gradients(x, chosen, weights, w, g, **options):
    """(y, dx, the weights' gradient, dw)."""

    def loss(x, weights, w):
        y = layer(x, chosen, weights, w, **options)
        return (y.astype(jnp.float32) * g).sum(), y

    (_, y), made = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, w)
    return y, *made


@pytest.fixture(scope="module")
def on_one_rank(arrays):
    x, chosen, weights, g, w = arrays
    return jax.jit(gradients)(x, chosen, weights, bfp.quantize_params(w, "mxfp8"), g)


@pytest.mark.parametrize(("check_vma", "bound"), [(True, None), (False, 70)])
def test_eight_ranks_give_the_bits_of_one(check_vma, bound, arrays, on_one_rank):
    x, chosen, weights, g, w = arrays
    mesh = mesh_of(8)
    w = bfp.shard_params(bfp.quantize_params(w, "mxfp8"), mesh, P("expert"))
    rows = P("expert")
    run = jax.jit(
        jax.shard_map(
            partial(gradients, axis="expert", bound=bound),
            mesh=mesh,
            in_specs=(rows, rows, rows, bfp.partition_specs(w), rows),
            out_specs=rows,
            check_vma=check_vma,
        )
    )
    y, dx, dweights, dw = run(x, chosen, weights, w, g)
    assert_same_bits((y, dx, dw), (on_one_rank[0], on_one_rank[1], on_one_rank[3]))
    # A sum along the features, in any order.
    np.testing.assert_allclose(dweights, on_one_rank[2], rtol=0, atol=1e-5 * np.abs(on_one_rank[2]).max())


def test_codes_that_travelled_give_the_products_of_those_made_behind(arrays, on_one_rank):
    x, chosen, weights, g, w = arrays
    y, dx, dweights, dw = jax.jit(partial(gradients, sent=None))(x, chosen, weights, bfp.quantize_params(w, "mxfp8"), g)
    assert_same_bits((y, dx), on_one_rank[:2])
    np.testing.assert_array_equal(dweights, on_one_rank[2])
    # The operands of wgrad alone are quantized of values that were quantized.
    assert 0 < np.linalg.norm(dw - on_one_rank[3]) < 0.05 * np.linalg.norm(dw)


def test_wgrad_multiplies_what_the_values_become(arrays):
    """The columnwise form by its rule, against NumPy in float64."""
    x, chosen, weights, g, w = arrays
    _, _, _, dw = jax.jit(gradients)(x, chosen, weights, bfp.quantize_params(w, "mxfp8"), g)
    (experts,) = arrivals([np.asarray(chosen)], EXPERTS)
    twice = lambda rows: blockfp.quantize(blockfp.quantize(rows, "mxfp8_e4m3").dequantize().T, "mxfp8_e4m3").dequantize()  # noqa: E731
    for expert, rows in enumerate(experts):
        tokens, choices = ([row.token for row in rows], [row.choice for row in rows])
        if not rows:
            assert not jnp.any(dw[expert])
            continue
        factors = np.asarray(weights)[tokens, choices][:, None]
        g_rows = (np.asarray(g, np.float32)[tokens] * factors).astype(g.dtype)
        want = twice(g_rows).astype(np.float64) @ twice(np.asarray(x)[tokens]).astype(np.float64).T
        np.testing.assert_allclose(np.asarray(dw[expert], np.float64), want, rtol=0, atol=2.0**-8 * np.abs(want).max())


def test_too_small_a_bound_shows(arrays):
    x, chosen, weights, g, w = arrays
    mesh, rows = mesh_of(8), P("expert")
    w = bfp.shard_params(bfp.quantize_params(w, "mxfp8"), mesh, rows)

    def run(bound, chosen):
        made = partial(gradients, axis="expert", bound=bound)
        specs = (rows, rows, rows, bfp.partition_specs(w), rows)
        return jax.jit(jax.shard_map(made, mesh=mesh, in_specs=specs, out_specs=rows))(x, chosen, weights, w, g)

    most = max(sum(map(len, experts)) for experts in arrivals(np.asarray(chosen).reshape(8, TOKENS, CHOICES), EXPERTS))
    assert all(jnp.isfinite(made).all() for made in run(most, chosen))
    y, dx, _, _ = run(most - 1, chosen)
    assert jnp.isnan(y).all()
    assert jnp.isnan(dx).all()
    assert jnp.isnan(run(None, chosen.at[3, 0].set(EXPERTS))[0]).all()


def test_overflow_of_one_token_shows_in_its_experts_alone(arrays):
    x, chosen, _, _, w = arrays
    w = bfp.quantize_params(w, "mxfp8")
    y = np.asarray(jax.jit(layer)(x.at[0, 3].set(jnp.inf), chosen, None, w))
    hit = np.isin(chosen, chosen[0]).any(axis=1)
    assert np.isnan(y[hit]).all()
    assert not np.isnan(y[~hit]).any()


def test_derivatives_of_every_kind(arrays):
    x, chosen, weights, g, w = (a if a.dtype == jnp.int32 else a.astype(jnp.float32) for a in arrays)
    q = bfp.quantize_params(w, "mxfp8")
    run = lambda x: layer(x, chosen, weights, q)  # noqa: E731
    dot = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
    _, forward = jax.jit(lambda x: jax.jvp(run, (x,), (dot,)))(x)
    # The tangent of quantized products is plain: straight-through.
    plain = lambda x: layer(x, chosen, weights, bfp.dequantize_params(q), sent=None, recipe=HIGH)  # noqa: E731
    want = jax.jit(lambda x: jax.jvp(plain, (x,), (dot,))[1])(x)
    np.testing.assert_allclose(forward, want, rtol=0, atol=2e-5 * np.abs(want).max())
    back = jax.grad(jax.jit(lambda x: (run(x) * g).sum()))(x)
    np.testing.assert_array_equal(back, jax.jit(jax.grad(lambda x: (run(x) * g).sum()))(x))
    # Of the gradient, whose rows travel quantized: the derivative goes through them.
    of_g = jax.jit(jax.grad(lambda g: (jax.grad(lambda x: (run(x) * g).sum())(x) * dot).sum()))(g)
    np.testing.assert_allclose(of_g, forward, rtol=0, atol=0.1 * np.abs(want).max())
    assert np.linalg.norm(of_g - forward) < 0.05 * np.linalg.norm(forward)


HIGH = recipes.mxfp8().replace(input=Cast(None), weight=Cast(None), gradient=Cast(None), name="high precision")


def test_one_trace_for_all_of_vmap(arrays):
    x, chosen, weights, _, w = arrays
    q = bfp.quantize_params(w, "mxfp8")
    split = lambda a: a.reshape(2, -1, a.shape[1])  # noqa: E731
    got = jax.jit(jax.vmap(layer, in_axes=(0, 0, 0, None)))(split(x), split(chosen), split(weights), q)
    for i in range(2):
        np.testing.assert_array_equal(got[i], jax.jit(layer)(split(x)[i], split(chosen)[i], split(weights)[i], q))


def test_rows_travel_by_one_ragged_collective_on_gpus(arrays, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    mesh, rows = mesh_of(8), P("expert")
    send = lambda x, chosen: bfp.dispatch(x, chosen, experts=EXPERTS, axis="expert", bound=99)[0]  # noqa: E731
    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(rows, rows), out_specs=rows))
    text = run.trace(*arrays[:2]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all(") == 1
    assert "stablehlo.all_to_all" not in text


NVFP4 = "nvfp4 has a scale for the whole tensor"


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, f"recipe nvfp4: {NVFP4}.*pass recipe=None, which sends values as they are", {"recipe": "nvfp4"}),
        (ValueError, "recipe fp8_current: fp8_e4m3 has a scale for the whole", {"recipe": "fp8_current"}),
        (ValueError, r"experts = 0 must be a multiple of the 1 ranks", {"experts": 0}),
        (ValueError, r"bound must be a number of rows, 1 or more, got 0", {"bound": 0}),
        (
            ValueError,
            r"chosen must be integers \[tokens\] or \[tokens, choices\] for the 48 tokens",
            {"chosen": jnp.zeros(3, int)},
        ),
        (ValueError, "mesh axis 'expert' is unknown here", {"axis": "expert"}),
        (
            TypeError,
            "x must be an array in high precision, got QuantizedArray",
            {"x": bfp.quantize(jnp.ones((4, 32)), "mxfp8_e4m3")},
        ),
        (TypeError, r"x must be float32, float16 or bfloat16 \[tokens, features\]", {"x": jnp.ones(3)}),
    ],
)
def test_bad_dispatches(error, message, change, arrays):
    with pytest.raises(error, match=message):
        bfp.dispatch(**({"x": arrays[0], "chosen": arrays[1], "experts": EXPERTS} | change))


def test_bad_combines(arrays):
    tokens, sizes, route = bfp.dispatch(arrays[0], arrays[1], experts=EXPERTS, recipe="mxfp8")
    y = jnp.zeros((tokens.shape[0], OUT))
    with pytest.raises(TypeError, match="route must be that of dispatch, got Array"):
        bfp.combine(y, sizes)
    with pytest.raises(ValueError, match=r"y must be \[bound, out\] with bound = 144 as dispatch gave, got \(5, 48\)"):
        bfp.combine(y[:5], route)
    with pytest.raises(ValueError, match=r"weights must be floats \[tokens, choices\] = \(48, 3\)"):
        bfp.combine(y, route, jnp.zeros((48, 2)))
    with pytest.raises(
        ValueError, match="recipe fp32: fp8_e4m3_1x128_fp32 has scales that are no powers of two; pass recipe=None"
    ):
        bfp.combine(y, route, recipe=recipes.fp8_block().replace(gradient=Cast("fp8_e4m3_1x128_fp32"), name="fp32"))
    with pytest.raises(ValueError, match="x is in mxfp8_e4m3, and recipe mxfp4 takes mxfp4_e2m1 as its input"):
        bfp.grouped_linear(tokens, bfp.quantize_params(arrays[4], "mxfp4"), sizes, recipe="mxfp4")
