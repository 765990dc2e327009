"""Equinox: files of leaves without names, which say the format all the same, and trees split by filters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp

X = jnp.asarray(sample("bf16_valued", (6, 40), "bfloat16"))


class Model(eqx.Module):
    weight: bfp.QuantizedArray
    head: eqx.nn.Linear
    steps: int

    def __init__(self, format, x=X):
        self.weight = bfp.quantize(x, format)
        self.head = eqx.nn.Linear(6, 3, key=jax.random.key(0))
        self.steps = 5


@pytest.fixture
def path(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", Model("mxfp8_e4m3"))
    return tmp_path / "model.eqx"


def test_into_the_same_format(path):
    for like in (Model("mxfp8_e4m3"), eqx.filter_eval_shape(Model, "mxfp8_e4m3")):
        restored = eqx.tree_deserialise_leaves(path, like)
        assert_same_tree(eqx.filter(restored, eqx.is_array), eqx.filter(Model("mxfp8_e4m3"), eqx.is_array))
        assert eqx.tree_equal(restored, Model("mxfp8_e4m3"))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxint8", "mxfp8_e4m3_floor", "mxfp8_e4m3_32x32", "nvfp4"])
def test_into_another_format_raises(format, path):
    for like in (Model(format), eqx.filter_eval_shape(Model, format)):
        with pytest.raises(RuntimeError) as raised:
            eqx.tree_deserialise_leaves(path, like)
        chain = (raised.value, raised.value.__cause__, raised.value.__context__)
        said = f"the file has codes_mxfp8_e4m3_bfloat16_40, expected codes_{format}_bfloat16_40"
        assert any(said in str(error) for error in chain)


def test_into_another_dtype_raises(path):
    with pytest.raises(RuntimeError):
        eqx.tree_deserialise_leaves(path, Model("mxfp8_e4m3", X.astype("float32")))


def test_a_file_of_something_else_raises(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "plain.eqx", [jnp.zeros((6, 40), jnp.uint8), jnp.zeros((6, 2), jnp.uint8)])
    with pytest.raises((RuntimeError, ValueError)):
        eqx.tree_deserialise_leaves(tmp_path / "plain.eqx", bfp.quantize(X, "mxfp8_e4m3"))


def test_elsewhere_it_has_its_leaves_alone(path):
    """Transformations and filters of Equinox don't see the leaf that files have."""
    q = Model("nvfp4").weight
    assert len(jax.tree.leaves(eqx.filter(q, eqx.is_array))) == 3
    values = eqx.filter_jit(lambda model: model.weight.dequantize())(Model("nvfp4"))
    np.testing.assert_array_equal(values, q.dequantize())
    arrays, rest = eqx.partition(Model("nvfp4"), eqx.is_array)
    assert eqx.tree_equal(eqx.combine(arrays, rest), Model("nvfp4"))
    assert not eqx.tree_equal(Model("mxfp8_e4m3"), Model("mxfp8_e5m2"))


def test_gradients_of_a_model():
    """`eqx.filter_grad` splits the codes off and says so; ours differentiates models, the other leaves left out by a filter."""
    model, x = Model("mxfp8_e4m3"), jnp.asarray(sample("gaussian", (3, 40)))
    arrays, rest = eqx.partition(
        model,
        lambda leaf: bfp.QuantizedArray in type(leaf).__mro__ or eqx.is_inexact_array(leaf),
        is_leaf=lambda n: isinstance(n, bfp.QuantizedArray),
    )

    def loss(arrays):
        model = eqx.combine(arrays, rest, is_leaf=lambda n: isinstance(n, bfp.QuantizedArray))
        return jnp.sum(jax.vmap(model.head)(x @ model.weight.dequantize("float32").T))

    gradients = bfp.grad(loss)(arrays)
    expected = jax.grad(lambda w: jnp.sum(jax.vmap(model.head)(x @ w.T)))(model.weight.dequantize("float32"))
    np.testing.assert_allclose(gradients.weight.astype("float32"), expected, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(gradients.head.bias, 3 * np.ones(3))


def test_derivatives_that_leave_codes_out_raise():
    """Equinox has None for what is not inexact: a step of one's own leaves such weights as they are, and says nothing."""
    model, x = Model("mxfp8_e4m3", X.astype("float32")), jnp.asarray(sample("gaussian", (3, 40)))

    def f(model, x):
        return jax.vmap(model.head)(x @ model.weight.dequantize().T)

    for derivative in (eqx.filter_vjp, lambda f, *args: eqx.filter_jit(eqx.filter_vjp)(f, *args)):
        with pytest.raises(
            TypeError, match=r"no gradients for codes.*use blockfp.jax.grad, for a vjp of lambda model: jnp.vdot"
        ):
            derivative(f, model, x)
    for jacobian in (eqx.filter_jacrev, eqx.filter_jacfwd, eqx.filter_hessian):
        with pytest.raises(TypeError, match="no gradients for codes"):
            jacobian(f)(model, x)

    # What the message says.
    cotangent = jnp.asarray(sample("gaussian", (3, 3)))
    values = eqx.tree_at(lambda model: model.weight, model, model.weight.dequantize())
    expected = jax.vjp(lambda w, b: x @ w.T @ model.head.weight.T + b, values.weight, model.head.bias)[1](cotangent)
    arrays, rest = eqx.partition(
        model, lambda leaf: isinstance(leaf, bfp.QuantizedArray) or eqx.is_inexact_array(leaf), is_leaf=whole
    )
    gradient = bfp.grad(lambda arrays: jnp.vdot(f(eqx.combine(arrays, rest, is_leaf=whole), x), cotangent))(arrays)
    np.testing.assert_allclose(gradient.weight, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient.head.bias, expected[1], rtol=1e-5, atol=1e-5)
    _, pullback = eqx.filter_vjp(lambda x: f(model, x), x)
    np.testing.assert_allclose(pullback(cotangent)[0], cotangent @ model.head.weight @ values.weight, rtol=1e-5, atol=1e-5)

    # A carrier has a place for the gradient.
    q, cotangent = model.weight.with_carrier(), jnp.asarray(sample("gaussian", (3, 6)))
    for run in (lambda f: f, eqx.filter_jit):
        found, _ = run(lambda q, x: eqx.filter_vjp(lambda q, x: x @ q.dequantize().T, q, x)[1](cotangent))(q, x)
        np.testing.assert_allclose(found.tangent, cotangent.T @ x, rtol=1e-5, atol=1e-5)


def whole(node):
    return isinstance(node, bfp.QuantizedArray)


def test_updates_are_not_added_to_codes():
    model = eqx.filter(Model("mxfp8_e4m3"), eqx.is_array)
    with pytest.raises(TypeError, match="equinox would calculate with the codes of a QuantizedArray"):
        eqx.apply_updates(model, model)
