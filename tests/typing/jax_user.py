"""A user's lines with the JAX face. mypy and pyright read them; nothing runs them (see tests/README.md)."""

from typing import assert_type

import jax
import jax.numpy as jnp

import blockfp.jax as bfp

x, w = jnp.ones((64, 128)), jnp.ones((256, 128))
q = bfp.quantize(w, "mxfp8_e4m3_32x32", key=jax.random.key(0))
assert_type(q, bfp.QuantizedArray)
assert_type(q.dequantize(), jax.Array)
assert_type(bfp.fake_quantize(x, "nvfp4"), jax.Array)

# Without a state a product is an array; with one, a pair.
assert_type(bfp.linear(x, q, recipe="mxfp8"), jax.Array)
assert_type(bfp.linear(x, x, recipe="mxfp8", up=x, activation="silu"), jax.Array)
state = bfp.delayed_state("fp8_delayed")
assert_type(state, bfp.DelayedState)
y, seen = bfp.linear(x, w, recipe="fp8_delayed", state=state)
assert_type(y, jax.Array)
assert_type(seen, bfp.DelayedState)
own: bfp.LayerState = bfp.init_state("mxfp8", {"w": w})["w"]
assert_type(bfp.linear(x, w, state=own), tuple[jax.Array, bfp.LayerState])
assert_type(bfp.grouped_linear(x, jnp.ones((4, 256, 128)), jnp.ones(4, int), recipe="mxfp8"), jax.Array)
assert_type(bfp.dot_general(x, w, (((1,), (1,)), ((), ())), recipe="mxfp8"), jax.Array)

# Wrong:
bfp.quantize(w, "mxfp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.linear(x, q, recipe="mxpf8")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
bfp.linear(x, q)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
bfp.linear(x, w, recipe="fp8_delayed", state=state).sum()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
bfp.quantize_params({"w": w}, "fp4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
