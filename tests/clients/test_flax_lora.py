"""Adapters of Flax models whose kernels are quantized: LoRA beside layers, and inside them, where it would be lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from same_trees import assert_same_tree

import blockfp.jax as bfp
from blockfp.integrations.flax import convert

pytestmark = pytest.mark.usefixtures("little_optimization")

X = jax.random.normal(jax.random.key(0), (4, 16, 64))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(64, name="up")(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax, about what qwix asks it for
def test_adapters_inside_a_layer_are_refused():
    """qwix's LoRA adds to a layer's product, which the product of codes would take the place of: no gradient, no word."""
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path="up", rank=4, alpha=2.0)
    model = qwix.apply_lora_to_model(Nnx(nnx.Rngs(0)), provider, X, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"up holds kernel_lora_a, kernel_lora_b, like layers adapted by qwix's LoRA"):
        convert(model, "mxfp8")
    assert type(model.up) is nnx.Linear
    plain = qwix.apply_lora_to_model(Linen(), provider)
    for model in (convert(plain, "mxfp8"), qwix.apply_lora_to_model(convert(Linen(), "mxfp8"), provider)):
        with pytest.raises(ValueError, match="holds kernel_lora_a, kernel_lora_b"):
            model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="holds kernel_lora_a, kernel_lora_b"):
        convert(plain, "mxfp8").apply(plain.init(jax.random.key(0), X), X)


def test_adapters_beside_a_layer_train_while_codes_are_frozen():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base, self.lora = nnx.Linear(64, 64, rngs=rngs), nnx.LoRA(64, 4, 64, rngs=rngs)

        def __call__(self, x):
            return self.base(x) + self.lora(x)

    model = convert(Adapted(nnx.Rngs(0)), "mxfp8")
    kernel, bias = model.base.kernel.get_value(), model.base.bias.get_value()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: jnp.square(model(X) - 1).mean()  # noqa: E731
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return value

    weights = {"a": model.lora.lora_a.get_value(), "b": model.lora.lora_b.get_value()}
    adam = optax.adam(1e-2)
    state, y = adam.init(weights), bfp.linear(X, kernel.mT, bias, recipe="mxfp8")
    for _ in range(3):
        value, gradients = jax.value_and_grad(lambda w: jnp.square(y + X @ w["a"] @ w["b"] - 1).mean())(weights)
        np.testing.assert_allclose(step(model, optimizer), value, rtol=1e-5)
        updates, state = adam.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
    np.testing.assert_allclose(model.lora.lora_b.get_value(), weights["b"], rtol=1e-3, atol=1e-5)
    assert_same_tree(model.base.kernel.get_value(), kernel)
