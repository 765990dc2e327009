"""Trees with quantized leaves: making them, their gradients, the optimizers, and messages that name a leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_trees import assert_same_tree
from samples import sample

import blockfp
import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import adamw

BY_FAMILY = pytest.mark.parametrize("recipe", ["fp8_current", "mxfp6", "nvfp4"])


@pytest.fixture
def params():
    weights = jnp.asarray(sample("gaussian", (3, 48, 64)))
    return {"layers": {"up": weights, "gain": jnp.ones((3, 64))}, "head": [jnp.asarray(sample("integers", (40, 64)))]}


def only_weights(path, leaf):
    return leaf.ndim >= 2 and not path.endswith("gain")


def test_a_filter_of_leaf_and_path_is_asked_so(params):
    q = bfp.quantize_params(params, "mxfp8", filter_fn=lambda leaf, path: leaf.ndim >= 2 and "gain" not in path)
    assert_same_tree(q, bfp.quantize_params(params, "mxfp8", filter_fn=only_weights))
    with pytest.raises(TypeError, match=r"would leave some: name its parameters \(path, layer\)"):
        bfp.quantize_params(params, "mxfp8", filter_fn=lambda a, b: b not in ("layers.gain",))


@BY_FAMILY
def test_each_matrix_of_a_stack_is_an_array_of_its_own(recipe, params):
    q = bfp.quantize_params(params, recipe, filter_fn=only_weights)
    format = recipes.parse(recipe).weight.format
    assert q["layers"]["gain"] is params["layers"]["gain"]
    for i, matrix in enumerate(params["layers"]["up"]):
        want = blockfp.quantize(np.asarray(matrix), format)
        got = jax.tree.map(lambda leaf, i=i: leaf[i], q["layers"]["up"])
        for name in ("codes", "scales", "tensor_scale"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    values = bfp.dequantize_params(q)
    assert jax.tree.structure(values) == jax.tree.structure(params)
    np.testing.assert_array_equal(values["layers"]["up"][2], want.dequantize())
    assert bfp.dequantize_params(q, "bfloat16")["head"][0].dtype == jnp.bfloat16
    assert_same_tree(bfp.quantize_params(q, recipe), bfp.quantize_params(q, recipe, filter_fn=lambda *_: True))


def test_a_recipe_by_pattern(params):
    mapping = {"^head": None, "up": "mxfp6", "": "mxfp8"}
    by_function = lambda path: None if path.startswith("head") else "mxfp6" if "up" in path else "mxfp8"  # noqa: E731
    assert_same_tree(bfp.quantize_params(params, mapping), bfp.quantize_params(params, by_function))
    with pytest.raises(ValueError, match=r"pattern '\^haed' matches no convertible layer"):
        bfp.quantize_params(params, {"^haed": None, "": "mxfp8"})
    # Found in a leaf that is no weight, a recipe would quantize nothing, and None does what is meant.
    tree = {"up": jnp.ones((32, 64)), "bias": jnp.ones(32)}
    with pytest.raises(ValueError, match=r"pattern 'bias' matches no convertible layer; paths are 'up'"):
        bfp.quantize_params(tree, {"bias": "mxfp8"})
    assert bfp.quantize_params(tree, {"bias": None, "": "mxfp8"})["up"].format.square


def test_weights_do_not_stay_unquantized_unnoticed():
    """NumPy draws float64, and a misspelt filter takes nothing."""
    drawn = {"up": np.random.default_rng(0).standard_normal((32, 64)), "step": np.int32(3)}
    for recipe in ("mxfp8", {"up": "mxfp8"}):
        with pytest.raises(TypeError, match=r"up: a weight must be .*, got float64 \(32, 64\): cast it first, or leave it out"):
            bfp.quantize_params(drawn, recipe)
    plain = {"up": drawn["up"].astype(np.float32), "step": np.int32(3)}
    with pytest.raises(ValueError, match="tree holds no weight to quantize: filter_fn takes none of 'step', 'up'"):
        bfp.quantize_params(plain, "mxfp8", filter_fn=lambda path, _: path.endswith("weigth"))
    assert bfp.quantize_params({}, "mxfp8") == {}
    assert bfp.quantize_params(plain, lambda path: None) == plain


def test_weights_of_another_recipe_do_not_stay_unnoticed(params):
    """They would have failed in the first layer, which names no leaf."""
    q = bfp.quantize_params(params, "fp8_current", filter_fn=only_weights)
    why = r"^layers\.up: weight is in fp8_e4m3, and recipe mxfp8 wants mxfp8_e4m3_32x32: take a recipe of its format, or"
    for refused in (bfp.quantize_params, lambda tree, recipe: bfp.init_state(recipe, tree)):
        with pytest.raises(ValueError, match=why):
            refused(q, {"gain": None, "head": None, "": "mxfp8"})
    # What the message says to do, and leaves that weren't asked for.
    again = bfp.quantize_params(bfp.dequantize_params(q), "mxfp8")
    assert again["layers"]["up"].format.name == "mxfp8_e4m3_32x32"
    rest = bfp.quantize_params(q, {"gain": "mxfp8", "": None})
    assert_same_tree(rest, bfp.quantize_params(q, "mxfp8", filter_fn=lambda path, leaf: "gain" in path))
    assert rest["layers"]["up"].format.per_tensor


def test_random_keys_beside_weights(params):
    keys = jax.random.split(jax.random.key(0), (2, 32))
    q = bfp.quantize_params(params | {"keys": keys}, "mxfp8")
    assert q.pop("keys") is keys
    assert_same_tree(q, bfp.quantize_params(params, "mxfp8"))


def test_a_recipe_by_path(params):
    q = bfp.quantize_params(params, {"layers.up": "mxfp6"}.get, filter_fn=only_weights)
    assert q["layers"]["up"].format.name == "mxfp6_e3m2_32x32"
    assert q["head"][0] is params["head"][0]
    with pytest.raises(ValueError, match=r"head\.0: recipe for 'head\.0': recipe 'mxfp9' is not known"):
        bfp.quantize_params(params, {"head.0": "mxfp9"}.get)


def loss(params, x):
    def body(x, layer):
        return bfp.linear(x * layer["gain"], layer["up"], recipe="mxfp8")[:, :48].repeat(2, axis=1)[:, :64], None

    x, _ = jax.lax.scan(body, x, params["layers"])
    return (bfp.linear(x, params["head"][0], recipe="mxfp8") ** 2).sum()


def test_gradients_are_those_of_the_arrays_that_were_quantized(params):
    x = jnp.asarray(sample("gaussian", (8, 64), seed=1))
    q = bfp.quantize_params(params, "mxfp8", filter_fn=only_weights)
    value, gradients = jax.jit(bfp.value_and_grad(loss))(q, x)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)
    again, plain = jax.jit(jax.value_and_grad(loss))(params, x)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_gradient_of_dequantize_and_of_the_transpose():
    q = bfp.quantize(jnp.asarray(sample("gaussian", (32, 64))), "mxfp8_e4m3_32x32")
    w = jnp.asarray(sample("integers", (32, 64)))
    gradient = bfp.grad(lambda q: jax.jit(lambda q: (q.dequantize() * w).sum() + (q.mT.dequantize() * 2).sum())(q))(q)
    np.testing.assert_array_equal(gradient, w + 2)
    half = bfp.quantize(w.astype("bfloat16"), "nvfp4")
    assert bfp.grad(lambda q: q.dequantize("float32").sum())(half).dtype == jnp.bfloat16


def test_arguments_as_of_jax(params):
    q = bfp.quantize(jnp.ones((4, 32)), "mxfp8_e4m3")

    def fun(a, b, *, c):
        return (a.dequantize() * b).sum() * c, (a, c)

    (value, (seen, c)), (da, db) = bfp.value_and_grad(fun, (0, 1), has_aux=True)(q, 2 * jnp.ones((4, 32)), c=3.0)
    assert (value, c, seen.shape) == (128 * 6, 3.0, (4, 32))
    np.testing.assert_array_equal((da[0, 0], db[0, 0]), (6, 3))
    assert bfp.grad(fun, 1, has_aux=True)(q, jnp.ones((4, 32)), c=3.0)[0].shape == (4, 32)
    with pytest.raises(TypeError, match="argnums = 3 needs 4 positional arguments, got 2"):
        bfp.grad(fun, 3)(q, q)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, lambda f: jax.jit(jax.grad(f))])
def test_plain_grad_names_ours(transform, params):
    q = bfp.quantize_params(params, "mxfp8")
    with pytest.raises(TypeError, match=r"use blockfp\.jax\.value_and_grad or blockfp\.jax\.grad"):
        transform(lambda q: 0.0)({"a": q})
    # As an argument that isn't differentiated it may be there.
    jax.grad(lambda x, q: x * q["head"][0].dequantize().sum())(1.0, q)


def at(tree, **changes):
    return {**tree, **changes}


def test_messages_name_the_leaf(params):
    with pytest.raises(TypeError, match=r"a\.1: gradients are taken of float and quantized arrays, got int32 \(2,\)"):
        bfp.grad(lambda tree: 0.0)({"a": [jnp.zeros(2), jnp.zeros(2, jnp.int32)]})
    with pytest.raises(TypeError, match=r"layers\.0: a weight must be a float32, float16 or bfloat16 array"):
        bfp.quantize_params({"layers": [jnp.zeros((4, 4), jnp.int8)]}, "mxfp8", filter_fn=lambda *_: True)
    q = bfp.quantize_params(params, "mxfp8", filter_fn=only_weights)
    with pytest.raises(ValueError, match=r"head\.0: dtype must be one of float32, float16, bfloat16, got 'int8'"):
        bfp.dequantize_params(q, "int8")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ([jnp.ones((3, 3))], r"head\.0: the gradient must be a float array of shape \(40, 64\), got float32 \(3, 3\)"),
        ([jnp.ones((40, 64), jnp.int32)], r"head\.0: the gradient must be a float array of shape \(40, 64\), got int32"),
        ([None], r"head\.0: the gradient must be a float array of shape \(40, 64\), got NoneType"),
        ([], r"head: trees differ: expected list of 0, got list of nothing"),
        ({"b": 1}, r"head: trees differ: expected list of 0, got dict of b"),
    ],
)
def test_gradients_that_do_not_fit(head, message, params):
    q = jax.eval_shape(lambda tree: bfp.quantize_params(tree, "mxfp8", filter_fn=only_weights), params)
    optimizer = bfp.adamw(0.1)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(optimizer.update, at(params, head=head), jax.eval_shape(optimizer.init, q), q)


def test_what_does_not_fit_an_optimizer(params):
    q = bfp.quantize_params(params, "mxfp8", filter_fn=only_weights)
    optimizer, other = bfp.adamw(0.1), {"layers": q["layers"], "head": [jnp.ones((3, 3), "bfloat16")]}
    state = jax.eval_shape(optimizer.init, q)
    with pytest.raises(TypeError, match="b: an optimizer moves float and quantized arrays, got str"):
        optimizer.init({"b": "x"})
    with pytest.raises(ValueError, match=r"head\.0: the original of a parameter of shape \(40, 64\) .*, got float32 \(3, 3\)"):
        jax.eval_shape(optimizer.init, q, at(params, head=[jnp.ones((3, 3))]))
    with pytest.raises(ValueError, match=r"head\.0: the state belongs to other parameters: its master has shape \(3, 3\)"):
        jax.eval_shape(optimizer.update, params, jax.eval_shape(optimizer.init, other), q)
    with pytest.raises(ValueError, match="the original is quantized, and the parameter isn't"):
        optimizer.init(params, q)
    plain = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    with pytest.raises(ValueError, match=r"the state belongs to other parameters: no master of .*; call init again"):
        jax.eval_shape(optimizer.update, plain, jax.eval_shape(optimizer.init, plain), q)
    with pytest.raises(ValueError, match="update needs the parameters"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match="learning_rate must be 0 or more"):
        bfp.adamw(-1.0)


def test_updates_that_do_not_fit(params):
    q, other = (bfp.quantize_params(params, recipe, filter_fn=only_weights) for recipe in ("mxfp8", "mxfp4"))
    updates = jax.eval_shape(lambda q: bfp.adamw(0.1).update(params, bfp.adamw(0.1).init(q), q)[0], q)
    with pytest.raises(TypeError, match=r"head\.0: codes can't be added to"):
        bfp.apply_updates(q, params)
    with pytest.raises(ValueError, match=r"head\.0: the update of a parameter of mxfp4_e2m1_32x32 of .* got mxfp8_e4m3_32x32"):
        jax.eval_shape(bfp.apply_updates, other, updates)
    with pytest.raises(ValueError, match=r"layers\.gain: the update of a parameter of float32 \(3, 64\) must be alike"):
        jax.eval_shape(bfp.apply_updates, q, at(updates, layers=at(updates["layers"], gain=jnp.ones(64))))
    with pytest.raises(ValueError, match=r"layers: trees differ: expected dict of gain, up, got dict of up"):
        jax.eval_shape(bfp.apply_updates, q, at(updates, layers={"up": updates["layers"]["up"]}))


def test_states_that_do_not_fit():
    state, short = bfp.delayed_state("fp8_delayed"), bfp.delayed_state(recipes.fp8_delayed(history=4))
    with pytest.raises(ValueError, match=r"a\.0: states and seen must be trees of DelayedState, got float32 \(3,\)"):
        bfp.update_scales({"a": [jnp.ones(3)]}, {"a": [state]}, "fp8_delayed")
    with pytest.raises(ValueError, match=r"a\.0: a state of recipe fp8_delayed has histories \[\.\., 1024\]"):
        bfp.update_scales({"a": [state]}, {"a": [short]}, "fp8_delayed")
    with pytest.raises(ValueError, match=r"a: trees differ: expected list of 0, got list of 0, 1"):
        bfp.update_scales({"a": [state]}, {"a": [state, state]}, "fp8_delayed")
    with pytest.raises(ValueError, match="mesh axis 'data' is unknown here"):
        bfp.update_scales({"a": state}, {"a": state}, "fp8_delayed", axes=("data",))


def steps(optimizer, params, state, count):
    @jax.jit
    def step(params, state, x):
        gradients = bfp.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state

    for i in range(count):
        params, state = step(params, state, jnp.asarray(sample("gaussian", (8, 64), seed=i)))
    return params, state


@pytest.mark.parametrize("make", [lambda: bfp.adamw(1e-2), lambda: bfp.with_masters(optax.adamw(1e-2, weight_decay=1e-2))])
def test_codes_are_those_of_the_masters(make, params):
    optimizer = make()
    params["head"][0] = params["head"][0].astype("bfloat16")
    q = bfp.quantize_params(params, "mxfp8", filter_fn=lambda path, leaf: path == "layers.up")
    state = optimizer.init(q, params)
    np.testing.assert_array_equal(state.masters["layers"]["up"], params["layers"]["up"])
    assert state.masters["layers"]["gain"] is None
    moved, state = steps(optimizer, q, state, 2)
    master = state.masters["layers"]["up"]
    assert (master != params["layers"]["up"]).any()
    again = bfp.quantize_params({"up": master}, "mxfp8")["up"]
    assert_same_tree(moved["layers"]["up"], again)
    assert moved["head"][0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(moved["head"][0], state.masters["head"][0].astype("bfloat16"))
    assert (moved["layers"]["gain"] != 1).all()


def test_adamw_follows_the_core_formulas():
    w, g = (jnp.asarray(sample(kind, (8, 32))) for kind in ("gaussian", "integers"))
    optimizer = bfp.adamw(lambda count: 0.1 / (1 + count), weight_decay=0.1)
    state = optimizer.init(w)
    params, first, second = np.asarray(w), np.zeros((8, 32), np.float32), np.zeros((8, 32), np.float32)
    moved = w
    for i in range(3):
        c = adamw.coefficients(i + 1, 0.1 / (1 + i), (0.9, 0.999), 1e-8, 0.1)
        c = c._replace(**{name: np.float32(getattr(c, name)) for name in ("decay", "unbias2", "rate")})
        params, first, second = adamw.update(params, first, second, np.asarray(g), c)
        updates, state = optimizer.update(g, state, moved)
        moved = bfp.apply_updates(moved, updates)
    np.testing.assert_allclose(moved, params, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.inner.second, second, rtol=1e-5)
    assert state.inner.step == 3


@pytest.mark.parametrize("make", [lambda: bfp.adamw(0.0), lambda: bfp.with_masters(optax.sgd(0.0))])
def test_a_step_that_moves_nothing_keeps_codes_and_scales(make, params):
    # Codes of the values that these codes stand for would have other scales.
    q = bfp.quantize_params(params, "fp8_block", filter_fn=only_weights)
    optimizer = make()
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(q), q)
    assert_same_tree(bfp.apply_updates(q, updates), q)


def test_a_rate_that_is_known_to_move_weights_writes_codes_once(params):
    q = bfp.quantize_params(params, "fp8_block", filter_fn=only_weights)
    for rate, chooses in ((1e-3, False), (0.0, True), (1e-60, True), (lambda step: 1e-3 / (1 + step), True)):
        optimizer = bfp.adamw(rate)
        state = optimizer.init(q)
        program = str(jax.make_jaxpr(lambda g, state: optimizer.update(g, state, q)[0])(params, state))  # noqa: B023
        assert bool(re.search(r":u8\[[^\n]*= select_n", program)) is chooses


def test_optax_refuses_replacements_and_chains_go_inside(params):
    q = bfp.quantize_params(params, "mxfp8", filter_fn=only_weights)
    optimizer = bfp.with_masters(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)))
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(q), q)
    with pytest.raises(TypeError, match=r"use blockfp\.jax\.apply_updates"):
        optax.apply_updates(q, updates)
