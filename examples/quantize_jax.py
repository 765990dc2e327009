"""Quantized arrays inside a JAX program: under jit, with a gradient, with stochastic rounding."""

import jax
import jax.numpy as jnp

import blockfp.jax as bfp

key = jax.random.key(0)
x = jax.random.normal(key, (256, 1024), jnp.bfloat16)
w = jax.random.normal(jax.random.fold_in(key, 1), (512, 1024), jnp.bfloat16)


@jax.jit
def loss(w):
    xq = bfp.quantize(x, "mxfp8_e4m3")
    wq = bfp.quantize(w, "mxfp8_e4m3_32x32")  # square blocks: wq.mT is exact
    y = xq.dequantize() @ wq.dequantize().T
    return (y.astype(jnp.float32) ** 2).mean()


print("loss", loss(w))
print("gradient, straight through the quantization:", jax.grad(loss)(w).dtype, jax.grad(loss)(w).shape)

q = bfp.quantize(x, "nvfp4", key=42)
print(q, "codes", q.codes.shape, "scales", q.scales.shape, "tensor scale", q.tensor_scale)

# A quantized array is a tree of arrays: it is returned from jit, stacked by vmap, carried by scan.
stack = jax.vmap(lambda m: bfp.quantize(m, "mxfp4_e2m1"))(x.reshape(4, 64, 1024))
print(stack)
