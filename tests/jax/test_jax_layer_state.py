"""`init_state`: one tree of states for a model, which changes its recipe without a change to its functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition.rounding import fold_in

NAMES = ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"]
SHAPES = {"up": (64, 32), "down": (32, 64)}


def weights(*stack):
    return {name: jnp.asarray(sample("gaussian", (*stack, *shape), seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}


X = jnp.asarray(sample("gaussian", (32, 32), seed=5))


def mlp(params, state, x):
    h, up = bfp.linear(x, params["up"], state=state["up"])
    y, down = bfp.linear(jax.nn.relu(h), params["down"], state=state["down"])
    return x + y, {**state, "up": up, "down": down}


def loss_of(params, state, x):
    y, state = mlp(params, state, x)
    return (y**2).mean(), state


def step(params, state, x):
    (loss, state), (grads, seen) = bfp.value_and_grad(loss_of, (0, 1), has_aux=True)(params, state, x)
    return loss, grads, bfp.update_scales(state, seen)


def by_hand(recipe, params, states, keys, x):
    """The same with the state and the key of each layer passed by name."""

    def loss_of(params, states):
        after = {}

        def layer(name, x):
            y = bfp.linear(x, params[name], recipe=recipe, key=keys.get(name), state=states.get(name))
            y, after[name] = y if name in states else (y, None)
            return y

        y = x + layer("down", jax.nn.relu(layer("up", x)))
        return (y**2).mean(), {name: one for name, one in after.items() if one is not None}

    (loss, states), (grads, seen) = bfp.value_and_grad(loss_of, (0, 1), has_aux=True)(params, states)
    return loss, grads, bfp.update_scales(states, seen, recipe) if states else states


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("recipe", NAMES)
def test_three_steps_have_the_bits_of_states_and_keys_by_hand(recipe):
    params = bfp.quantize_params(weights(), recipe)
    state = bfp.init_state(recipe, params, key=3)
    delayed = recipes.parse(recipe).delayed is not None
    states = {name: bfp.delayed_state(recipe) for name in SHAPES} if delayed else {}
    stochastic = recipes.parse(recipe).gradient.stochastic
    assert (state["up"].rng_key is not None) == stochastic
    for i in range(3):
        keys = {name: fold_in(state[name].rng_key, jnp.int32(i)) for name in SHAPES} if stochastic else {}
        want = by_hand(recipe, params, states, keys, X * (i + 1))
        found = jax.jit(step)(params, state, X * (i + 1))
        assert_same(found[:2], want[:2])
        state, states = found[2], want[2]
        assert_same({name: one.scaling for name, one in state.items() if one.scaling is not None}, states)
    assert not stochastic or state["up"].rng_step == 3


def test_keys_differ_by_path_place_and_call():
    state = bfp.init_state("nvfp4", weights(3), key=jax.random.key(0))
    words = {tuple(key.tolist()) for one in state.values() for key in np.asarray(one.rng_key)}
    assert len(words) == 6
    assert state["up"].rng_step.shape == (3,)
    assert_same(state, bfp.init_state("nvfp4", weights(3), key=jax.random.key(0)))
    assert (np.asarray(bfp.init_state("nvfp4", weights(3), key=1)["up"].rng_key) != np.asarray(state["up"].rng_key)).any()


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "mxfp8"])
def test_a_scan_over_a_stack_has_the_bits_of_its_layers(recipe):
    params = bfp.quantize_params(weights(2), recipe)
    state = bfp.init_state(recipe, params, key=7)

    def scanned(params, state, x):
        x, state = jax.lax.scan(lambda x, layer: mlp(*layer, x), x, (params, state))
        return (x**2).mean(), state

    def unrolled(params, states, x):
        after = []
        for i, own in enumerate(states):
            x, one = mlp(jax.tree.map(lambda part, i=i: part[i], params), own, x)
            after.append(one)
        return (x**2).mean(), after

    # JAX can't transpose a slice of a state's carrier, so layers that are written out have a state each.
    states = [jax.tree.map(lambda part, i=i: part[i], state) for i in range(2)]
    both = ((scanned, state), (unrolled, states))
    found, want = (jax.jit(bfp.value_and_grad(loss, (0, 1), has_aux=True))(params, one, X) for loss, one in both)
    (_, after), (grads, seen) = found
    (_, each_after), (each_grads, each_seen) = want
    assert_same(grads, each_grads)
    assert_same((after, seen), jax.tree.map(lambda *parts: jnp.stack(parts), *zip(each_after, each_seen, strict=True)))


def test_paths_have_recipes_of_their_own():
    by_path = {"down": "nvfp4", "up": "fp8_delayed"}
    params = bfp.quantize_params(weights() | {"head": jnp.ones((32, 32))}, {**by_path, "head": None})
    state = bfp.init_state({**by_path, "head": None}, params, key=0)
    assert {name: one and one.recipe.name for name, one in state.items()} == {**by_path, "head": None}
    loss, _, after = jax.jit(step)(params, state, X)
    assert np.isfinite(loss)
    assert after["up"].scaling.gradient_scale > 0
    assert after["down"].scaling is None


def test_groups_share_a_state_and_dot_general_takes_one():
    experts = {"w": jnp.asarray(sample("gaussian", (2, 32, 32), seed=3))}
    state = bfp.init_state("fp8_delayed", experts, grouped_fn=lambda path, leaf: path == "w")["w"]
    assert state.scaling.input_scale.shape == ()
    sizes, own = jnp.asarray([20, 12]), bfp.delayed_state("fp8_delayed")
    y, after = bfp.grouped_linear(X, experts["w"], sizes, state=state)
    want, history = bfp.grouped_linear(X, experts["w"], sizes, recipe="fp8_delayed", state=own)
    assert_same((y, after.scaling), (want, history))
    numbers = (((1,), (1,)), ((), ()))
    y, after = bfp.dot_general(X, experts["w"][0], numbers, state=state)
    assert_same((y, after.scaling), bfp.dot_general(X, experts["w"][0], numbers, recipe="fp8_delayed", state=own))


def test_ranks_share_scales():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    params = bfp.quantize_params(weights(), "fp8_delayed")
    state = bfp.init_state("fp8_delayed", params)

    def each(params, state, x):
        (_, state), (_, seen) = bfp.value_and_grad(loss_of, (0, 1), has_aux=True)(params, state, x)
        return bfp.update_scales(state, seen, axes=("data",))

    run = jax.shard_map(each, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    found = jax.jit(run)(params, state, X)["up"].scaling
    halves = [step(params, state, half)[2]["up"].scaling for half in jnp.split(X, 2)]
    for field in ("input_amax_history", "gradient_amax_history"):
        want = np.maximum(*(np.asarray(getattr(half, field)) for half in halves))
        np.testing.assert_array_equal(np.asarray(getattr(found, field)), want)


def test_what_a_state_refuses():
    params = weights()
    state = bfp.init_state("nvfp4", params, key=0)
    with pytest.raises(ValueError, match=r"up: recipe nvfp4 rounds gradients stochastically: pass a key"):
        bfp.init_state("nvfp4", {"up": params["up"]})
    with pytest.raises(ValueError, match="key: the state holds the layer's key"):
        bfp.linear(X, params["up"], key=3, state=state["up"])
    with pytest.raises(ValueError, match="recipe = mxfp8: the state is of nvfp4"):
        bfp.linear(X, params["up"], recipe="mxfp8", state=state["up"])
    with pytest.raises(ValueError, match="holds its own, leave recipe out"):
        bfp.update_scales(state, state, "nvfp4")
    with pytest.raises(ValueError, match=r"belongs to a stack of \(2,\) layers"):
        bfp.linear(X, params["up"], state=bfp.init_state("nvfp4", weights(2), key=0)["up"])
    with pytest.raises(ValueError, match="filter_fn takes none of 'down', 'up'"):
        bfp.init_state("mxfp8", params, filter_fn=lambda path, leaf: False)
    with pytest.raises(ValueError, match="typo"):
        bfp.init_state({"typo": "mxfp8"}, params)
    with pytest.raises(ValueError, match="3 or more axes"):
        bfp.init_state("mxfp8", params, grouped_fn=lambda path, leaf: True)
    with pytest.raises(TypeError, match="recipe must be a Recipe or its name, got NoneType"):
        bfp.linear(X, params["up"])
