"""`linear` under shard_map on eight devices has the operands of each rank's unsharded layer; sums differ in order only."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.arrays.sharded import sharding_of
from jax.sharding import PartitionSpec as P
from meshes import CASES

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition.rounding import fold_in

TOKENS = 24
# (out, in): whole blocks on every rank; cuts inside blocks, and with FSDP rows that don't divide evenly.
ALIGNED, STRADDLING = (256, 128), (82, 72)
KEY = jnp.array([3, 4], jnp.uint32)


def arrays(shape, ranks):
    """x, w, g and b, of NumPy: what JAX has on one device it takes apart for the mesh by a program for each shape."""
    rng = np.random.default_rng(1)
    out, features = shape
    sizes = ((ranks * TOKENS, features), shape, (ranks * TOKENS, out), (out,))
    return tuple(rng.standard_normal(size).astype(np.float32) for size in sizes)


@cache
def unsharded(recipe, shape, ranks):
    """Each data-parallel rank's rows by themselves, with its coordinate in the key; weight gradients summed."""
    x, w, g, b = arrays(shape, ranks)
    w = bfp.quantize_params(w, recipe)
    state = bfp.delayed_state(recipe) if recipe.delayed else None

    def one(x, g, rank):
        def loss(x, w, b):
            y = bfp.linear(x, w, b, recipe=recipe, key=fold_in(KEY, rank), state=state)
            y = y if state is None else y[0]
            return (y * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, b)
        return y, *gradients

    split = lambda a: a.reshape(ranks, -1, a.shape[-1])  # noqa: E731
    y, dx, dw, db = jax.jit(jax.vmap(one))(split(x), split(g), jnp.arange(ranks))
    return y.reshape(g.shape), dx.reshape(x.shape), dw.sum(0), db.sum(0)


def on_mesh(case, recipe, q, b, x, g, sequence, check_vma):
    state = bfp.delayed_state(recipe) if recipe.delayed else None
    placed = bfp.shard_params(q, case.mesh, case.weight)

    def body(w, b, x, g):
        def loss(x, w, b):
            y = bfp.linear(x, w, b, recipe=recipe, key=KEY, state=state, data_axes=case.data, sequence=sequence)
            y = y if state is None else y[0]
            return (y * g).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, b)
        return y, *gradients

    features = q.shape[1]
    x, g, b = filled(x, case, case.x), filled(g, case, case.y), filled(b, case, case.bias)
    tokens = P((*case.data, "tp"))
    x_spec = tokens if sequence and case.bias == P("tp") else case.x
    y_spec = tokens if sequence and case.bias != P("tp") else case.y
    specs = (bfp.partition_specs(placed), case.bias, x_spec, y_spec)
    out = (y_spec, x_spec, case.weight, case.bias)
    y, dx, dw, db = jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=specs, out_specs=out, check_vma=check_vma))(
        placed, b, x, g
    )
    dw = own_rows(dw, sharding_of(q.shape, placed.sharding.mesh, case.weight))
    # What fills a cotangent up is not looked at, by amaxes either.
    assert not db[q.shape[0] :].any()
    return y[:, : q.shape[0]], dx[:, :features], dw[:, :features], db[: q.shape[0]]


def filled(a, case, spec):
    """a with its last axis, where ranks cut it unevenly, filled up with what must not matter."""
    ranks = case.sizes[spec[-1]] if len(spec) == a.ndim else 1
    return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % ranks)], constant_values=1e3)


def own_rows(gradient, sharding):
    """The rows of ranks' shards one after another without what fills the short ones up."""
    ranks = sharding.mesh.group(0, sharding.order(0))
    parts = np.split(np.asarray(gradient), len(ranks))
    return np.concatenate([part[: sharding.span(0, rank)[1]] for part, rank in zip(parts, ranks, strict=True)])


