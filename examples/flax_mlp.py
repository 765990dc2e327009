"""Quantized products inside flax.nnx modules as they are: each Linear gets another dot_general."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import blockfp.jax as bfp

quantized = partial(bfp.dot_general, recipe="mxfp8")


class Mlp(nnx.Module):
    """Two layers of nnx's own, their three products in MXFP8."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, dot_general=quantized, rngs=rngs)
        self.down = nnx.Linear(hidden, width, dot_general=quantized, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@nnx.jit
def step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
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
