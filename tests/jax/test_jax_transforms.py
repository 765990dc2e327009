"""A quantized array under JAX's transformations: it is a pytree like any other, and its gradient is straight-through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_trees import assert_same_tree
from samples import bits_of, sample

import blockfp.jax as bfp
from blockfp.definition import numerics

# Bits are held in programs that XLA optimizes as it does for users.
pytestmark = pytest.mark.optimized

# One scale per tensor, square blocks, packed codes and two levels of scales.
FAMILIES = pytest.mark.parametrize("format", ["fp8_e5m2", "mxfp8_e4m3_32x32", "nvfp4"])


@FAMILIES
def test_across_every_boundary(format):
    x = jnp.asarray(sample("bf16_valued", (4, 40, 144), "bfloat16"))
    each = [bfp.quantize(matrix, format) for matrix in x]
    values = jnp.stack([q.dequantize() for q in each])
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    assert_same_tree(jax.jit(lambda q: q)(each[0]), each[0])
    assert_same_tree(jax.vmap(lambda x: bfp.quantize(x, format))(x), stack)
    assert_same_tree(jax.vmap(lambda q: q.dequantize())(stack), values)
    made = jax.lax.scan(lambda carry, x: (carry, bfp.quantize(x, format)), None, x)[1]
    assert_same_tree(made, stack)
    assert_same_tree(jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, stack)[1], values)
    assert_same_tree(jax.lax.scan(lambda q, x: (bfp.quantize(x, format), None), each[0], x)[0], each[-1])
    chosen = jax.lax.cond(jnp.array(True), lambda x: bfp.quantize(x[0], format), lambda x: bfp.quantize(x[1], format), x)
    assert_same_tree(chosen, each[0])
    assert_same_tree(jax.checkpoint(lambda q: q.dequantize())(each[0]), values[0])
    assert jax.eval_shape(lambda x: bfp.quantize(x, format), x[0]).shape == (40, 144)


@FAMILIES
def test_gradient_is_straight_through(format):
    x, w = (jnp.asarray(sample(kind, (40, 144), "bfloat16")) for kind in ("special", "gaussian"))

    def through(x, key=None):
        return bfp.quantize(x, format, key=key).dequantize()

    # Transformations of another format would show nothing more.
    more = (lambda f: f, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))) if format == "mxfp8_e4m3_32x32" else ()
    for transform in (jax.jit, *more):
        values, pullback = jax.vjp(transform(through), x)
        assert_same_tree(pullback(w)[0], w)
        assert_same_tree(values, through(x))
    assert_same_tree(jax.vjp(lambda x: bfp.fake_quantize(x, format, key=3), x)[1](w)[0], w)
    batched = jax.vmap(lambda x, w: jax.vjp(through, x)[1](w)[0])
    assert_same_tree(batched(jnp.stack([x, x]), jnp.stack([w, -w])), jnp.stack([w, -w]))


def test_gradient_reaches_every_use():
    x, w = jnp.asarray(sample("gaussian", (2, 32, 64)))

    def loss(x):
        q = bfp.quantize(x, "mxfp8_e4m3_32x32")
        return (q.dequantize() * w).sum() + (q.mT.dequantize() * 2).sum() + (q.dequantize("bfloat16") * 4).sum()

    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(gradient, w + 2 + 4, rtol=1e-6)
    assert gradient.dtype == x.dtype


def test_gradient_inside_scan_and_cond():
    x = jnp.asarray(sample("gaussian", (3, 16, 32)))

    def loss(x):
        def body(total, x):
            y = jax.lax.cond(total > 0, lambda x: bfp.fake_quantize(x, "mxfp4_e2m1"), lambda x: x, x)
            return total + (3 * y).sum(), None

        return jax.lax.scan(jax.checkpoint(body), 1.0, x)[0]

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), np.full(x.shape, 3, np.float32))


def test_the_cotangent_is_cast_to_the_dtype_of_x_and_to_nothing_coarser():
    x = jnp.asarray(sample("gaussian", (16, 32), "bfloat16"))
    w = jnp.asarray(sample("gaussian", (16, 32)))
    gradient = jax.grad(lambda x: (bfp.quantize(x, "fp8_e5m2").dequantize("float32") * w).sum())(x)
    assert_same_tree(gradient, w.astype(jnp.bfloat16))


def test_an_array_quantized_outside_is_a_constant():
    x = jnp.asarray(sample("gaussian", (16, 32)))
    q = bfp.quantize(x, "mxint8")
    w_gradient = jax.grad(lambda w: (q.dequantize() * w).sum())(x)
    assert_same_tree(w_gradient, q.dequantize())


def test_the_pullback_stores_nothing():
    x = jnp.asarray(sample("gaussian", (16, 32)))
    pullback = jax.vjp(lambda x: bfp.fake_quantize(x, "mxfp8_e4m3"), x)[1]
    assert all(leaf.size < x.size for leaf in jax.tree.leaves(pullback))


def test_nothing_leaks():
    x = jnp.asarray(sample("gaussian", (2, 32, 64)))
    with jax.checking_leaks():
        q = jax.jit(jax.vmap(lambda x: bfp.quantize(x, "nvfp4", key=1)))(x)
        jax.block_until_ready(jax.jit(jax.vmap(lambda q: q.dequantize()))(q))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))


@FAMILIES
def test_shard_map_of_whole_blocks(format, mesh):
    """A shard of whole blocks has its part of the codes and scales; one scale per tensor is each shard's own."""
    x = sample("exponents", (8 * 32, 144))

    @jax.jit
    def quantize(x):
        def body(x):
            return jax.tree.map(lambda leaf: leaf[None], bfp.quantize(x, format))

        return jax.shard_map(body, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))(x)

    expected = [numerics.quantize(shard, format) for shard in x.reshape(8, 32, 144)]
    q = quantize(x)
    for got, name in ((q.codes, "codes"), (q.scales, "scales"), (q.tensor_scale, "tensor_scale")):
        if got is not None:
            np.testing.assert_array_equal(got, np.stack([getattr(e, name) for e in expected]))

    @jax.jit
    def dequantize(q):
        def body(q):
            return jax.tree.map(lambda leaf: leaf[0], q).dequantize()

        return jax.shard_map(body, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))(q)

    values = [numerics.dequantize(*e, format, "float32", columns=144) for e in expected]
    np.testing.assert_array_equal(bits_of(np.asarray(dequantize(q))), bits_of(np.concatenate(values)))


