"""qwix's interception with blockfp's provider: one rule, and the numbers of the same layers written with blockfp's products."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documented import run_documented
from flax import linen, nnx

import blockfp.jax as bfp

qwix = pytest.importorskip("qwix")
adapter = pytest.importorskip("blockfp.integrations.qwix")

pytestmark = [
    pytest.mark.usefixtures("little_optimization"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flax, about what qwix asks it for
]

X = jax.random.normal(jax.random.key(0), (4, 32, 64))
MATMUL = (((2,), (0,)), ((), ()))


def provider(**rule):
    return adapter.BlockfpProvider([adapter.BlockfpRule(**rule)])


class Linen(linen.Module):
    """Dense layers, an einsum with the weight first, attention between activations."""

    product: object = None

    @linen.compact
    def __call__(self, x):
        dense = partial(linen.Dense, dot_general=self.product)
        h = linen.gelu(dense(96, name="up")(x))
        scores = jnp.einsum("bid,bjd->bij", h, h)
        h = jnp.einsum("bij,bjd->bid", linen.softmax(scores), h)
        w = self.param("down", linen.initializers.lecun_normal(), (64, 96))
        y = jnp.einsum("od,btd->bto", w, h) if self.product is None else self.product(h, w.T, MATMUL)
        return x + y


def test_linen_gives_the_bits_of_layers_with_blockfps_products():
    model = qwix.quantize_model(Linen(), provider(recipe="mxfp8"))
    variables = model.init(jax.random.key(1), X)
    plain = Linen(product=partial(bfp.dot_general, recipe="mxfp8"))

    def loss(model, params):
        return jnp.square(model.apply(params, X)).mean()

    found, expected = (jax.jit(jax.value_and_grad(partial(loss, one)))(variables) for one in (model, plain))
    high = jax.value_and_grad(partial(loss, Linen()))(variables)
    assert found[0] == expected[0] != high[0]
    for a, b, c in zip(*map(jax.tree.leaves, (found[1], expected[1], high[1])), strict=True):
        np.testing.assert_array_equal(a, b)
        if a.ndim == 2:
            assert (a != c).any()
            np.testing.assert_allclose(a, c, atol=0.1 * float(jnp.abs(c).max()))


class Nnx(nnx.Module):
    def __init__(self, rngs, product=jax.lax.dot_general):
        self.up = nnx.Linear(64, 96, rngs=rngs, dot_general=product)
        self.head = nnx.Linear(96, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.up(x)))


def test_nnx_and_a_rule_for_some_layers():
    plain = Nnx(nnx.Rngs(0), partial(bfp.dot_general, recipe="fp8_block"))
    model = qwix.quantize_model(Nnx(nnx.Rngs(0)), provider(module_path="up", recipe="fp8_block"), X)
    run = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean()))
    (value, gradients), (expected, wanted) = run(model, X), run(plain, X)
    assert value == expected
    np.testing.assert_array_equal(gradients["up"]["kernel"].get_value(), wanted["up"]["kernel"].get_value())
    np.testing.assert_array_equal(gradients["head"]["kernel"].get_value(), wanted["head"]["kernel"].get_value())


class Ragged(linen.Module):
    @linen.compact
    def __call__(self, x, sizes):
        w = self.param("w", linen.initializers.lecun_normal(batch_axis=0), (3, 64, 32))
        return jax.lax.ragged_dot(x, w, sizes)


def test_experts_by_ragged_dot():
    x, sizes = X.reshape(-1, 64), jnp.array([40, 0, 88], jnp.int32)
    model = qwix.quantize_model(Ragged(), provider(recipe="mxfp8"))
    variables = model.init(jax.random.key(1), x, sizes)
    expected = bfp.grouped_linear(x, variables["params"]["w"].mT, sizes, recipe="mxfp8")
    np.testing.assert_array_equal(model.apply(variables, x, sizes), expected)


def test_random_rounding_draws_keys():
    model = qwix.quantize_model(Linen(), provider(recipe="nvfp4"))
    keys = [{"params": jax.random.key(1), "stochastic_rounding": jax.random.key(i)} for i in range(2)]
    variables = model.init(keys[0], X)
    loss = jax.jit(lambda params, key: jnp.square(model.apply(params, X, rngs={"stochastic_rounding": key})).mean())
    first, again, other = (jax.grad(loss)(variables, keys[i]["stochastic_rounding"])["params"]["down"] for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_wrong_rules_are_refused():
    with pytest.raises(TypeError, match="BlockfpRules, got QuantizationRule"):
        adapter.BlockfpProvider([qwix.QuantizationRule(weight_qtype="int8")])
    with pytest.raises(ValueError, match="weight_qtype and act_qtype must be None"):
        provider(recipe="mxfp8", weight_qtype="int8")
    with pytest.raises(ValueError, match="delayed scaling"):
        provider(recipe="fp8_delayed")


def test_the_documented_lines():
    model = run_documented("qwix", model=Linen())["model"]
    assert model.init(jax.random.key(0), X)["params"].keys() == {"up", "down"}
