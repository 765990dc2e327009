"""`grouped_linear` as the CUDA library carries it out: where codes lie, and the definition, which stands in here."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.linear import grouped, grouped_codes, grouped_products, tiles
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import groups as defined_groups
from blockfp.definition.groups import UNIT, columns_for
from blockfp.definition.numerics import Quantized
from blockfp.definition.rotation import rotate
from blockfp.definition.rounding import gradient_key
from blockfp.formats import Format
from blockfp.recipes import Cast

KERNELS = Path(__file__).parents[2] / "kernels" / "cuda"
SIZES = (300, 0, 37, 128)
TOKENS, IN, OUT = 500, 272, 144
QAT = recipes.qat("nvfp4_16x16", "mxfp8_e4m3")
RECIPES = [*(recipes.parse(name) for name in recipes.RECIPES if name != "fp8_row"), recipes.mxfp8(exact_products=True), QAT]
IDS = [f"{recipe}{' exact' * recipe.exact_products}" for recipe in RECIPES]
KEY = np.array([1, 2], np.uint32)
SCALED = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(1000))


@pytest.fixture
def kernels(monkeypatch):
    """Takes the library's functions for there: on this device the definition stands in for them."""
    monkeypatch.setattr(cuda, "_register", lambda name: f"blockfp_{name}")
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: True)
    monkeypatch.setattr(grouped_products, "capability", lambda: (9, 0))


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((TOKENS, size)) * np.exp2(rng.integers(-3, 3, (TOKENS, 1))) for size in (IN, OUT))
    w = rng.standard_normal((len(SIZES), OUT, IN))
    return tuple(jnp.asarray(a, jnp.bfloat16) for a in (x, g, w))


def bits_of_groups(parts, ends, features, format, columnwise):
    """What belongs to groups, as `definition.groups` lays it out."""
    each = defined_groups.group_parts(parts, ends, TOKENS, features, format, columnwise=columnwise)
    return [part for group, size in zip(each, SIZES, strict=True) for part in group if part is not None and size]


@pytest.mark.parametrize(
    ("name", "size", "option"),
    [
        *((name, IN, None) for name in ("fp8_e4m3_1x128", "fp8_e5m2", "fp8_e4m3_1x128_fp32", "mxfp8_e4m3", "mxint8")),
        *((name, 77, None) for name in ("fp8_e4m3_1x128", "mxfp6_e3m2", "nvfp4")),
        *(("fp8_e5m2", IN, "stochastic"), ("nvfp4", 77, "stochastic")),
        *(("nvfp4", IN, "rotate"), ("mxfp4_e2m1", 77, "rotate")),
    ],
)
def test_codes_lie_as_the_kernels_write_them(name, option, size, arrays, kernels):
    """And as `definition.groups` says, which the kernels are held against."""
    x, format, ends = arrays[0][:, :size], Format.parse(name), np.cumsum(SIZES)
    casts = (
        Cast(format, stochastic=option == "stochastic"),
        Cast(format, stochastic=option == "stochastic", rotate=option == "rotate"),
    )

    @jax.jit
    def run(x):
        places = tiles.Tiles.of(jnp.asarray(SIZES), TOKENS, UNIT)
        return grouped_codes.quantize_groups(x, places, casts, tiles.Scaling(0.0, key=jnp.asarray(KEY), first_group=3))

    for columnwise, (got, cast) in enumerate(zip(run(x), casts, strict=True)):
        shapes = defined_groups.shapes(x.shape, len(SIZES), format, columnwise=bool(columnwise))
        parts = Quantized(*(None if part is None else np.asarray(part) for part in (got.codes, got.scales, got.tensor_scale)))
        assert [part.shape for part in parts if part is not None] == [shape for shape, _ in shapes]
        assert got.columns == (columns_for(TOKENS, len(SIZES)) if columnwise else size)
        options = {}
        if cast.stochastic:
            options["keys"] = np.array([gradient_key(tuple(KEY.tolist()), columnwise, None, 3 + i) for i in range(len(SIZES))])
        if cast.rotate:
            options["turn"] = rotate
        want = defined_groups.quantize_groups(np.asarray(x), ends, format, columnwise=bool(columnwise), **options)
        assert_same_bits(
            tuple(bits_of_groups(parts, ends, size, format, bool(columnwise))),
            tuple(bits_of_groups(want, ends, size, format, bool(columnwise))),
        )
        if columnwise:
            # Zeros fill up groups.
            last = list(defined_groups.groups_of(ends, TOKENS))[-1].end_column * format.element.bits // 8
            np.testing.assert_array_equal(got.codes[:, :last], want.codes[:, :last])


