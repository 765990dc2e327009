"""`jax_numpy_rank_promotion="raise"`, which large projects set: nothing inside of blockfp leans on JAX's own new axes."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.experimental.jax import osci_reset
from blockfp.formats import FORMATS
from blockfp.recipes import RECIPES

X, W, B = jnp.ones((2, 24, 96)), jnp.ones((48, 96)), jnp.ones(48)


@pytest.fixture(autouse=True)
def _raises():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("format", [*FORMATS[::6], next(f for f in FORMATS if f.scale.four_over_six)], ids=str)
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_casts(format, implementation):
    def run(x):
        for key in (None, 3):
            q = bfp.quantize(x, format, key=key, implementation=implementation)
        return q.dequantize(implementation=implementation), bfp.quantize_columnwise(x, format), bfp.quantize_both(x, format)

    jax.eval_shape(run, X)


def loss_of(function, state):
    def loss(*arguments):
        y = function(*arguments)
        return ((y if state is None else y[0]) ** 2).sum()

    return loss


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_and_steps(recipe):
    state = bfp.delayed_state(recipe) if recipes.parse(recipe).delayed else None
    tree = {"w": bfp.quantize_params({"w": W}, recipe)["w"], "b": B}
    loss = loss_of(lambda tree, x: bfp.linear(x, tree["w"], tree["b"], recipe=recipe, key=1, state=state), state)
    optimizer = osci_reset(bfp.adamw(1e-3))

    def step(tree, x):
        gradients, d_x = bfp.grad(loss, (0, 1))(tree, x)
        updates, _ = optimizer.update(gradients, optimizer.init(tree), tree)
        return bfp.apply_updates(tree, updates), d_x

    jax.eval_shape(step, tree, X)
    jax.eval_shape(bfp.grad(lambda tree: sum((leaf**2).sum() for leaf in jax.tree.leaves(bfp.grad(loss)(tree, X)))), tree)
    if recipe == "fp8_row":
        return
    stack = bfp.quantize_params({"w": jnp.ones((3, 48, 96))}, recipe)["w"]
    sizes, biases = jnp.array([10, 0, 9]), jnp.ones((3, 48))
    groups = loss_of(lambda w, x, b: bfp.grouped_linear(x, w, sizes, b, recipe=recipe, key=1, state=state), state)
    jax.eval_shape(bfp.grad(groups, (0, 1, 2)), stack, X[0], biases)


def test_experts_and_dot_general():
    chosen, weight = jnp.zeros((24, 2), jnp.int32), bfp.quantize_params({"w": jnp.ones((3, 96, 96))}, "mxfp8")["w"]

    def mixture(w, x):
        received = bfp.dispatch(x, chosen, 3, recipe="mxfp8")
        y = bfp.grouped_linear(received.tokens, w, received.counts, recipe="mxfp8")
        return bfp.combine(y, received, jnp.ones((24, 2))).sum()

    jax.eval_shape(bfp.grad(mixture, (0, 1)), weight, X[0])
    dimensions = (((2,), (2,)), ((0,), (0,)))
    jax.eval_shape(jax.grad(lambda a, b: bfp.dot_general(a, b, dimensions, recipe="nvfp4", key=3).sum()), X, X)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_4over6"])
def test_inside_shard_map(recipe):
    """Cuts inside blocks along both axes, uneven ones, and tokens of several sequences."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    placed = bfp.shard_params(bfp.quantize_params(jnp.ones((82, 72)), recipe), mesh, P(("tp", "fsdp")))

    def body(w, x):
        call = partial(bfp.linear, recipe=recipe, key=1, data_axes=("fsdp",), sequence=True)
        return bfp.grad(lambda w: call(x, w).sum())(w)

    run = jax.shard_map(body, mesh=mesh, in_specs=(bfp.partition_specs(placed), P("fsdp", "tp")), out_specs=P(("tp", "fsdp")))
    jax.eval_shape(run, placed, jax.ShapeDtypeStruct((4, 24, 72), jnp.float32))
