"""Quantized weights in an equinox module: its Linear layers stay, and their weights become codes and scales."""

import equinox as eqx
import jax
import jax.numpy as jnp

import blockfp.jax as bfp


class Mlp(eqx.Module):
    """Two equinox Linear layers; `bfp.linear` multiplies by their weights, quantized or not."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, key):
        keys = jax.random.split(key)
        self.up = eqx.nn.Linear(width, hidden, key=keys[0])
        self.down = eqx.nn.Linear(hidden, width, key=keys[1])

    def __call__(self, x):
        hidden = jax.nn.gelu(bfp.linear(x, self.up.weight, self.up.bias, recipe="mxfp8"))
        return x + bfp.linear(hidden, self.down.weight, self.down.bias, recipe="mxfp8")


@eqx.filter_jit
def step(model, state, optimizer, x, y):
    loss, gradients = bfp.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    updates, state = optimizer.update(gradients, state, model)
    return bfp.apply_updates(model, updates), state, loss


def main(steps: int = 20) -> list[float]:
    original = Mlp(64, 256, jax.random.key(0))
    model = bfp.quantize_params(original, "mxfp8")  # weights; biases have one axis and stay
    optimizer = bfp.adamw(1e-2)
    state, losses = optimizer.init(model, original), []
    x = jax.random.normal(jax.random.key(1), (128, 64))
    for _ in range(steps):
        model, state, loss = step(model, state, optimizer, x, jnp.roll(x, 1, axis=-1))
        losses.append(float(loss))
    print(f"{model.up.weight}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
