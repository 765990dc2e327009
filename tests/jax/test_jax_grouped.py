"""`grouped_linear` against `linear` group by group, on one device and over meshes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.linear import operands, tiles
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import blockfp
import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition.rounding import gradient_key
from blockfp.recipes import RECIPES, Cast

SIZES = (37, 0, 50, 20)

TOKENS, IN, OUT = 112, 80, 48

KEY = np.array([1, 2], np.uint32)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((TOKENS, IN)) * np.exp2(rng.integers(-3, 3, (TOKENS, 1)))
    w = rng.standard_normal((4, OUT, IN)) * np.arange(1, 5)[:, None, None]
    g, b = rng.standard_normal((TOKENS, OUT)), rng.standard_normal((4, OUT))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, g, b))


SCALED = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(1000))


def run(layer, recipe, arrays, **options):
    """(y, dx, dw, db, state of delayed scaling) of a layer(x, weight, bias)."""
    x, q, b, g = arrays
    state = SCALED if recipes.parse(recipe).delayed else None

    def loss(x, q, b, state):
        y = layer(x, q, bias=b, recipe=recipe, key=KEY, state=state, **options)
        y, new = (y, None) if state is None else y
        return (y * g).sum(), (y, new)

    if state is None:
        (_, (y, _)), grads = bfp.value_and_grad(lambda x, q, b: loss(x, q, b, None), (0, 1, 2), has_aux=True)(x, q, b)
        return y, *grads, None
    (_, (y, new)), (*grads, seen) = bfp.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, q, b, state)
    return y, *grads, (new, seen)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


ACROSS = recipes.mxfp8().replace(weight=Cast(None), weight_columnwise=Cast("mxfp8_e4m3"), name="across")


def test_a_scale_for_each_column_of_a_group_is_refused(arrays):
    x, w, _, _ = arrays
    with pytest.raises(ValueError, match=r"recipe fp8_row: input_columnwise .* has a scale for each column of a group"):
        bfp.grouped_linear(x, bfp.quantize_params(w, "fp8_row"), group_sizes=jnp.asarray(SIZES), recipe="fp8_row")


@pytest.mark.parametrize("recipe", [*(name for name in RECIPES if name != "fp8_row"), ACROSS], ids=str)
def test_each_group_is_a_layer_of_its_own(recipe, arrays, monkeypatch):
    x, w, g, b = arrays
    q = bfp.quantize_params(w, recipe)
    y, dx, dw, db, state = jax.jit(lambda *a: run(partial(bfp.grouped_linear, group_sizes=jnp.asarray(SIZES)), recipe, a))(
        x, q, b, g
    )
    # Of the others one recipe says as much as all.
    for i in range(len(SIZES)) if recipe == "mxfp8" else (2,):
        if SIZES[i] == 0:
            continue
        rows = slice(sum(SIZES[:i]), sum(SIZES[: i + 1]))
        # A layer without groups folds no group's number in.
        monkeypatch.setattr(operands, "gradient_key", lambda key, way, coordinate, i=i: gradient_key(key, way, coordinate, i))
        own = jax.tree.map(lambda leaf, i=i: leaf[i], q)
        *wants, _ = jax.jit(lambda *a: run(bfp.linear, recipe, a))(x[rows], own, b[i], g[rows])
        for got, want in zip((y[rows], dx[rows], dw[i], db[i]), wants, strict=True):
            assert_close(got, want)
    # Rows beyond all groups, and the group without rows.
    beyond = sum(SIZES)
    assert not jnp.any(y[beyond:])
    assert not jnp.any(dx[beyond:])
    assert not jnp.any(dw[1])
    if state is not None:
        assert state[0].input_amax_history[0] == jnp.abs(x[:beyond]).max()
        assert state[1].gradient_amax_history[0] == jnp.abs(g[:beyond]).max()


def test_derivatives_of_derivatives(arrays, monkeypatch):
    """The tangent of dw along x and g: of the values, rotated back."""
    x, w, g, _ = arrays
    q, sizes = bfp.quantize_params(w, "nvfp4"), jnp.asarray(SIZES)

    def tangent(layer, x, q, g):
        dw = lambda x, g: bfp.grad(lambda q: (layer(x, q, recipe="nvfp4", key=KEY) * g).sum())(q)  # noqa: E731
        return jax.jvp(dw, (x, g), (2 * x, -g))[1]

    got = jax.jit(lambda *a: tangent(partial(bfp.grouped_linear, group_sizes=sizes), *a))(x, q, g)
    group, rows = 2, slice(37, 87)
    monkeypatch.setattr(operands, "gradient_key", lambda key, way, coordinate: gradient_key(key, way, coordinate, group))
    own = jax.tree.map(lambda leaf: leaf[group], q)
    assert_close(got[group], jax.jit(lambda *a: tangent(bfp.linear, *a))(x[rows], own, g[rows]))


def test_an_amax_that_is_not_finite_hides_no_other_groups(arrays):
    x = arrays[0].at[0, 0].set(jnp.inf).at[100, 0].set(jnp.nan)
    found = jax.jit(lambda x: tiles.largest_amax(x, tiles.Tiles.of(jnp.asarray(SIZES), TOKENS, 32)))(x)
    assert found == jnp.abs(x[SIZES[0] : SIZES[0] + SIZES[2]]).max()


def test_one_weight_for_all_of_vmap(arrays):
    x, q = arrays[0], bfp.quantize_params(arrays[1], "mxfp8")
    sizes = jnp.asarray([SIZES, SIZES[::-1]])
    loss = lambda q, x, sizes: (bfp.grouped_linear(x, q, sizes, recipe="mxfp8") ** 2).sum()  # noqa: E731
    both = lambda q: jax.vmap(loss, in_axes=(None, 0, 0))(q, jnp.stack([x, 2 * x]), sizes).sum()  # noqa: E731
    got = jax.jit(bfp.grad(both))(q)
    one = jax.jit(bfp.grad(loss))
    assert_close(got, one(q, x, sizes[0]) + one(q, 2 * x, sizes[1]))


def test_groups_of_several_spans(arrays):
    """Each reaches beyond its group, where others hold NaN and Inf."""
    rng = np.random.default_rng(3)
    x, g = (rng.standard_normal((1300, size)).astype(np.float32) for size in (64, 32))
    x[700], x[1299] = np.nan, np.inf
    w = np.asarray(arrays[1][:, :32, :64])
    recipe = recipes.mxfp8()
    values = lambda a, cast: blockfp.quantize(a, cast.format).dequantize().astype(np.float64)  # noqa: E731
    layer = jax.jit(lambda sizes, *a: run(partial(bfp.grouped_linear, group_sizes=sizes), recipe, a))
    for sizes in ((700, 3, 0, 580), (0, 0, 0, 1290)):
        assert tiles.Tiles.of(jnp.asarray(sizes), 1300, 32).spare * 32 < 700
        y, dx, dw, *_ = layer(jnp.asarray(sizes), x, jnp.asarray(w), arrays[3][:, :32], g)
        for i, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
            rows = slice(end - size, end)
            weight = values(w[i], recipe.weight)
            wants = (
                values(x[rows], recipe.input) @ weight.T + np.asarray(arrays[3][i, :32]),
                values(g[rows], recipe.gradient) @ weight,
                values(g[rows].T, recipe.gradient_columnwise) @ values(x[rows].T, recipe.input_columnwise).T,
            )
            for got, want, of_x in zip((y[rows], dx[rows], dw[i]), wants, (True, False, True), strict=True):
                if of_x and not np.isfinite(x[rows]).all():
                    # All of a group's products, and of no other's.
                    want = np.full_like(want, np.nan)
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.nanmax(np.abs(want), initial=1))
        assert not jnp.any(y[sum(sizes) :])


def test_sizes_that_a_traced_function_knows(arrays):
    q, sizes = bfp.quantize_params(arrays[1], "mxfp8"), jnp.asarray(SIZES)
    layer = lambda sizes: lambda x: bfp.grouped_linear(x, q, sizes, recipe="mxfp8")  # noqa: E731
    assert jax.eval_shape(layer(sizes), arrays[0]).shape == (TOKENS, OUT)
    for known in (sizes + 30, np.asarray(SIZES) + 30):
        with pytest.raises(ValueError, match="in sum at most the 112 rows of x"):
            jax.eval_shape(layer(known), arrays[0])


def test_no_tokens(arrays):
    q = bfp.quantize_params(arrays[1], "mxfp8")
    loss = lambda x, q: bfp.grouped_linear(x, q, jnp.zeros(4, jnp.int32), recipe="mxfp8").sum()  # noqa: E731
    dx, dw = jax.jit(bfp.grad(loss, (0, 1)))(jnp.zeros((0, IN)), q)
    assert dx.shape == (0, IN)
    assert not jnp.any(dw)


def test_weights_that_share_a_scale(arrays):
    """As PyTorch's GroupedLinear has them."""
    x, w = arrays[:2]
    shared = bfp.quantize(w, "fp8_e4m3")
    assert shared.scales.shape == (1, 1, 1)
    run = jax.jit(lambda q: bfp.grouped_linear(x, q, jnp.asarray(SIZES), recipe="fp8_current"))
    np.testing.assert_array_equal(run(shared), run(shared.replace(scales=jnp.broadcast_to(shared.scales, (4, 1, 1)))))
    optimizer = bfp.adamw(1e-2)
    new = jax.eval_shape(lambda q: optimizer.update(w, optimizer.init(q), q)[0].value, shared)
    assert new.scales.shape == (1, 1, 1)


