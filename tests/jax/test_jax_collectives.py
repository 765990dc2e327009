"""Quantized collectives: gathered values have the bits of the whole's quantization, sums those of an ordered sum."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import CASES
from samples import sample

import blockfp
import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.sharding import simulate

# Bits are held in programs that XLA optimizes as it does for users.
pytestmark = pytest.mark.optimized

MESH = CASES["FSDP 8"].mesh
AXIS = "fsdp"
FOUR = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
BY_FORMAT = pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])


def on_mesh(body, *arrays, **options):
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS), **options))(*arrays)


@pytest.mark.parametrize(("format", "rows"), [("fp8_e4m3", 5), ("mxfp8_e4m3", 64), ("mxfp8_e4m3", 5), ("nvfp4", 64)])
def test_all_gather_of_values(format, rows):
    """Rows that fill blocks travel quantized, others as they are."""
    x = sample("bf16_valued", (8 * rows, 48))

    def body(x):
        found = []
        for columnwise in (False, True):
            q = bfp.all_gather(x, AXIS, format, columnwise=columnwise, rotate=columnwise, key=5 if columnwise else None)
            found.append(tuple(leaf[None] for leaf in (q.codes, q.scales)))
        return found

    for columnwise, parts in enumerate(on_mesh(body, x)):
        whole = numerics.quantize(rotate(x.T) if columnwise else x, format, key=5 if columnwise else None)
        for got, want in zip(parts, whole, strict=False):
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_gather_is_a_reduce_scatter(check_vma):
    x, w = jnp.asarray(sample("gaussian", (8 * 5, 48))), jnp.asarray(sample("integers", (8 * 5, 48)))

    def body(x):
        def loss(x):
            rowwise = bfp.all_gather(x, AXIS, "mxfp8_e4m3").dequantize()
            columnwise = bfp.all_gather(x, AXIS, "mxfp8_e4m3", columnwise=True).dequantize()
            return (rowwise * w).sum() + (columnwise * w.T).sum()

        return jax.grad(loss)(x)

    np.testing.assert_allclose(on_mesh(body, x, check_vma=check_vma), 8 * 2 * w, rtol=1e-6)


@BY_FORMAT
def test_reduce_scatter_is_an_ordered_sum(format):
    terms = sample("gaussian", (8, 80, 48))
    got = on_mesh(lambda x: bfp.reduce_scatter(x[0], AXIS, format), terms)
    for rank in range(8):
        parts = [blockfp.fake_quantize(term[10 * rank : 10 * rank + 10].copy(), format) for term in terms]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        np.testing.assert_array_equal(got[10 * rank : 10 * rank + 10], total)


@pytest.mark.parametrize("key", [None, 3])
@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "fp8_e5m2_1x128_fp32", "fp8_e4m3_row", "mxfp4_e2m1"])
def test_sums_of_formats_in_rows_are_those_of_simulate(format, key):
    terms = np.stack([sample("gaussian", (20, 200), seed=rank) for rank in range(4)])
    terms[1, 3, 7], terms[2, 19, 199] = np.inf, np.nan
    run = jax.shard_map(
        lambda x: bfp.reduce_scatter(x[0], AXIS, format, key=key), mesh=FOUR, in_specs=P(AXIS), out_specs=P(AXIS)
    )
    want = np.concatenate(simulate.reduce_scatter(terms, format, key=key))
    np.testing.assert_array_equal(jax.jit(run)(terms), want)
    assert np.isnan(want[[3, 19], [7, 199]]).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [5, 64])
def test_gradient_of_a_gather_may_travel_as_codes(rows, check_vma):
    x = jnp.asarray(sample("gaussian", (4 * rows, 48)))
    w = np.stack([sample("gaussian", (4 * rows, 48), seed=rank) for rank in range(4)])

    def body(x, w, key):
        def loss(x):
            q = bfp.all_gather(x, AXIS, "mxfp8_e4m3", gradient_format="mxfp8_e5m2", gradient_key=key)
            return (q.dequantize() * w[0]).sum()

        return jax.grad(loss)(x)

    run = jax.shard_map(body, mesh=FOUR, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS), check_vma=check_vma)
    for key in range(2):
        got = jax.jit(run)(x, w, jax.random.key(key))
        np.testing.assert_array_equal(got, np.concatenate(simulate.reduce_scatter(w, "mxfp8_e5m2", key=key)))


@pytest.mark.parametrize(
    ("name", "spec", "axes"),
    [
        ("FSDP 8", P(AXIS), (AXIS,)),
        ("HSDP 2x4", P(AXIS), (AXIS,)),
        ("FSDP 4 x TP 2, column", P(("tp", AXIS)), (AXIS,)),
        ("FSDP 4 x TP 2, column", P(("tp", AXIS)), ("tp", AXIS)),
        ("FSDP 4 x TP 2, row", P(AXIS, "tp"), (AXIS,)),
    ],
)
@pytest.mark.parametrize("rows", [41, 64])
def test_gradients_of_gathered_weights_may_travel_as_codes(name, spec, axes, rows):
    mesh = CASES[name].mesh
    weight = bfp.shard_params(bfp.quantize(sample("gaussian", (rows, 96)), "mxfp8_e4m3_32x32"), mesh, spec)
    terms = np.stack([sample("gaussian", (rows, 96), seed=rank) for rank in range(8)])
    names = tuple(mesh.axis_names)

    def body(weight, terms):
        def loss(weight, format):
            whole = bfp.all_gather(weight, axes, gradient_format=format).dequantize(jnp.float32)
            part = terms[0][: whole.shape[0], : whole.shape[1]]
            return (whole * part).sum()

        return tuple(bfp.grad(loss)(weight, format)[None] for format in (None, "mxfp8_e5m2"))

    specs = bfp.partition_specs(weight)
    run = jax.shard_map(body, mesh=mesh, in_specs=(specs, P(names)), out_specs=P(names), check_vma=False)
    exact, rounded = map(np.asarray, jax.jit(run)(weight, terms))
    assert (exact != rounded).any()
    assert np.linalg.norm(exact - rounded) < 0.07 * np.linalg.norm(exact)


@BY_FORMAT
def test_all_reduce(format):
    terms = sample("gaussian", (8, 21, 48))
    got = on_mesh(lambda x: bfp.all_reduce(x[0], AXIS, format)[None], terms)
    assert (got == got[0]).all()
    error = np.linalg.norm(got[0] - terms.sum(0)) / np.linalg.norm(terms.sum(0))
    assert error < (0.2 if format == "nvfp4" else 0.06)


def test_stochastic_sums_take_a_key_for_each_rank():
    terms = np.broadcast_to(sample("gaussian", (16, 32)), (8, 16, 32))
    exact = terms.sum(0)
    nearest = on_mesh(lambda x: bfp.reduce_scatter(x[0], AXIS, "mxfp4_e2m1"), terms)
    keyed = lambda x, key: bfp.reduce_scatter(x[0], AXIS, "mxfp4_e2m1", key=key)  # noqa: E731
    keyed = jax.jit(jax.shard_map(keyed, mesh=MESH, in_specs=(P(AXIS), P()), out_specs=P(AXIS)))
    one, other = (keyed(terms, jax.random.key(seed)) for seed in (1, 2))
    assert (one != other).any()
    # Eight roundings of equal terms err alike to nearest, and each its own way with a key.
    assert np.abs(one - exact).mean() < np.abs(nearest - exact).mean()


def test_gradients_of_sums():
    terms, w = jnp.asarray(sample("gaussian", (8, 16, 32))), jnp.asarray(sample("integers", (16, 32)))

    def body(x):
        mine = jax.lax.dynamic_slice_in_dim(w, 2 * jax.lax.axis_index(AXIS), 2)
        scattered = jax.grad(lambda x: (bfp.reduce_scatter(x, AXIS, "mxfp8_e4m3") * mine).sum())(x[0])
        reduced = jax.grad(lambda x: (bfp.all_reduce(x, AXIS, "mxfp8_e4m3") * w).sum())(x[0])
        return scattered[None], reduced[None]

    scattered, reduced = on_mesh(body, terms)
    np.testing.assert_array_equal(scattered, np.broadcast_to(w, terms.shape))
    np.testing.assert_array_equal(reduced, np.broadcast_to(8 * w, terms.shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: bfp.all_gather(x, "rows", "mxint8"), "mesh axis 'rows' is unknown here"),
        (lambda x: bfp.all_gather(x, AXIS), "format: values travel quantized"),
        (lambda x: bfp.all_gather(x, AXIS, "mxint8", gradient_key=1), "gradient_key: gradients are rounded only where"),
        (lambda x: bfp.all_gather(x, AXIS, "mxint8", gradient_format="nvfp4"), "gradient_format nvfp4: rows that go to"),
        (lambda x: bfp.all_gather(x[0], AXIS, "mxint8"), r"x must be \[rows, columns\]"),
        (lambda x: bfp.all_gather(bfp.quantize(x, "mxint8"), AXIS), "x is replicated on every rank"),
        (lambda x: bfp.reduce_scatter(x, AXIS, "mxint8"), "rows a multiple of the 8 ranks of 'fsdp'"),
        (lambda x: bfp.all_reduce(x[0], AXIS, "mxint8"), r"x must be \[rows, columns\]"),
        (lambda x: bfp.all_reduce(x, AXIS, "mxint9"), "format 'mxint9' is not known"),
    ],
)
def test_bad_use_at_trace_time(call, message):
    run = jax.shard_map(call, mesh=MESH, in_specs=P(AXIS), out_specs=P())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, jnp.zeros((40, 32)))


def test_a_gathered_weight_is_in_its_own_format():
    placed = bfp.shard_params(bfp.quantize(jnp.ones((32, 32)), "mxint8_32x32"), MESH, P(AXIS))
    run = partial(jax.shard_map, mesh=MESH, in_specs=(bfp.partition_specs(placed),), out_specs=P())
    with pytest.raises(ValueError, match="x is quantized already, in mxint8_32x32"):
        jax.eval_shape(run(lambda q: bfp.all_gather(q, AXIS, "nvfp4")), placed)
