"""Gradients, masters, moments and codes on Explicit meshes are sharded as the weight is: shapes and bytes per device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import explicit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
RECIPES = ["mxfp8", "fp8_current", "fp8_block", "nvfp4"]
SPECS = [P("d"), P(None, "d"), P("d", "t"), P(("d", "t"))]
SHAPE = (256, 512)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("d", "t"))


def placed_weight(recipe, mesh, spec, shape=SHAPE):
    q = bfp.quantize_params({"w": jnp.asarray(sample("gaussian", shape))}, recipe)["w"]
    return jax.device_put(q, bfp.named_shardings(q, mesh, spec))


def part_of(shape, mesh, spec):
    return NamedSharding(mesh, spec).shard_shape(shape)


def parts_held(x):
    """The shape of what each device holds of an array."""
    (shape,) = {shard.data.shape for shard in x.addressable_shards}
    return shape


def loss_of(recipe, x):
    def loss(w):
        return (bfp.linear(x, w, recipe=recipe, key=1).astype(jnp.float32) ** 2).sum()

    return loss


def inputs():
    return jnp.asarray(sample("gaussian", (16, SHAPE[1]), seed=1))


@cache
def gradient_of_one_device(recipe):
    return bfp.grad(loss_of(recipe, inputs()))(bfp.quantize_params(jnp.asarray(sample("gaussian", SHAPE)), recipe))


@pytest.mark.parametrize(
    ("recipe", "spec", "how"),
    [
        *((recipe, spec, "jit") for recipe in RECIPES for spec in SPECS),
        ("mxfp8", P("d"), "eager"),
        ("nvfp4", P("d", "t"), "eager"),
    ],
)
def test_of_a_quantized_weight(recipe, spec, how, mesh):
    q = placed_weight(recipe, mesh, spec)
    gradient = bfp.grad(loss_of(recipe, jax.device_put(inputs(), NamedSharding(mesh, P()))))
    with jax.set_mesh(mesh):
        got = (jax.jit(gradient) if how == "jit" else gradient)(q)
    assert parts_held(got) == part_of(SHAPE, mesh, spec)
    assert jax.typeof(got).sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    wanted = gradient_of_one_device(recipe)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_of_values_and_of_carriers(recipe, mesh):
    """What dequantizes the weight, and arrays that get a carrier inside of a program."""
    q = placed_weight(recipe, mesh, P("d"))
    for function in (lambda q: (q.dequantize() ** 2).sum(), lambda q: (bfp.dequantize_params({"w": q})["w"] ** 2).sum()):
        assert parts_held(jax.jit(bfp.grad(function))(q)) == part_of(SHAPE, mesh, P("d"))

    @jax.jit
    def twice(q):
        own = q.without_carrier().with_carrier()
        assert jax.typeof(own.tangent).sharding.spec == P("d", None)
        return own.dequantize()

    assert parts_held(twice(q)) == part_of(SHAPE, mesh, P("d"))
    assert q.with_carrier().tangent.aval.sharding.spec == P("d", None)


def test_of_a_stack_in_a_scan(mesh):
    q = placed_weight("mxfp8", mesh, P(None, "d"), (3, 64, 64))
    x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, P("d")))

    def loss(q):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(bfp.linear(x, w, recipe="mxfp8")), None), x, q)[0] ** 2).sum()

    assert parts_held(jax.jit(bfp.grad(loss))(q)) == part_of((3, 64, 64), mesh, P(None, "d"))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_through_steps_of_an_optimizer(recipe, axis_type):
    """Codes, scales, masters and both moments stay where they were."""
    mesh, spec = jax.make_mesh((8,), ("d",), axis_types=(axis_type,)), P("d")
    params = {"w": placed_weight(recipe, mesh, spec), "b": jax.device_put(jnp.zeros(256), NamedSharding(mesh, spec))}
    x = jax.device_put(jnp.asarray(sample("gaussian", (16, SHAPE[1]), seed=1)), NamedSharding(mesh, spec))
    optimizer = bfp.adamw(1e-2)
    state = jax.jit(optimizer.init)(params)

    def loss(params, x):
        return (bfp.linear(x, params["w"], params["b"], recipe=recipe, key=1) ** 2).mean()

    @jax.jit
    def step(params, state, x):
        gradients = bfp.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state, gradients

    before = params
    for _ in range(2):
        params, state, gradients = step(params, state, x)
        floats = [leaf for leaf in jax.tree.leaves((state, gradients)) if leaf.ndim == 2]
        assert len(floats) == 4  # master, two moments, gradient
        assert {parts_held(leaf) for leaf in floats} == {part_of(SHAPE, mesh, spec)}
        same = jax.tree.map(lambda new, old: parts_held(new) == parts_held(old), params, before)
        assert all(jax.tree.leaves(same)), same


def test_outside_of_jit_where_types_say_nothing():
    """On Auto axes the point of the derivative lies as the codes do, and so does what is made of it."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    q = placed_weight("mxfp8", mesh, P("d"))
    assert parts_held(bfp.grad(lambda w: (w.dequantize() ** 2).sum())(q)) == part_of(SHAPE, mesh, P("d"))
    zeros = explicit.zeros_beside(q.codes, q.shape, q.dtype)
    assert parts_held(zeros) == part_of(SHAPE, mesh, P("d"))
    assert not zeros.any()
