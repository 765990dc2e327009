"""Quantized products inside unmodified flax.nnx modules: each Linear gets another dot_general.

With delayed scaling, dot_general is itself a module, which keeps the layer's state; the backward's amaxes are that state's
"gradient".
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import blockfp.jax as bfp


class Delayed(nnx.Variable):
    """The state of a layer's delayed scaling."""


class DelayedProduct(nnx.Module):
    """`lax.dot_general` in FP8 with delayed scaling."""

    def __init__(self):
        self.state = Delayed(bfp.delayed_state("fp8_delayed"))

    def __call__(self, *args, **options):
        y, state = bfp.dot_general(*args, **options, recipe="fp8_delayed", state=self.state.get_value())
        self.state.set_value(state)
        return y


class Mlp(nnx.Module):
    """Two nnx Linear layers: one multiplies in MXFP8, the other in FP8 with delayed scaling."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, dot_general=partial(bfp.dot_general, recipe="mxfp8"), rngs=rngs)
        self.down = nnx.Linear(hidden, width, dot_general=DelayedProduct(), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@nnx.jit
def step(model, optimizer, x, y):
    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, Delayed))
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2), argnums=wanted)(model)
    seen, gradients = nnx.split_state(gradients, Delayed, ...)
    optimizer.update(model, gradients)
    nnx.update(model, bfp.update_scales(nnx.state(model, Delayed), seen, "fp8_delayed"))
    return loss


def main(steps: int = 20) -> list[float]:
    model = Mlp(64, 256, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (128, 64))
    losses = [float(step(model, optimizer, x, jnp.roll(x, 1, axis=-1))) for _ in range(steps)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
