"""`dispatch` and `combine`: rows of codes to experts and back, on one rank and on eight, and their derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice
from blockfp.jax_backend.linear.experts import _keeps_values
from held_formats import FORMATS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits
from samples import DTYPES, KINDS, sample

import blockfp
import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import numerics, recoding
from blockfp.recipes import Cast
from blockfp.sharding.dispatching import dispatched

EXPERTS, TOKENS, CHOICES, IN, OUT = 16, 6, 3, 80, 48
FP32_SCALES = recipes.fp8_block().replace(
    input=Cast("fp8_e4m3_1x128_fp32"), input_columnwise=Cast("fp8_e4m3_1x128_fp32"), name="fp32 scales"
)
SENT = ("mxfp8", "mxfp6", "mxfp4", "fp8_block", "fp8_current", "nvfp4", FP32_SCALES)


def mesh_of(ranks):
    return jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


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


def arrivals(chosen, ranks):
    """By expert: (rank, token, choice) of the rows that come to it."""
    slots = [(rank, *slot) for rank, own in enumerate(np.split(np.asarray(chosen), ranks)) for slot in np.ndindex(own.shape)]
    experts = np.asarray(chosen).reshape(-1)
    return [[slot for slot, expert in zip(slots, experts, strict=True) if expert == number] for number in range(EXPERTS)]


@pytest.mark.parametrize("recipe", SENT, ids=str)
def test_what_arrives_is_the_quantization_of_what_arrives(recipe, arrays):
    """dispatch(quantize(x)) == quantize(dispatch(x)), as the core's executor moves rows."""
    x, chosen = arrays[0], jnp.maximum(arrays[1], 0)
    mesh, format = mesh_of(8), recipes.parse(recipe).input.format

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))
    def both(x, chosen):
        values, coded = (bfp.dispatch(x, chosen, EXPERTS, recipe=each, axis="expert") for each in (None, recipe))
        q = coded.tokens
        scales = jnp.broadcast_to(q.scales, (q.codes.shape[0], q.scales.shape[1]))
        tensor_scale = jnp.zeros(1) if q.tensor_scale is None else q.tensor_scale[None]
        return values.tokens, values.counts, coded.counts, q.codes, scales, tensor_scale, coded.fits[None]

    values, counts, again, codes, scales, tensor_scales, fits = map(np.asarray, both(x, chosen))
    assert fits.all()
    np.testing.assert_array_equal(counts, again)
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(chosen).reshape(-1), minlength=EXPERTS))
    whole, by_rank = blockfp.quantize(np.asarray(x), format), np.split(np.asarray(chosen), 8)
    if whole.tensor_scale is not None:
        assert (tensor_scales == whole.tensor_scale).all()
    of_rows = np.broadcast_to(whole.scales, (len(x), whole.scales.shape[1]))
    room, came = 8 * TOKENS * CHOICES, counts.reshape(8, -1).sum(axis=1)
    for got, rows in ((values, np.asarray(x)), (codes, whole.codes), (scales, of_rows)):
        for rank, want in enumerate(dispatched(np.split(rows, 8), by_rank, EXPERTS)):
            own = got[rank * room : (rank + 1) * room]
            assert_same_bits((own[: came[rank]],), (want,))
            assert got is scales or not own[came[rank] :].any()


def layer(x, chosen, weights, w, *, axis=None, sent="mxfp8", bound=None, recipe="mxfp8"):
    received = bfp.dispatch(x, chosen, EXPERTS, recipe=sent, axis=axis, bound=bound)
    y = bfp.grouped_linear(received.tokens, w, received.counts, recipe=recipe, expert_axis=axis)
    return bfp.combine(y, received, weights)


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


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_wgrad_multiplies_what_the_codes_become(recipe, arrays):
    """The columnwise form by the core's rule, against NumPy in float64."""
    x, chosen, weights, g, w = arrays
    q = bfp.quantize_params(w, recipe)
    _, _, _, dw = jax.jit(partial(gradients, sent=recipe, recipe=recipe))(x, chosen, weights, q, g)
    parsed = recipes.parse(recipe)
    sent = blockfp.quantize(np.asarray(x), parsed.input.format)

    def of_codes(rows):
        scales = sent.scales if sent.format.per_tensor else sent.scales[rows]
        parts = numerics.Quantized(sent.codes[rows], scales, None)
        made = recoding.columnwise(parts, sent.format, sent.format, columns=IN, nominal="bfloat16")
        return numerics.dequantize(*made, sent.format, "float32", columns=len(rows))

    for expert, rows in enumerate(arrivals(chosen, 1)):
        if not rows:
            assert not jnp.any(dw[expert])
            continue
        tokens, choices = ([row[i] for row in rows] for i in (1, 2))
        factors = np.asarray(weights)[tokens, choices][:, None]
        own = (np.asarray(g, np.float32)[tokens] * factors).astype(g.dtype)
        if recipe == "mxfp8":
            own = blockfp.quantize(own, parsed.gradient.format).dequantize()
        own = blockfp.quantize(own.T.copy(), parsed.gradient.format).dequantize("float32")
        want = own.astype(np.float64) @ of_codes(tokens).astype(np.float64).T
        np.testing.assert_allclose(np.asarray(dw[expert], np.float64), want, rtol=0, atol=2.0**-8 * np.abs(want).max())