# The rows of 2 x 2 ranks: (those of experts 0 and 1, those of 2 and 3) of each of two data-parallel ranks.
HERE = (((19, 0), (40, 3)), ((30, 7), (0, 11)))

STOCHASTIC = recipes.fp8_current().replace(
    weight=Cast("mxfp8_e4m3_32x32"), gradient=Cast("fp8_e5m2", stochastic=True), name="stochastic"
)


def test_groups_share_the_first_scale(arrays):
    """It follows from the largest amax of any group; rows of no group don't count."""
    x, w, g, _ = arrays
    recipe, sizes, rows = recipes.fp8_delayed(history=4), jnp.asarray(SIZES), sum(SIZES)
    x, g = (np.concatenate([a[:rows], 1e3 * np.ones_like(a[rows:])]) for a in (x, 1e-6 * g))
    x, g, q = jnp.asarray(x), jnp.asarray(g), bfp.quantize_params(w, recipe)

    @jax.jit
    def gradients(state):
        def loss(x, w):
            y, _ = bfp.grouped_linear(x, w, group_sizes=sizes, recipe=recipe, state=state)
            return (y * g).sum(), y

        (_, y), found = bfp.value_and_grad(loss, (0, 1), has_aux=True)(x, q)
        return y, *found

    scales = (np.float32(most) / np.abs(a[:rows]).max() for most, a in ((448, x), (57344, g)))
    start = bfp.delayed_state(recipe)
    given = dataclasses.replace(start, **dict(zip(("input_scale", "gradient_scale"), map(jnp.float32, scales), strict=True)))
    for one, other in zip(gradients(start), gradients(given), strict=True):
        assert np.count_nonzero(one)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("recipe", "check_vma"), [(recipes.fp8_delayed(history=4), True), (STOCHASTIC, False)], ids=["delayed", "stochastic"]
)
def test_experts_divided_over_one_axis_and_cut_over_another(recipe, check_vma, arrays, monkeypatch):
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng, most, out = np.random.default_rng(1), 48, 46
    x, g = (rng.standard_normal((2, 2, most, size)).astype(np.float32) for size in (IN, out))
    w, b = arrays[1][:, :out], arrays[3][:, :out]
    q = bfp.quantize_params(w, recipe)
    # 46 rows of blocks of 16 or 32 are cut inside one.
    spec = P("expert", "data")
    placed = bfp.shard_params(q, mesh, spec)

    def body(x, q, b, g, sizes):
        layer = partial(bfp.grouped_linear, group_sizes=sizes[0, 0], data_axes=("data",), expert_axis="expert")
        y, dx, dw, db, state = run(layer, recipe, (x[0, 0], q, b, g[0, 0]))
        state = None if state is None else bfp.update_scales(*state, recipe, axes=("data", "expert"))
        return y[None, None], dx[None, None], dw, db, state

    both, experts = P("data", "expert"), P("expert")
    specs = (both, bfp.partition_specs(placed), experts, both, both)
    outs = (both, both, spec, experts, P() if recipe.delayed else None)
    on_mesh = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=check_vma))
    y, dx, dw, db, state = on_mesh(x, placed, b, g, np.asarray(HERE))

    # All experts on one device, of one data-parallel rank's tokens.
    monkeypatch.setattr(tiles, "gradient_key", lambda key, way, rank, group: gradient_key(key, way, ranks[0], group))
    ranks = []

    @jax.jit
    def whole(rank, sizes, *arrays):
        ranks[:] = [rank]
        return run(partial(bfp.grouped_linear, group_sizes=sizes), recipe, arrays)

    def want(rank):
        filled = [(e, i) for e in range(2) for i in range(sum(HERE[rank][e]))]

        def in_order(a):
            rows = [np.asarray(a)[rank, e, i] for e, i in filled]
            return np.stack(rows + [np.zeros_like(rows[0])] * (2 * most - len(rows)))

        wants = whole(rank, np.asarray(HERE[rank]).reshape(-1), in_order(x), q, b, in_order(g))
        assert_close(in_order(y), wants[0])
        assert_close(in_order(dx), wants[1])
        return wants

    wants = [want(rank) for rank in range(2)]
    assert_close(dw, wants[0][2] + wants[1][2])
    assert_close(db, wants[0][3] + wants[1][3])
    if state is not None:
        own = [bfp.update_scales(*want[4], recipe) for want in wants]
        np.testing.assert_array_equal(state.input_scale, min(s.input_scale for s in own))
        np.testing.assert_array_equal(state.gradient_scale, min(s.gradient_scale for s in own))
    assert_same_bits(tuple(jax.tree.leaves(bfp.unshard_params(placed))), tuple(jax.tree.leaves(q)))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