def layer(x, w, g, recipe):
    state = SCALED if recipe.delayed else None

    def loss(x, w):
        y = bfp.grouped_linear(x, w, jnp.asarray(SIZES), recipe=recipe, key=KEY, state=state)
        y, new = (y, None) if state is None else y
        return (y.astype(jnp.float32) * g).sum(), (y, new)

    (_, (y, new)), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *gradients, new


# test_jax_cuda_path.py has the others.
@pytest.mark.parametrize("recipe", [recipes.parse(name) for name in ("fp8_block", "fp8_delayed", "mxfp4", "nvfp4")], ids=str)
def test_the_layer_is_that_of_tiles(recipe, arrays, kernels, monkeypatch):
    x, g, w = arrays
    x = x.at[310].set(jnp.inf)
    w = bfp.quantize_params(w, recipe)
    got = jax.jit(layer, static_argnums=3)(x, w, g, recipe)
    # JAX would take the function that it has traced.
    jax.clear_caches()
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)
    want = jax.jit(layer, static_argnums=3)(x, w, g, recipe)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        # bfloat16, of sums in another order.
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-5 * np.abs(b[np.isfinite(b)]).max())
    y = np.asarray(got[0], np.float32)[300:337]
    assert np.isnan(y).all()
    assert not np.asarray(got[0], np.float32)[sum(SIZES) :].any()


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4", "nvfp4"])
def test_derivatives_go_through_tiles(recipe, arrays, kernels, monkeypatch):
    x, g, w = (a.astype(jnp.float32) for a in arrays)
    q = bfp.quantize_params(w, recipe)
    run = lambda x, q: bfp.grouped_linear(x, q, jnp.asarray(SIZES), recipe=recipe, key=KEY)  # noqa: E731
    rng = np.random.default_rng(1)
    dot, dot_w = (jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for a in (x, w))

    def derivatives(x, q, g):
        of_weight = lambda g: (bfp.grad(lambda q: (run(x, q) * g).sum())(q) * dot_w).sum()  # noqa: E731
        forward = jax.jvp(lambda x: run(x, q), (x,), (dot,))[1]
        second = jax.grad(lambda g: (jax.grad(lambda x: (run(x, q) * g).sum())(x) * dot).sum())(g)
        return forward, second, jax.grad(of_weight)(g)

    got = jax.jit(derivatives)(x, q, g)
    # Both are dot times the values of w.
    np.testing.assert_allclose(got[0], got[1], rtol=0, atol=2e-5 * np.abs(got[0]).max())
    jax.clear_caches()
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)
    for a, b in zip(got, jax.jit(derivatives)(x, q, g), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "mxfp8", "mxfp4", "nvfp4"])