@FAMILIES
def test_gradient_under_shard_map(format, mesh):
    x, w = (jnp.asarray(sample(kind, (8 * 8, 144))) for kind in ("gaussian", "integers"))

    def loss(x, w):
        def body(x, w):
            return jax.lax.psum((bfp.fake_quantize(x, format) * w).sum(), "rows")

        return jax.shard_map(body, mesh=mesh, in_specs=P("rows"), out_specs=P())(x, w)

    assert_same_tree(jax.jit(jax.grad(loss))(x, w), w)


@FAMILIES
@pytest.mark.parametrize("spec", [P("rows"), P(None, "rows")])
def test_a_sharded_array_has_the_bits_of_the_whole(format, spec, mesh):
    """Left to the compiler's partitioner, blocks and tensors that lie across devices included."""
    x = sample("bf16_valued", (8 * 10, 8 * 20))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    expected = bfp.quantize(x, format, key=11)
    q = bfp.quantize(placed, format, key=11)
    assert_same_tree(q, expected)
    assert_same_tree(q.dequantize(), expected.dequantize())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_block", "mxfp4"])
def test_a_scan_over_layers_keeps_no_second_copy_of_their_codes(recipe):
    """What a scan's forward hands its backward is memory: codes of weights are arguments, and there already."""
    layers, rows = 32, 16
    w = jnp.asarray(sample("gaussian", (layers, 256, 256))) / 16
    q, x = bfp.quantize_params(w, recipe), jnp.ones((rows, 256))

    def loss(q, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(bfp.linear(x, w, recipe=recipe)), None), x, q)[0] ** 2).sum()

    program = jax.jit(bfp.grad(loss, (0, 1))).lower(q, x).compile()
    kept = layers * 2 * rows * 256 * 4  # of each layer's x, and of tanh
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < q.codes.nbytes / 2 + kept


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_row", "nvfp4"])
def test_a_cache_is_written_token_by_token(format):
    """As docs/jax.md has it: tokens that have scales of their own, NVFP4's by vmap, stay what they were."""
    keys, token = (jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((16, 128), (1, 128))))
    of_tokens = format == "nvfp4"
    quantize = jax.vmap(lambda row: bfp.quantize(row[None], format)) if of_tokens else lambda x: bfp.quantize(x, format)
    cache, new = quantize(keys), quantize(100 * token)
    write = jax.jit(
        lambda cache, new, at: jax.tree.map(lambda part, row: jax.lax.dynamic_update_slice_in_dim(part, row, at, 0), cache, new)
    )
    read = lambda q: jax.vmap(lambda q: q.dequantize())(q)[:, 0] if of_tokens else q.dequantize()  # noqa: E731
    wanted = np.array(read(cache))
    wanted[5] = read(new)[0]
    np.testing.assert_array_equal(read(write(cache, new, 5)), wanted)