def test_experts_cut_by_tensor_parallelism(recipe, arrays):
    """Two layers, column and row parallel, of experts divided over another axis: the operands are those of whole experts."""
    mesh = jax.make_mesh((2, 2), ("expert", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng, most, hidden = np.random.default_rng(1), 48, 128
    x, g = (rng.standard_normal((2, most, IN)).astype(np.float32) for _ in range(2))
    sizes = np.array([[19, 0], [40, 7]])
    up, down = (bfp.quantize_params(jnp.asarray(rng.standard_normal(s), jnp.float32), recipe)
                for s in ((4, hidden, IN), (4, IN, hidden)))  # fmt: skip

    def both(x, up, down, g, sizes, axis):
        def loss(x, up, down):
            layer = partial(bfp.grouped_linear, group_sizes=sizes, recipe=recipe, key=KEY, expert_axis=axis)
            y = layer(jax.nn.gelu(layer(x, up)), down)
            return (y * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, up, down)
        return y, *gradients

    def body(x, up, down, g, sizes):
        y, dx, *of_weights = both(x[0], up, down, g[0], sizes[0], "expert")
        return y[None], dx[None], *of_weights

    specs = P("expert", "tp"), P("expert", None, "tp")
    placed = [bfp.shard_params(w, mesh, spec) for w, spec in zip((up, down), specs, strict=True)]
    rows, parts = P("expert"), [bfp.partition_specs(w) for w in placed]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(rows, *parts, rows, rows), out_specs=(rows, rows, *specs)))
    y, dx, *of_weights = run(x, *placed, g, sizes)

    filled = [np.concatenate([a[rank, : sum(sizes[rank])] for rank in range(2)]) for a in (x, g)]
    wants = jax.jit(partial(both, axis=None))(filled[0], up, down, filled[1], jnp.asarray(sizes.reshape(-1)))
    for got, want in zip((y, dx), wants[:2], strict=True):
        assert_near(np.concatenate([got[rank, : sum(sizes[rank])] for rank in range(2)]), want)
    for got, want in zip(of_weights, wants[2:], strict=True):
        assert_near(got, want)


