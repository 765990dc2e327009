"""MS-EDEN in JAX: the definition's bits, whole and on ranks; every derivative of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.arrays import sharded
from blockfp.jax_backend.implementations import ops
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp
from blockfp.definition import eden
from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Shard, Sharding

NVFP4 = Format.parse("nvfp4")
WORDS = (3, (1 << 32) - 5)
KEY = np.array(WORDS, np.uint32)


def assert_same(got, wanted):
    for name in ("codes", "scales", "tensor_scale"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize("kind", ["gaussian", "exponents", "random_bits"])
@pytest.mark.parametrize("rows", [77, 256])
def test_the_definitions_bits(kind, rows):
    x = sample(kind, (rows, 40))
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = eden.quantize(eden.rotate(np.ascontiguousarray(x.T), WORDS), "nvfp4", WORDS, "input")
    assert_same(ops.quantize_eden(x, KEY, format=NVFP4, operand="input"), wanted)


@pytest.mark.parametrize("rows", [256, 150])
def test_a_gather_of_parts(rows):
    """Codes travel where cuts lie between groups of 128 tokens, values where they don't."""
    x = sample("gaussian", (rows, 48))
    lies = Sharding((rows, 48), Mesh((2,), ("tp",)), (Shard(0),))
    plan = plans.gather_activation(NVFP4, lies, ("tp",), operand="gradient", columnwise=True, eden=True)
    assert (plan.reason is None) == (rows == 256)

    def body(x):
        q = sharded.quantize(x, plan, sharded.Options(jnp.asarray(KEY)))
        return q.codes, q.scales, q.tensor_scale

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False))
    wanted = eden.quantize(eden.rotate(np.ascontiguousarray(x.T), WORDS), "nvfp4", WORDS, "gradient")
    for got, want in zip(run(x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_derivatives_are_those_of_the_values():
    """Forward mode, vmap, and gradients of gradients: of the straight-through function."""
    x, w, g = (jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((150, 64), (48, 64), (150, 48))))

    def layer(x, w, key=7):
        return bfp.linear(x, w, recipe="nvfp4_eden", key=key)

    dw = jax.jit(jax.grad(lambda w: (layer(x, w) * g).sum()))(w)
    each = jax.vmap(lambda key: jax.grad(lambda w: (layer(x, w, key) * g).sum())(w))(jnp.asarray([[0, 7], [0, 8]], jnp.uint32))
    np.testing.assert_array_equal(each[0], dw)
    assert (each[1] != dw).any()
    tangent = jax.jit(lambda x, w: jax.jvp(layer, (x, w), (x, w))[1])(x, w)
    assert float(jnp.linalg.norm(tangent - 2 * layer(x, w)) / jnp.linalg.norm(tangent)) < 0.2
    # dw is g^T x of the values: its derivative along g is the product of another g with x's.
    second = jax.jit(lambda g: jax.jvp(lambda g: jax.grad(lambda w: (layer(x, w) * g).sum())(w), (g,), (g,))[1])(g)
    assert float(jnp.linalg.norm(second - g.T @ x) / jnp.linalg.norm(second)) < 0.15