def test_dispatched_rows_are_multiplied_as_they_are(recipe, arrays, kernels, monkeypatch):
    x, _, w = arrays
    chosen = jnp.asarray(np.repeat(np.arange(4), 125)[np.random.default_rng(0).permutation(TOKENS)])
    q = bfp.quantize_params(w, recipe)

    def run(x, q):
        received = bfp.dispatch(x, chosen, 4, recipe=recipe)
        return bfp.combine(bfp.grouped_linear(received.tokens, q, received.counts, recipe=recipe, key=KEY), received)

    def gradients(x, q):
        return run(x, q), *bfp.grad(lambda x, q: (run(x, q) ** 2).sum().astype(jnp.float32), (0, 1))(x, q)

    # With a scale of the whole tensor a NaN is everywhere.
    x = x if recipe in ("fp8_current", "nvfp4") else x.at[3].set(jnp.nan)
    got = jax.jit(gradients)(x, q)
    jax.clear_caches()
    monkeypatch.setattr(grouped, "all_at_once", lambda *_: False)
    for a, b in zip(got, jax.jit(gradients)(x, q), strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=2e-3 * np.nanmax(np.abs(b)))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_experts_divided_and_cut(recipe, kernels, monkeypatch):
    """Over two axes, as groups one after another are: with tensor parallelism in either dimension."""
    mesh = jax.make_mesh((2, 2), ("expert", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng, sizes = np.random.default_rng(1), np.array([[19, 0], [40, 7]])
    x, g = (jnp.asarray(rng.standard_normal((2, 48, 128)), jnp.float32) for _ in range(2))
    w = bfp.quantize_params(jnp.asarray(rng.standard_normal((4, 128, 128)), jnp.float32), recipe)

    def body(x, w, g, sizes):
        def loss(x, w):
            y = bfp.grouped_linear(x, w, sizes[0], recipe=recipe, key=KEY, expert_axis="expert")
            return (y * g[0]).sum(), y

        (_, y), (dx, dw) = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x[0], w)
        return y[None], dx[None], dw

    def run(spec, of_x, of_y):
        placed = bfp.shard_params(w, mesh, spec)
        in_specs, out_specs = (of_x, bfp.partition_specs(placed), of_y, P("expert")), (of_y, of_x, spec)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(x, placed, g, sizes)

    whole, cut = P("expert"), P("expert", None, "tp")
    for arguments in ((P("expert", "tp"), whole, cut), (P("expert", None, "tp"), cut, whole)):
        got = run(*arguments)
        jax.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(grouped, "all_at_once", lambda *_: False)
            wants = run(*arguments)
        jax.clear_caches()
        for a, b in zip(got, wants, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_a_gpu_gets_one_call_for_all_groups(recipe, arrays, kernels, monkeypatch):
    """A cast or two of each operand and three products, whatever the sizes of groups, and no loop over them."""
    x, g, w = arrays
    w = bfp.quantize_params(w, recipe)
    jax.clear_caches()
    call, given = cuda._call, {}

    def counted(name, out, *operands, **attributes):
        given.setdefault(name, set()).add(len(operands) + len(jax.tree.leaves(out)) + len(attributes))
        return call(name, out, *operands, **attributes)

    monkeypatch.setattr(cuda, "_call", counted)
    text = jax.jit(layer, static_argnums=3).trace(x, w, g, recipe).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@(blockfp_\w+)\(", text)
    casts, aligned = CALLS.get(recipe.name, (2, 0))
    assert calls.count("blockfp_quantize_groups") == casts
    assert calls.count("blockfp_product") == 3
    assert calls.count("blockfp_align") == (0 if recipe.exact_products else aligned)
    sources = "".join(path.read_text() for path in KERNELS.rglob("*.cu"))
    for name in given:
        (parameters,) = re.findall(rf"\nvoid {name}\(([^{{]*)\) {{", sources)
        assert given[name] == {parameters.count(",") + 1}
    # As spans are written and gradients added up, in loops.
    assert "dynamic_update_slice" not in text


# Calls that quantize groups, and that align operands.
CALLS = {"mxfp8": (2, 6), "mxfp6": (2, 6), "mxfp4": (2, 6), "mxfp4_rotated": (2, 6), "nvfp4_4over6": (2, 0)}
CALLS |= {QAT.name: (1, 0), "w4a8": (1, 2)}


def test_which_recipes_the_kernels_do(monkeypatch):
    bf16, fp32 = np.dtype("bfloat16"), np.dtype("float32")
    assert not grouped_products.all_at_once(recipes.mxfp8(), bf16, bf16)
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    monkeypatch.setattr(choice, "missing", lambda name: None)
    monkeypatch.setattr(grouped_products, "capability", lambda: (9, 0))
    for recipe in RECIPES:
        assert grouped_products.all_at_once(recipe, bf16, bf16), recipe
        # What isn't quantized must be bfloat16.
        assert grouped_products.all_at_once(recipe, fp32, fp32) == (recipe.gradient.format is not None), recipe
    stochastic = recipes.fp8_current().replace(gradient=Cast("fp8_e5m2", stochastic=True))
    assert grouped_products.all_at_once(stochastic, bf16, bf16)
    rows = recipes.mxfp8().replace(weight=Cast("mxfp8_e4m3"))
    assert grouped_products.all_at_once(rows, bf16, fp32)
    # One scale for each group beside blocks is multiplied in bfloat16, and fp32 scales of blocks have no values there.
    assert grouped_products.all_at_once(recipes.fp8_current().replace(weight=Cast("fp8_e4m3_128x128")), bf16, bf16)
    for refused in (
        recipes.fp8_row(),
        recipes.fp8_current().replace(weight=Cast("fp8_e4m3_128x128_fp32")),
        recipes.mxfp8().replace(input=Cast("mxfp8_e4m3_32x32")),
        recipes.nvfp4().replace(weight=Cast("nvfp4")),
    ):
        assert not grouped_products.all_at_once(refused, bf16, bf16), refused
    monkeypatch.setattr(grouped_products, "capability", lambda: (10, 0))
    assert not grouped_products.all_at_once(recipes.fp8_block(), bf16, bf16)
