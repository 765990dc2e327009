"""`linear(.., activation=, up=)`: an activation before a layer."""

import re

import emulated_cuda_in_jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockfp.jax as bfp

PLAIN = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def arrays(dtype=jnp.float32):
    shapes = ((96, 64), (96, 64), (48, 64))
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


def squares(recipe, activation, **options):
    def loss(gate, up, w):
        y = bfp.linear(gate, w, recipe=recipe, up=up, activation=activation, **options)
        return (y.astype(jnp.float32) ** 2).sum()

    return loss


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("gated", [True, False])
def test_it_is_the_layer_of_the_activations_output(activation, gated):
    gate, up, w = arrays()
    up = up if gated else None
    made = PLAIN[activation](np.asarray(gate, np.float64)) * (1 if up is None else np.asarray(up, np.float64))
    wanted = bfp.linear(jnp.asarray(made, jnp.float32), w, recipe="fp8_block")
    found = bfp.linear(gate, w, recipe="fp8_block", up=up, activation=activation)
    # Codes at the border between two values may differ.
    assert jnp.linalg.norm(found - wanted) <= 0.01 * jnp.linalg.norm(wanted)


def test_derivatives_of_both_orders():
    gate, up, w = arrays()

    def apart(gate, up, w):
        return (bfp.linear(jax.nn.silu(gate) * up, w, recipe="mxfp8").astype(jnp.float32) ** 2).sum()

    for order in (1, 2):

        def found(loss, order=order):
            first = jax.grad(loss, (0, 1, 2))
            if order == 1:
                return first(gate, up, w)
            return jax.grad(lambda *args: sum((one**2).sum() for one in first(*args)), (0, 1))(gate, up, w)

        for ours, theirs in zip(found(squares("mxfp8", "silu")), found(apart), strict=True):
            assert jnp.linalg.norm(ours - theirs) <= 0.02 * jnp.linalg.norm(theirs)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4"])
def test_the_cuda_library_casts_what_it_makes(recipe):
    args, key = arrays(jnp.bfloat16), 3 if recipe == "nvfp4" else None
    step = jax.value_and_grad(squares(recipe, "silu", key=key), (0, 1, 2))
    wanted = jax.jit(step)(*args)
    with emulated_cuda_in_jax.launches():
        found = jax.block_until_ready(jax.jit(step)(*args))
        assert sum(name.startswith("quantize_gated") for name in emulated_cuda_in_jax.calls) == 1
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 0.05 * np.linalg.norm(theirs)


def test_a_scan_keeps_gate_up_and_codes_alone():
    gate, up, w = arrays(jnp.bfloat16)
    stack = jnp.stack([w] * 3)

    def loss(gate, up, stack):
        def layer(carry, w):
            g, u = carry * gate, carry * up
            y = bfp.linear(g, w, recipe="fp8_block", up=u, activation="silu")
            return carry + y.mean(), None

        return jax.lax.scan(layer, jnp.ones((), jnp.bfloat16), stack)[0].astype(jnp.float32)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(gate, up, stack).compile().as_text()
    forward = next(line.split(" while(")[0] for line in compiled.splitlines() if " while(" in line)
    assert sorted(re.findall(r"(\w+)\[3,(?:96,64|64,96)\]", forward)) == ["bf16", "bf16", "u8"]


def test_bad_input_raises():
    gate, up, w = arrays()
    with pytest.raises(ValueError, match=r"activation must be None or one of silu, gelu_tanh, gelu, relu2, got 'swish'"):
        bfp.linear(gate, w, recipe="mxfp8", activation="swish")
    with pytest.raises(ValueError, match=r"pass activation='silu'"):
        bfp.linear(gate, w, recipe="mxfp8", up=up)
    with pytest.raises(ValueError, match=r"up must be as x, float32 \(96, 64\), got float32 \(5, 64\)"):
        bfp.linear(gate, w, recipe="mxfp8", up=up[:5], activation="silu")