def check(case, recipe, shape, sequence=False, check_vma=True, sizes=None):
    recipe = recipes.parse(recipe)
    case = CASES[case]._replace(sizes=sizes) if sizes else CASES[case]
    x, w, g, b = arrays(shape, case.data_ranks)
    got = on_mesh(case, recipe, bfp.quantize_params(w, recipe), b, x, g, sequence, check_vma)
    for a, want in zip(got, unsharded(recipe, shape, case.data_ranks), strict=True):
        np.testing.assert_allclose(a, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("case", CASES)
def test_mxfp8_on_every_mesh(case):
    check(case, "mxfp8", STRADDLING)


@pytest.mark.parametrize("case", ["FSDP 4 x TP 2, column", "FSDP 4 x TP 2, row"])
def test_mxfp8_with_whole_blocks_on_every_rank(case):
    check(case, "mxfp8", ALIGNED)


@pytest.mark.parametrize(("recipe", "way"), [("fp8_current", "column"), ("mxfp8", "column"), ("mxfp8", "row")])
def test_sequence_parallelism(recipe, way):
    check(f"FSDP 4 x TP 2, {way}", recipe, STRADDLING, sequence=True)


@pytest.mark.parametrize(
    ("recipe", "case"),
    [
        ("fp8_delayed", "FSDP 4 x TP 2, column"),
        ("fp8_delayed", "FSDP 4 x TP 2, row"),
        ("fp8_current", "HSDP 2x4"),
        ("fp8_current", "FSDP 4 x TP 2, row"),
        ("fp8_block", "FSDP 4 x TP 2, column"),
        ("mxfp6", "FSDP 4 x TP 2, row"),
        ("mxfp4", "FSDP 8"),
        ("nvfp4_4over6", "FSDP 4 x TP 2, row"),
    ],
)
def test_recipes(recipe, case):
    check(case, recipe, STRADDLING)


def test_stochastic_gradients_count_elements_of_the_unsharded_tensor():
    check("FSDP 4 x TP 2, column", "nvfp4", STRADDLING)


@pytest.mark.parametrize(("recipe", "way"), [("mxfp8", "row"), ("fp8_delayed", "column")])
def test_tensor_parallel_cuts_may_be_uneven(recipe, way):
    """Ranks have 34, 34 and 32 rows; or 24, 24 and 22 columns."""
    check(f"FSDP 4 x TP 2, {way}", recipe, (100, 70), sizes={"fsdp": 2, "tp": 3})


def test_without_check_vma():
    """JAX then keeps no account of what ranks hold alike, and the layer's axes alone say what is summed."""
    check("FSDP 4 x TP 2, row", "mxfp8", STRADDLING, check_vma=False)
    check("HSDP 2x4", "mxfp8", STRADDLING, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_plain_parameters(check_vma):
    """Of a layer's own bias it is the sum over ranks in any case; of others JAX sums by default, and the caller without."""
    case = CASES["FSDP 8"]
    x, w, g, b = arrays((64, 64), 8)
    placed, s = bfp.shard_params(bfp.quantize_params(w, "mxfp8"), case.mesh, case.weight), np.full(64, 0.5, np.float32)

    def gradients(w, b, s, x, g, **options):
        return jax.grad(lambda b, s: (bfp.linear(x, w, b, recipe="mxfp8", **options) * s * g).sum(), (0, 1))(b, s)

    def body(*arguments):
        of_bias, of_other = gradients(*arguments, data_axes=case.data)
        return of_bias, of_other if check_vma else jax.lax.psum(of_other, "fsdp")

    specs = (bfp.partition_specs(placed), P(), P(), case.x, case.y)
    run = jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=specs, out_specs=P(), check_vma=check_vma))
    wanted = jax.jit(gradients)(bfp.quantize_params(w, "mxfp8"), b, s, x, g)
    for got, want in zip(run(placed, b, s, x, g), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_bad_axes_at_trace_time():
    case = CASES["FSDP 4 x TP 2, row"]
    x, w, _, _ = arrays((64, 64), 4)
    q = bfp.quantize_params(w, "mxfp8")
    placed = bfp.shard_params(q, case.mesh, case.weight)

    def trace(placed, x_spec, weight_specs=None, **options):
        body = lambda w, x: bfp.linear(x, w, recipe="mxfp8", **options)  # noqa: E731
        specs = (bfp.partition_specs(placed) if weight_specs is None else weight_specs, x_spec)
        jax.eval_shape(jax.shard_map(body, mesh=case.mesh, in_specs=specs, out_specs=P(), check_vma=False), placed, x)

    with pytest.raises(
        ValueError, match=r"only one axis may shard it .tensor parallelism., got fsdp, tp; FSDP's axes belong in data"
    ):
        trace(placed, P("fsdp", "tp"))
    with pytest.raises(ValueError, match="mesh axis 'data' is unknown here"):
        trace(placed, P("fsdp", "tp"), data_axes=("data",))
    with pytest.raises(ValueError, match="with in = 32 as in the weight"):
        trace(placed, P("fsdp"), data_axes=("fsdp",))
    with pytest.raises(ValueError, match=r"so a rank holds \(16, 32\), but it has shape \(64, 32\)"):
        trace(placed, P("fsdp", "tp"), weight_specs=jax.tree.map(lambda _: P(), placed), data_axes=("fsdp",))