def assert_near(got, want):
    """Where a float sum in another order may round a code of the next layer's operand another way."""
    assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("must share in", {"x": jnp.zeros((4, 81))}),
        (r"weight must be \[groups, out, in\]", {"weight": jnp.zeros((48, 80))}),
        ("group_sizes must be 4 integers", {"group_sizes": jnp.zeros(4)}),
        ("group_sizes must be 0 or more", {"group_sizes": np.array([-1, 5, 0, 0])}),
        ("in sum at most the 112 rows of x", {"group_sizes": jnp.asarray([100, 10, 0, 3])}),
        (r"bias must have shape \(4, 48\)", {"bias": jnp.zeros((4, 47))}),
        ("recipe fp8_delayed scales by history: pass state", {"recipe": "fp8_delayed"}),
        ("has no state", {"state": SCALED}),
        ("rounds gradients stochastically: pass a key", {"recipe": "nvfp4"}),
        ("weight is in mxfp8_e4m3_32x32, and recipe mxfp4 wants mxfp4_e2m1_32x32", {"recipe": "mxfp4"}),
        ("mesh axis 'expert' is unknown here", {"expert_axis": "expert"}),
    ],
)
def test_bad_groups(message, change, arrays):
    arguments = {"x": arrays[0], "weight": bfp.quantize_params(arrays[1], "mxfp8"), "group_sizes": jnp.asarray(SIZES)}
    with pytest.raises(ValueError, match=message):
        bfp.grouped_linear(**(arguments | {"recipe": "mxfp8"} | change))


def test_bad_axes_of_groups(arrays):
    mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def trace(spec, **options):
        q = bfp.shard_params(bfp.quantize_params(arrays[1], "mxfp8"), mesh, spec)
        body = lambda x, q: bfp.grouped_linear(x, q, jnp.asarray(SIZES[: q.shape[0]]), recipe="mxfp8", **options)  # noqa: E731
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(P(), bfp.partition_specs(q)), out_specs=P()), arrays[0], q)

    with pytest.raises(ValueError, match=r"'tp' cuts the 48 features of out over 2 ranks: .* wants a multiple of 64"):
        trace(P(None, "tp"), data_axes=("data",))
    with pytest.raises(TypeError, match=r"data_axes must be a tuple of mesh axes, got 'data': pass \('data',\)"):
        trace(P(None, "data"), data_axes="data")
    with pytest.raises(ValueError, match="expert_axis = 'data' is one of data_axes"):
        trace(P("data"), data_axes=("data",), expert_axis="data")
