"""`grouped_linear` as the CUDA library carries it out: where codes lie, and the definition, which stands in here."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.linear import grouped, grouped_codes, tiles
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import blockfp
import blockfp.jax as bfp
from blockfp.definition.groups import UNIT, columns_for
from blockfp.definition.groups import quantize_groups as defined
from blockfp.recipes import Cast

KERNELS = Path(__file__).parents[2] / "kernels" / "cuda"
SIZES = (300, 0, 37, 128)
TOKENS, IN, OUT = 500, 272, 144
RECIPES = ("fp8_block", "fp8_current", "fp8_delayed")
SCALED = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(1000))


@pytest.fixture
def kernels(monkeypatch):
    """Takes the library's functions for there: on this device the definition stands in for them."""
    monkeypatch.setattr(cuda, "_register", lambda name: f"blockfp_{name}")
    monkeypatch.setattr(grouped, "kernels_do", lambda recipe: True)
    monkeypatch.setattr(grouped_codes, "capability", lambda: (9, 0))


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((TOKENS, size)) * np.exp2(rng.integers(-3, 3, (TOKENS, 1))) for size in (IN, OUT))
    w = rng.standard_normal((len(SIZES), OUT, IN))
    return tuple(jnp.asarray(a, jnp.bfloat16) for a in (x, g, w))


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "fp8_e5m2", "fp8_e4m3_1x128_fp32"])
def test_codes_lie_as_the_kernels_write_them(name, arrays, kernels):
    """And as `definition.groups` says, which the kernels are held against; here group by group too."""
    x, format = np.asarray(arrays[0]), blockfp.Format.parse(name)

    @jax.jit
    def run(x):
        places = tiles.Tiles.of(jnp.asarray(SIZES), TOKENS, UNIT)
        return grouped_codes.quantize_groups(x, places, Cast(format), tiles.Scaling(0.0), rows=True, columns=True)

    rows, columns = run(arrays[0])
    assert rows.codes.shape == (TOKENS, IN)
    assert columns.codes.shape == (IN, columns_for(TOKENS, len(SIZES))) == (IN, 896)
    if not format.per_tensor:
        assert rows.scales.shape == (3, TOKENS)
        assert columns.scales.shape == (7, IN)
    for got, columnwise in ((rows, False), (columns, True)):
        want = defined(x, np.cumsum(SIZES), format, columnwise=columnwise)
        np.testing.assert_array_equal(got.codes[: sum(SIZES) if not columnwise else None], want.codes[: sum(SIZES)])
    begin = padded = 0
    for group, size in enumerate(SIZES):
        own = x[begin : begin + size]
        row, column = (blockfp.quantize(part, format) for part in (own, own.T.copy()))
        codes = rows.codes[begin : begin + size], columns.codes[:, padded : padded + size]
        if size:
            assert_same_bits(codes, (row.codes, column.codes))
        if format.per_tensor and size:
            assert_same_bits((rows.scales[group], columns.scales[group]), (row.scales[0, 0], column.scales[0, 0]))
        elif size:
            blocks = -(-size // 128)
            of_columns = columns.scales[padded // 128 : padded // 128 + blocks]
            assert_same_bits((rows.scales[:, begin : begin + size].T, of_columns.T), (row.scales, column.scales))
        filled = -(-size // 128) * 128
        assert not columns.codes[:, padded + size : padded + filled].any()
        begin, padded = begin + size, padded + filled


def layer(x, w, g, recipe):
    state = SCALED if recipe == "fp8_delayed" else None

    def loss(x, w):
        y = bfp.grouped_linear(x, w, jnp.asarray(SIZES), recipe=recipe, state=state)
        y, new = (y, None) if state is None else y
        return (y.astype(jnp.float32) * g).sum(), (y, new)

    (_, (y, new)), gradients = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *gradients, new


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_is_that_of_tiles(recipe, arrays, kernels, monkeypatch):
    x, g, w = arrays
    x = x.at[310].set(jnp.inf)
    w = bfp.quantize_params(w, recipe)
    got = jax.jit(layer, static_argnums=3)(x, w, g, recipe)
    # JAX would take the function that it has traced.
    jax.clear_caches()
    monkeypatch.setattr(grouped, "kernels_do", lambda recipe: False)
    want = jax.jit(layer, static_argnums=3)(x, w, g, recipe)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        # bfloat16, of sums in another order.
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-5 * np.nanmax(np.abs(b)))
    assert np.isnan(np.asarray(got[0], np.float32)[300:337]).all()
    assert not np.asarray(got[0], np.float32)[sum(SIZES) :].any()


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_derivatives_go_through_tiles(recipe, arrays, kernels, monkeypatch):
    x, g, w = (a.astype(jnp.float32) for a in arrays)
    q = bfp.quantize_params(w, recipe)
    run = lambda x, q: bfp.grouped_linear(x, q, jnp.asarray(SIZES), recipe=recipe)  # noqa: E731
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
    monkeypatch.setattr(grouped, "kernels_do", lambda recipe: False)
    for a, b in zip(got, jax.jit(derivatives)(x, q, g), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_dispatched_rows_are_multiplied_as_they_are(recipe, arrays, kernels, monkeypatch):
    x, _, w = arrays
    chosen = jnp.asarray(np.repeat(np.arange(4), 125)[np.random.default_rng(0).permutation(TOKENS)])
    q = bfp.quantize_params(w, recipe)

    def run(x, q):
        received = bfp.dispatch(x, chosen, 4, recipe=recipe)
        return bfp.combine(bfp.grouped_linear(received.tokens, q, received.counts, recipe=recipe), received)

    def gradients(x, q):
        return run(x, q), *bfp.grad(lambda x, q: (run(x, q) ** 2).sum().astype(jnp.float32), (0, 1))(x, q)

    # With a scale of the whole tensor a NaN is everywhere.
    x = x.at[3].set(jnp.nan) if recipe == "fp8_block" else x
    got = jax.jit(gradients)(x, q)
    jax.clear_caches()
    monkeypatch.setattr(grouped, "kernels_do", lambda recipe: False)
    for a, b in zip(got, jax.jit(gradients)(x, q), strict=True):
        a, b = (np.asarray(part, np.float32) for part in (a, b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=2e-3 * np.nanmax(np.abs(b)))


def test_experts_divided_and_cut(kernels, monkeypatch):
    """Over two axes, as groups one after another are: with tensor parallelism in either dimension."""
    mesh = jax.make_mesh((2, 2), ("expert", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng, sizes, recipe = np.random.default_rng(1), np.array([[19, 0], [40, 7]]), "fp8_block"
    x, g = (jnp.asarray(rng.standard_normal((2, 48, 256)), jnp.float32) for _ in range(2))
    w = bfp.quantize_params(jnp.asarray(rng.standard_normal((4, 256, 256)), jnp.float32), recipe)

    def body(x, w, g, sizes):
        def loss(x, w):
            y = bfp.grouped_linear(x, w, sizes[0], recipe=recipe, expert_axis="expert")
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
            patched.setattr(grouped, "kernels_do", lambda recipe: False)
            wants = run(*arguments)
        jax.clear_caches()
        for a, b in zip(got, wants, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_gets_one_call_for_all_groups(recipe, arrays, kernels, monkeypatch):
    """Two casts and three products, whatever the sizes of groups, and no loop over them."""
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
    assert sorted(set(calls)) == ["blockfp_group_rows", "blockfp_product", "blockfp_quantize_groups"]
    assert calls.count("blockfp_quantize_groups") == 2
    assert calls.count("blockfp_product") == 3
    sources = "".join(path.read_text() for path in KERNELS.rglob("*.cu"))
    for name in ("group_rows", "product", "quantize_groups"):
        (parameters,) = re.findall(rf"\nvoid {name}\(([^{{]*)\) {{", sources)
        assert given[name] == {parameters.count(",") + 1}
    # As spans are written and gradients added up, in loops.
    assert "dynamic_update_slice" not in text


def test_which_recipes_the_kernels_do(monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    monkeypatch.setattr(choice, "missing", lambda name: None)
    monkeypatch.setattr(grouped_codes, "capability", lambda: (9, 0))
    done = [name for name in blockfp.recipes.RECIPES if grouped_codes.kernels_do(blockfp.recipes.parse(name))]
    assert sorted(done) == sorted(RECIPES)
    stochastic = blockfp.recipes.fp8_current().replace(gradient=Cast("fp8_e5m2", stochastic=True))
    assert not grouped_codes.kernels_do(stochastic)
    # The library multiplies blocks of one side by one scale for all groups of the other, not by one for each.
    assert not grouped_codes.kernels_do(blockfp.recipes.fp8_current().replace(weight=Cast("fp8_e4m3_128x128")))
    monkeypatch.setattr(grouped_codes, "capability", lambda: (10, 0))
    assert not grouped_codes.kernels_do(blockfp.recipes.fp8_block())
