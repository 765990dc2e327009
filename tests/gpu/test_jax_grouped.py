"""`grouped_linear` on a GPU equals the `linear` of each group's rows; tokens travel to experts on all GPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import groups, rotation
from blockfp.definition.numerics import Quantized
from blockfp.definition.rounding import gradient_key
from blockfp.formats import Format
from blockfp.recipes import RECIPES, Cast

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
operands = pytest.importorskip("blockfp.jax_backend.linear.operands")
grouped = pytest.importorskip("blockfp.jax_backend.linear.grouped")
grouped_codes = pytest.importorskip("blockfp.jax_backend.linear.grouped_codes")
grouped_products = pytest.importorskip("blockfp.jax_backend.linear.grouped_products")
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


BF16 = np.dtype("bfloat16")


def hopper(recipe):
    if not grouped_products.all_at_once(recipes.parse(recipe), BF16, BF16):
        pytest.skip("the kernels for groups are Hopper's, and of programs that XLA doesn't split over devices")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, None) for name in ("fp8_e4m3_1x128", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxint8", "nvfp4")),
        *(("fp8_e4m3", 37.5), ("mxfp4_e2m1", "rotate"), ("nvfp4", "rotate"), ("nvfp4", "keys"), ("nvfp4", "both")),
        *(("fp8_e5m2", "keys"), ("mxfp4_e2m1", "keys"), ("nvfp4_4over6", None)),
    ],
)
def test_all_groups_are_quantized_to_the_bits_of_each(name, option):
    """By the kernels, or by tiles where there is none for a cast."""
    hopper("fp8_block")
    tokens, format, features = 1100, Format.parse(name), 300
    stochastic, rotate = option in ("keys", "both"), option in ("rotate", "both")
    casts = Cast(format, stochastic=stochastic), Cast(format, stochastic=stochastic, rotate=rotate)
    multiplier = option if isinstance(option, float) else None

    @jax.jit
    def run(x, sizes):
        places = tiles.Tiles.of(sizes, tokens, groups.UNIT)
        scaling = tiles.Scaling(0.0, None if multiplier is None else jnp.float32(multiplier), jnp.asarray(KEY), None, 3)
        return grouped_codes.quantize_groups(x, places, casts, scaling)

    rows = np.random.default_rng(0).standard_normal((tokens, features)) * np.exp2(np.arange(features) % 9)
    x = jnp.asarray(rows, "bfloat16")
    for sizes in (SIZES, (1, 0, 700, 390), (0, 0, 0, 0)):
        ends = np.cumsum(sizes)
        for columnwise, got in enumerate(run(x, jnp.asarray(sizes, jnp.int32))):
            options = {"columnwise": bool(columnwise)}
            if stochastic:
                options["keys"] = np.array(
                    [gradient_key(tuple(KEY.tolist()), columnwise, None, 3 + i) for i in range(len(sizes))]
                )
            if rotate and columnwise:
                options["turn"] = rotation.rotate
            if multiplier is not None:
                options["multiplier"] = np.float32([[multiplier]])
            want = groups.quantize_groups(np.asarray(x), ends, format, **options)
            parts = Quantized(
                *(None if part is None else np.asarray(part) for part in (got.codes, got.scales, got.tensor_scale))
            )
            each = (groups.group_parts(of, ends, tokens, features, format, columnwise=bool(columnwise)) for of in (parts, want))
            for size, one, other in zip(sizes, *each, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert a is b is None or not size or np.array_equal(a, b), (columnwise, size)
            if columnwise:
                last = list(groups.groups_of(ends, tokens))[-1].end_column * format.element.bits // 8
                np.testing.assert_array_equal(parts.codes[:, :last], want.codes[:, :last])


def in_turn(monkeypatch):
    """Has groups multiplied one after another; JAX would take the function that it has traced."""
    jax.clear_caches()
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)


QAT = recipes.qat("nvfp4_16x16", "mxfp8_e4m3")


@pytest.mark.parametrize(
    ("recipe", "features", "out", "dtype"),
    [
        *((recipe, 256, 384, "bfloat16") for recipe in ("fp8_block", "mxfp8", "mxfp4", "nvfp4", QAT)),
        *((recipe, 200, 136, "float32") for recipe in ("fp8_current", "mxfp6", "nvfp4", recipes.mxfp8(exact_products=True))),
    ],
    ids=str,
)
def test_at_once_and_one_after_another(recipe, features, out, dtype, monkeypatch):
    hopper(recipe)
    recipe, rng = recipes.parse(recipe), np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), dtype) for size in (features, out))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), out, features)), dtype), recipe)
    state = bfp.DelayedState(jnp.zeros(4), jnp.float32(60), jnp.zeros(4), jnp.float32(900)) if recipe.delayed else None

    def run(x, q, sizes):
        def loss(x, q):
            y = bfp.grouped_linear(x, q, sizes, recipe=recipe, key=KEY, state=state)
            y = y if state is None else y[0]
            return (y * g).sum().astype(jnp.float32), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, q)
        return y, *gradients

    for sizes in (SIZES, (0, 0, 384, 0), (0, 0, 0, 0)):
        got = jax.jit(run)(x, q, jnp.asarray(sizes))
        with monkeypatch.context() as patched:
            in_turn(patched)
            wants = jax.jit(run)(x, q, jnp.asarray(sizes))
        jax.clear_caches()
        for a, b in zip(got, wants, strict=True):
            a, b = (np.asarray(part, np.float64) for part in (a, b))
            assert np.isfinite(a).all()
            assert np.linalg.norm(a - b) <= NEAR * np.linalg.norm(b)
        assert not got[0][sum(sizes) :].any()
        assert not got[1][sum(sizes) :].any()
        assert not got[2][np.array(sizes) == 0].any()


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_inside_tensor_parallelism(recipe):
    """On one device: amaxes and random bytes are those of all features then, which the kernels for groups don't know."""
    hopper(recipe)
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), "bfloat16") for size in (IN, OUT))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), "bfloat16"), recipe)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def run(x, q, g):
        loss = lambda x, q: (bfp.grouped_linear(x, q, jnp.asarray(SIZES), recipe=recipe, key=KEY) * g).sum().astype(jnp.float32)  # noqa: E731
        return bfp.grad(loss, (0, 1))(x, q)

    wants = jax.jit(run)(x, q, g)
    for spec in (P(None, "tp"), P(None, None, "tp")):
        placed = bfp.shard_params(q, mesh, spec)
        specs = (P(), bfp.partition_specs(placed), P())
        body = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P(), spec), check_vma=False)
        for a, b in zip(jax.jit(body)(x, placed, g), wants, strict=True):
            a, b = (np.asarray(part, np.float64) for part in (a, b))
            assert np.linalg.norm(a - b) <= NEAR * np.linalg.norm(b)


@pytest.mark.parametrize(
    "recipe", ["fp8_block", "fp8_current", "mxfp8", "mxfp6", "mxfp4", "nvfp4", recipes.mxfp8(exact_products=True)], ids=str
)
def test_an_inf_is_its_groups_alone_and_nothing_asks_the_host(recipe):
    hopper(recipe)
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((TOKENS, size)), "bfloat16") for size in (IN, OUT))
    q = bfp.quantize_params(jnp.asarray(rng.standard_normal((len(SIZES), OUT, IN)), "bfloat16"), recipe)

    def run(x, q, sizes):
        layer = partial(bfp.grouped_linear, group_sizes=sizes, recipe=recipe, key=KEY)
        loss = lambda x, q: (layer(x, q) * g).sum().astype(jnp.float32)  # noqa: E731
        return layer(x, q), *bfp.grad(loss, (0, 1))(x, q)

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


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "mxfp8", "mxfp4", "nvfp4"])
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
            y = bfp.grouped_linear(received.tokens, q, received.counts, recipe=recipe, key=KEY, expert_axis=axis)
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
