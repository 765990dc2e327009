"""`grouped_linear` on a GPU: each group is the `linear` of its rows, whatever kernels and products carry either out.

And tokens on their way to experts on as many GPUs as there are.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import groups
from blockfp.definition.rounding import gradient_key
from blockfp.formats import Format
from blockfp.recipes import RECIPES, Cast

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
operands = pytest.importorskip("blockfp.jax_backend.linear.operands")
grouped_codes = pytest.importorskip("blockfp.jax_backend.linear.grouped_codes")
tiles = pytest.importorskip("blockfp.jax_backend.linear.tiles")

SIZES = (150, 0, 70, 131)
TOKENS, IN, OUT = 384, 256, 384
KEY = np.array([1, 2], np.uint32)
# Of the norm: tensor cores that accumulate fast add in fp32 with 14 bits or more.
NEAR = 2.0**-9


# Scales of the columns of a group are refused.
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_row"])
def test_each_group_is_a_layer_of_its_own(recipe, monkeypatch):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), "bfloat16") for size in (IN, OUT))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), "bfloat16"), recipe)
    state = None
    if recipes.parse(recipe).delayed:
        state = bfp.DelayedState(jnp.zeros(4), jnp.float32(60), jnp.zeros(4), jnp.float32(900))

    def run(layer, x, q, g, *sizes):
        def loss(x, q):
            y = layer(x, q, *sizes, recipe=recipe, key=KEY, state=state)
            y, new = (y, None) if state is None else y
            return (y * g).sum().astype(jnp.float32), (y, new)

        (_, (y, new)), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, q)
        return y, *gradients, new

    y, dx, dw, new = jax.jit(lambda *arrays: run(bfp.grouped_linear, *arrays))(x, q, g, jnp.asarray(SIZES))
    for i in (0, 2, 3):
        rows = slice(sum(SIZES[:i]), sum(SIZES[: i + 1]))
        # A layer without groups folds no group's number in.
        monkeypatch.setattr(operands, "gradient_key", lambda key, way, coordinate, i=i: gradient_key(key, way, coordinate, i))
        own = jax.tree.map(lambda leaf, i=i: leaf[i], q)
        *wants, _ = jax.jit(lambda *arrays: run(bfp.linear, *arrays))(x[rows], own, g[rows])
        for got, want in zip((y[rows], dx[rows], dw[i]), wants, strict=True):
            got, want = (np.asarray(a, np.float64) for a in (got, want))
            assert np.linalg.norm(got - want) <= NEAR * np.linalg.norm(want)
    assert not jnp.any(y[sum(SIZES) :])
    if new is not None:
        assert new.input_amax_history[0] == jnp.abs(x[: sum(SIZES)]).max().astype(jnp.float32)


def hopper(*names):
    if not all(grouped_codes.kernels_do(recipes.parse(name)) for name in names):
        pytest.skip("the kernels for groups are Hopper's, and of programs that XLA doesn't split over devices")


@pytest.mark.parametrize("sizes", [SIZES, (1, 0, 2000, 999), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize(("name", "multiplier"), [("fp8_e4m3_1x128", None), ("fp8_e5m2", None), ("fp8_e4m3", 37.5)])
def test_all_groups_are_quantized_to_the_bits_of_each(name, multiplier, sizes):
    hopper("fp8_block")
    tokens, format, features = max(sum(sizes) + 33, 40), Format.parse(name), 300
    rows = np.random.default_rng(0).standard_normal((tokens, features)) * np.exp2(np.arange(features) % 9)
    x = jnp.asarray(rows, "bfloat16")

    @jax.jit
    def run(x, sizes):
        places = tiles.Tiles.of(sizes, tokens, groups.UNIT)
        scaling = tiles.Scaling(0.0, None if multiplier is None else jnp.float32(multiplier))
        return grouped_codes.quantize_groups(x, places, Cast(format), scaling, rows=True, columns=True)

    filled = sum(-(-size // groups.UNIT) * groups.UNIT for size in sizes)
    given = None if multiplier is None else np.float32([[multiplier]])
    for columnwise, got in enumerate(run(x, jnp.asarray(sizes, jnp.int32))):
        want = groups.quantize_groups(np.asarray(x), np.cumsum(sizes), format, columnwise=bool(columnwise), multiplier=given)
        lines, length = (features, filled) if columnwise else (sum(sizes), features)
        np.testing.assert_array_equal(got.codes[:lines, :length], want.codes[:lines, :length])
        own = np.array(sizes) > 0 if format.per_tensor else (slice(-(-length // 128)), slice(lines))
        np.testing.assert_array_equal(np.asarray(got.scales)[own], want.scales[own])


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_an_inf_is_its_groups_alone_and_nothing_asks_the_host(recipe):
    hopper(recipe)
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), "bfloat16") for size in (IN, OUT))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), "bfloat16"), recipe)

    def run(x, q, sizes):
        loss = lambda x, q: (bfp.grouped_linear(x, q, sizes, recipe=recipe) * g).sum().astype(jnp.float32)  # noqa: E731
        return bfp.grouped_linear(x, q, sizes, recipe=recipe), *bfp.grad(loss, (0, 1))(x, q)

    compiled = jax.jit(run).lower(x, q, jnp.asarray(SIZES)).compile()
    assert " while(" not in compiled.as_text()
    x = x.at[160].set(jnp.inf)
    for sizes in (SIZES, (0, 384, 0, 0), (0, 0, 0, 0)):
        ends = np.cumsum(sizes)
        group = np.searchsorted(ends, 160, side="right")
        y, dx, dw = (np.asarray(part, np.float32) for part in compiled(x, q, jnp.asarray(sizes)))
        of_row = np.searchsorted(ends, np.arange(TOKENS), side="right")
        hit = (of_row == group) & (group < len(sizes))
        assert np.isnan(y[hit]).all()
        assert np.isfinite(y[~hit]).all()
        assert np.isfinite(dx).all()
        assert list(np.isnan(dw).all(axis=(1, 2))) == [number == group for number in range(len(sizes))]
        assert not y[ends[-1] :].any()
        assert not dw[np.array(sizes) == 0].any()


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "mxfp8"])
def test_tokens_travel_to_experts_on_all_gpus(recipe):
    """Against all experts on one."""
    ranks, experts = jax.device_count(), 4 * jax.device_count()
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((128 * ranks, size)), "bfloat16") for size in (IN, OUT))
    chosen = jnp.asarray(np.stack([rng.permutation(experts)[:2] for _ in x]), jnp.int32)
    weights = jnp.asarray(rng.random(chosen.shape), jnp.float32)
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((experts, OUT, IN)), "bfloat16"), recipe)

    def run(x, chosen, weights, q, g, axis):
        def loss(x, weights, q):
            received = bfp.dispatch(x, chosen, experts, recipe=recipe, axis=axis)
            y = bfp.grouped_linear(received.tokens, q, received.counts, recipe=recipe, expert_axis=axis)
            y = bfp.combine(y, received, weights)
            return (y.astype(jnp.float32) * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, q)
        return y, *gradients

    def on(devices, axis, spec):
        mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=(AxisType.Auto,), devices=devices)
        placed = bfp.shard_params(q, mesh, spec)
        specs = (spec, spec, spec, bfp.partition_specs(placed), spec)
        body = jax.shard_map(partial(run, axis=axis), mesh=mesh, in_specs=specs, out_specs=spec, check_vma=axis is not None)
        return jax.jit(body)(*jax.device_put((x, chosen, weights), jax.NamedSharding(mesh, spec)), placed, g)

    for a, b in zip(on(jax.devices(), "expert", P("expert")), on(jax.devices()[:1], None, P()), strict=True):
        a, b = (np.asarray(part, np.float64) for part in (a, b))
        assert np.linalg.norm(a - b) <= NEAR * np.linalg.norm(b)