def test_too_small_a_bound_shows(arrays):
    x, chosen, weights, g, w = arrays
    mesh, rows = mesh_of(8), P("expert")
    w = bfp.shard_params(bfp.quantize_params(w, "mxfp8"), mesh, rows)
    specs = (rows, rows, rows, bfp.partition_specs(w), rows)
    most = int(np.bincount(chosen[chosen >= 0], minlength=EXPERTS).reshape(8, -1).sum(axis=1).max())

    def run(function, bound, chosen):
        made = partial(function, axis="expert", bound=bound)
        return jax.jit(jax.shard_map(made, mesh=mesh, in_specs=specs, out_specs=rows))(x, chosen, weights, w, g)

    forward = lambda x, chosen, weights, w, g, **options: layer(x, chosen, weights, w, **options)  # noqa: E731
    assert jnp.isfinite(run(forward, most, chosen)).all()
    assert jnp.isnan(run(forward, most, chosen.at[3, 0].set(EXPERTS))).all()
    y, dx, _, _ = run(gradients, most - 1, chosen)
    assert jnp.isnan(y).all()
    assert jnp.isnan(dx).all()


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
    gradient = lambda g: jax.grad(jax.jit(lambda x: (run(x) * g).sum()))(x)  # noqa: E731
    # Of the gradient, whose rows travel quantized: straight-through, its derivative is the forward's.
    of_g = jax.jit(jax.grad(lambda g: (gradient(g) * dot).sum()))(g)
    np.testing.assert_allclose(of_g, forward, rtol=0, atol=2e-5 * np.abs(forward).max())


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
    send = lambda x, chosen: bfp.dispatch(x, chosen, EXPERTS, recipe=None, axis="expert", bound=99).tokens  # noqa: E731
    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(rows, rows), out_specs=rows))
    text = run.trace(*arrays[:2]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all(") == 1
    assert "stablehlo.all_to_all" not in text


SQUARES = recipes.mxfp8().replace(input=Cast("mxfp8_e4m3_32x32"), name="squares")


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "recipe fp8_delayed scales by amaxes of earlier steps", {"recipe": "fp8_delayed"}),
        (ValueError, "tokens in mxfp8_e4m3_32x32 share blocks of 32 rows", {"recipe": SQUARES}),
        (ValueError, "num_experts = 0 must be a multiple of the 1 ranks", {"num_experts": 0}),
        (ValueError, "bound must be a number of rows, 1 or more, got 0", {"bound": 0}),
        (ValueError, r"experts must be integers \[tokens, k\] for the 48 tokens of x", {"experts": jnp.zeros(3, int)}),
        (ValueError, "mesh axis 'expert' is unknown here", {"axis": "expert"}),
        (
            TypeError,
            "x must be an array in high precision, got QuantizedArray",
            {"x": bfp.quantize(jnp.ones((4, 32)), "mxint8")},
        ),
        (TypeError, r"x must be float32, float16 or bfloat16 \[tokens, in\]", {"x": jnp.ones(3)}),
    ],
)
def test_bad_dispatches(error, message, change, arrays):
    arguments = {"x": arrays[0], "experts": arrays[1], "num_experts": EXPERTS, "recipe": "mxfp8"}
    with pytest.raises(error, match=message):
        bfp.dispatch(**(arguments | change))


def test_bad_combines(arrays):
    received = bfp.dispatch(arrays[0], arrays[1], EXPERTS, recipe="mxfp8")
    y = jnp.zeros((received.tokens.shape[0], OUT))
    with pytest.raises(TypeError, match="received must be what dispatch gave, got Array"):
        bfp.combine(y, received.counts)
    with pytest.raises(ValueError, match=r"y must be \[144, out\], a row for each of received.tokens, got \(5, 48\)"):
        bfp.combine(y[:5], received)
    with pytest.raises(ValueError, match=r"weights must be floats \(48, 3\), one for each expert of each token"):
        bfp.combine(y, received, jnp.zeros((48, 2)))
    with pytest.raises(ValueError, match="x is in mxfp8_e4m3, and recipe mxfp4 takes mxfp4_e2m1 as its input"):
        bfp.grouped_linear(received.tokens, bfp.quantize_params(arrays[4], "mxfp4"), received.counts, recipe="mxfp4")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [f for f in FORMATS if _keeps_values(Cast(f))], ids=str)
def test_values_stay_where_gradients_are_quantized_twice(format, dtype):
    for kind in KINDS:
        values = blockfp.quantize(sample(kind, (24, 300), dtype), format).dequantize()
        # An Inf is what rounding up the largest numbers gave: a layer shows it as overflow.
        beyond = np.isinf(values.astype(np.float32)).any(axis=1)
        again = blockfp.quantize(values, format).dequantize()
        np.testing.assert_array_equal(again[~beyond].astype(np.float32), values[~beyond].astype(np.float32))
