"""A mixture of experts like Qwen3-MoE's in flax.nnx, with quantized products and tokens sent as codes.

`axis` names the mesh axis that divides the experts inside shard_map; without it all experts are on this device.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import blockfp.jax as bfp


class Experts(nnx.Module):
    """The weighted best `k` of several SwiGLU layers for each token; recipe None leaves all products in high precision."""

    def __init__(self, width, hidden, experts, k, rngs, *, recipe="mxfp8", axis=None):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (experts, 2 * hidden, width)))
        self.down = nnx.Param(init(rngs.params(), (experts, width, hidden)))
        self.experts, self.k, self.recipe, self.axis = experts, k, recipe, axis

    def __call__(self, x):
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(scores, self.k)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        received = bfp.dispatch(x, chosen, self.experts, recipe=self.recipe, axis=self.axis)
        gate, up = jnp.split(self.multiply(received.tokens, self.gate_up, received.counts), 2, axis=-1)
        y = self.multiply(nnx.silu(gate) * up, self.down, received.counts)
        return bfp.combine(y, received, weights)

    def multiply(self, x, weight, counts):
        weight = weight.get_value()
        if self.recipe is None:
            return jax.lax.ragged_dot(x, weight.mT.astype(x.dtype), counts)
        return bfp.grouped_linear(x, weight.astype(x.dtype), counts, recipe=self.recipe, expert_axis=self.axis)


class Block(nnx.Module):
    """Adds the experts' result to x."""

    def __init__(self, width, hidden, experts, k, rngs, **options):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.experts = Experts(width, hidden, experts, k, rngs, **options)

    def __call__(self, x):
        return x + self.experts(self.norm(x).astype(x.dtype))


@nnx.jit
def step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y).astype(jnp.float32) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 20, recipe: str | None = "mxfp8") -> list[float]:
    model = Block(64, 96, 8, 2, nnx.Rngs(0), recipe=recipe)
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (256, 64), jnp.bfloat16)
    losses = [float(step(model, optimizer, x, jnp.roll(x, 1, axis=-1))) for _ in range(steps)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
