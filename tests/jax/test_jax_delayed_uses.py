"""Delayed scaling of a state that is used several times: the largest amax counts; JAX's sums of cotangents are refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp

RECIPE = "fp8_delayed"
FACTORS = np.float32([1.0, 3.0, 2.0, 0.5])


@pytest.fixture(scope="module")
def layer():
    x, w, g = (jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((16, 64), (32, 64), (16, 32))))
    return x, bfp.quantize_params({"w": w}, RECIPE)["w"], g


def largest(g):
    return np.abs(3 * np.asarray(g)).max()


def amax_of(seen):
    return np.asarray(seen.gradient_amax_history)[..., 0]


def several_calls(layer):
    x, w, g = layer

    def loss(state):
        return sum((bfp.linear(x, w, recipe=RECIPE, state=state)[0] * g * factor).sum() for factor in FACTORS)

    return loss


def closed_over_by_a_scan(layer):
    x, w, g = layer

    def loss(state):
        def body(total, factor):
            return total + (bfp.linear(x, w, recipe=RECIPE, state=state)[0] * g * factor).sum(), None

        return jax.lax.scan(body, jnp.float32(0), FACTORS)[0]

    return loss


def not_mapped_by_vmap(layer):
    x, w, g = layer

    def loss(state):
        return jax.vmap(lambda factor: (bfp.linear(factor * x, w, recipe=RECIPE, state=state)[0] * g * factor).sum())(
            FACTORS
        ).sum()

    return loss


def in_checkpoints_and_branches(layer):
    x, w, g = layer
    call = jax.checkpoint(lambda state, factor: (bfp.linear(x, w, recipe=RECIPE, state=state)[0] * g * factor).sum())

    def loss(state):
        return sum(jax.lax.cond(factor > 0, call, lambda state, factor: 0.0, state, factor) for factor in FACTORS)

    return loss


def passed_on(layer):
    x, w, g = layer

    def loss(state):
        total = 0
        for factor in FACTORS:
            y, state = bfp.linear(x, w, recipe=RECIPE, state=state)
            total += (y * g * factor).sum()
        return total

    return loss


def passed_on_by_a_scan(layer):
    x, w, g = layer

    def loss(state):
        def body(carry, factor):
            total, state = carry
            y, state = bfp.linear(x, w, recipe=RECIPE, state=state)
            return (total + (y * g * factor).sum(), state), None

        return jax.lax.scan(body, (jnp.float32(0), state), FACTORS)[0][0]

    return loss


USES = [several_calls, closed_over_by_a_scan, not_mapped_by_vmap, in_checkpoints_and_branches, passed_on, passed_on_by_a_scan]
TRACED = {"at once": lambda f: f, "jit(grad)": jax.jit}


@pytest.mark.parametrize("how", [*TRACED, "grad(jit)"])
@pytest.mark.parametrize("use", USES)
def test_the_largest_counts(use, how, layer):
    loss, state = use(layer), bfp.delayed_state(RECIPE)
    gradient = bfp.grad(jax.jit(loss)) if how == "grad(jit)" else TRACED[how](bfp.grad(loss))
    seen = gradient(state)
    assert isinstance(seen, bfp.DelayedState)
    assert jax.tree.structure(seen) == jax.tree.structure(state)
    np.testing.assert_allclose(amax_of(seen), largest(layer[2]), rtol=1e-6)
    assert not seen.input_amax_history.any()
    after = bfp.update_scales({"a": state}, {"a": seen}, RECIPE)["a"]
    np.testing.assert_allclose(after.gradient_scale, 57344 / largest(layer[2]), rtol=1e-6)


@pytest.mark.parametrize("use", [passed_on, passed_on_by_a_scan, not_mapped_by_vmap])
def test_jaxs_own_derivative_of_one_use_after_another(use, layer):
    state = bfp.delayed_state(RECIPE)
    seen = jax.jit(jax.grad(use(layer)))(state)
    np.testing.assert_allclose(amax_of(seen), largest(layer[2]), rtol=1e-6)
    assert bfp.update_scales(state, seen, RECIPE).gradient_scale > 0


@pytest.mark.parametrize("use", USES[:2])
def test_what_jax_itself_has_added_up_is_refused(use, layer):
    """At once, or by scales that show it: NaN, in a program."""
    state = bfp.delayed_state(RECIPE)
    seen = jax.grad(use(layer))(state)
    with pytest.raises(ValueError, match=r"a: .*were added or averaged.*blockfp\.jax\.grad.*jnp\.maximum"):
        bfp.update_scales({"a": state}, {"a": seen}, RECIPE)
    assert jnp.isnan(jax.jit(partial(bfp.update_scales, recipe=RECIPE))(state, seen).gradient_scale)


@pytest.mark.parametrize("join", [jnp.add, lambda a, b: (a + b) / 2])
def test_microbatches(join, layer):
    """Their amaxes are joined by the maximum; a sum or a mean of them is refused."""
    x, w, g = layer
    state = bfp.delayed_state(RECIPE)
    gradient = jax.jit(bfp.grad(lambda state, factor: (bfp.linear(x, w, recipe=RECIPE, state=state)[0] * g * factor).sum()))
    first, second = gradient(state, 1.0), gradient(state, 3.0)
    seen = jax.tree.map(jnp.maximum, first, second)
    scale = bfp.update_scales(state, seen, RECIPE).gradient_scale
    np.testing.assert_allclose(scale, 57344 / largest(g), rtol=1e-6)
    with pytest.raises(ValueError, match="were added or averaged"):
        bfp.update_scales(state, jax.tree.map(join, first, second), RECIPE)
    nothing = jax.tree.map(jnp.zeros_like, first)
    np.testing.assert_array_equal(
        bfp.update_scales(state, jax.tree.map(jnp.add, second, nothing), RECIPE).gradient_scale, scale
    )


def test_states_of_a_stack_with_a_state_for_all(layer):
    """Each layer of a scan has its own, and all of them one more."""
    x, _, g = layer
    w = bfp.quantize_params({"w": jnp.asarray(sample("gaussian", (3, 64, 64)))}, RECIPE)["w"]
    own = jax.vmap(lambda _: bfp.delayed_state(RECIPE))(jnp.arange(3))

    def loss(own, shared):
        def body(x, layer):
            weight, state = layer
            y, state = bfp.linear(x, weight, recipe=RECIPE, state=state)
            return jnp.tanh(bfp.linear(y, weight, recipe=RECIPE, state=shared)[0]), state

        y, states = jax.lax.scan(body, x, (w, own))
        return (y[:, :32] * g).sum(), states

    both = bfp.value_and_grad(loss, (0, 1), has_aux=True)
    (_, states), (seen, of_all) = jax.jit(both)(own, bfp.delayed_state(RECIPE))
    assert amax_of(seen).shape == (3,)
    assert amax_of(of_all).shape == ()
    assert jax.tree.structure(states) == jax.tree.structure(own)
    alone = jax.jit(bfp.grad(lambda own: loss(own, bfp.delayed_state(RECIPE))[0]))(own)
    np.testing.assert_allclose(amax_of(alone), amax_of(seen), rtol=1e-6)


def test_groups_and_batches_share_a_state(layer):
    x, _, g = layer
    w = bfp.quantize_params({"w": jnp.asarray(sample("gaussian", (2, 32, 64)))}, RECIPE)["w"]
    sizes, kernels = jnp.array([6, 10]), w.dequantize() if w.scales.size == 1 else bfp.dequantize_params({"w": w})["w"]
    dimensions = (((2,), (2,)), ((0,), (0,)))
    batches, of_batches = jnp.stack([x, x]), jnp.stack([g, 3 * g])

    def of_groups(state):
        calls = (bfp.grouped_linear(x, w, sizes, recipe=RECIPE, state=state)[0] * g * factor for factor in (1.0, 3.0))
        return sum(call.sum() for call in calls)

    def of_batch(state):
        calls = (bfp.dot_general(batches, kernels, dimensions, recipe=RECIPE, state=state)[0] * of_batches for _ in range(2))
        return sum(call.sum() for call in calls)

    for loss in (of_groups, of_batch):
        seen = jax.jit(bfp.grad(loss))(bfp.delayed_state(RECIPE))
        np.testing.assert_allclose(amax_of(seen), largest(g), rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma, layer):
    """Each rank's own largest where nothing is known of ranks; scales are of the largest of all."""
    x, w, g = layer
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def step(state, x, g):
        def loss(state):
            call = lambda factor: (bfp.linear(x, w, recipe=RECIPE, state=state, data_axes=("data",))[0] * g * factor).sum()  # noqa: E731
            return call(1.0) + call(3.0)

        seen = bfp.grad(loss)(state)
        return bfp.update_scales(state, seen, RECIPE, axes=("data",))

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma)
    after = jax.jit(run)(bfp.delayed_state(RECIPE), x, g)
    np.testing.assert_allclose(after.gradient_scale, 57344 / largest(g), rtol=1e-6)
