"""Quantized collectives: gathered values have the bits of the whole's quantization, sums those of an ordered sum."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import CASES
from samples import sample

import blockfp
import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.definition.rotation import rotate

# Bits are held in programs that XLA optimizes as it does for users.
pytestmark = pytest.mark.optimized

MESH = CASES["FSDP 8"].mesh
AXIS = "fsdp"
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
        (lambda x: bfp.all_gather(x[0], AXIS, "mxint8"), r"x must be \[rows, columns\]"),
        (lambda x: bfp.all_gather(bfp.quantize(x, "mxint8"), AXIS), "x is whole on every rank"),
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
