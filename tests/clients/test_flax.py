"""Flax: state dicts and msgpack of quantized arrays, whatever is imported first."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp

X = jnp.asarray(sample("bf16_valued", (6, 40), "bfloat16"))


def tree(format):
    return {"w": bfp.quantize(X, format), "layers": [bfp.quantize(X, "nvfp4")], "plain": X[0]}


def test_there_and_back():
    for target in (tree("mxfp8_e4m3"), jax.eval_shape(lambda: tree("mxfp8_e4m3"))):
        restored = serialization.from_bytes(target, serialization.to_bytes(tree("mxfp8_e4m3")))
        assert_same_tree(restored, tree("mxfp8_e4m3"))
    state = serialization.to_state_dict(tree("mxfp8_e4m3"))
    assert list(state["w"]) == ["codes_mxfp8_e4m3_bfloat16_40", "scales"]
    assert_same_tree(serialization.from_state_dict(tree("mxfp8_e4m3"), state), tree("mxfp8_e4m3"))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxint8", "mxfp8_e4m3_floor", "nvfp4"])
def test_into_another_format_raises(format):
    data = serialization.to_bytes(tree("mxfp8_e4m3"))
    message = rf"\./w: the target has codes_{format}_bfloat16_40, .*the restored state has codes_mxfp8_e4m3_bfloat16_40"
    with pytest.raises(ValueError, match=message):
        serialization.from_bytes(tree(format), data)


def test_into_another_shape_raises():
    data = serialization.to_bytes(tree("mxfp8_e4m3"))
    with pytest.raises(ValueError, match=r"\./w: codes_mxfp8_e4m3_bfloat16_40 is uint8 \(5, 40\) in the target"):
        serialization.from_bytes(tree("mxfp8_e4m3") | {"w": bfp.quantize(X[:5], "mxfp8_e4m3")}, data)
    with pytest.raises(ValueError, match=r"\./w: the target has codes_.* the restored state has ndarray"):
        serialization.from_bytes(tree("mxfp8_e4m3"), serialization.to_bytes(tree("mxfp8_e4m3") | {"w": np.zeros(3)}))


def test_without_a_target():
    restored = serialization.msgpack_restore(serialization.to_bytes(tree("mxfp8_e4m3")))
    rebuilt = bfp.rebuild_params(restored)
    assert_same_tree(rebuilt["w"], tree("mxfp8_e4m3")["w"])
    assert_same_tree(rebuilt["layers"]["0"], tree("mxfp8_e4m3")["layers"][0])


def test_a_train_state():
    """flax.training's own, with an optax optimizer over quantized parameters."""
    params = {"w": bfp.quantize(X, "mxfp8_e4m3_32x32")}
    state = TrainState.create(apply_fn=None, params=params, tx=bfp.with_masters(optax.lion(0.1)))
    assert_same_tree(serialization.from_bytes(state, serialization.to_bytes(state)), state)


def test_gradients_are_applied_by_blockfp():
    """`apply_gradients` and `nnx.Optimizer` would add to codes."""
    params = {"w": bfp.quantize(X, "mxfp8_e4m3_32x32")}
    state = TrainState.create(apply_fn=None, params=params, tx=bfp.with_masters(optax.lion(0.1)))
    with pytest.raises(TypeError, match=r"apply_gradients .* can't add to codes: use blockfp\.jax\.apply_updates"):
        state.apply_gradients(grads={"w": jnp.ones_like(X)})
    codes = jax.tree.map(lambda part: jnp.ones_like(part), params)
    with pytest.raises(TypeError, match=r"can't add to codes"):
        optax.apply_updates(params, codes)


@pytest.mark.parametrize(
    "order", ["import flax.serialization, blockfp.jax as bfp", "import blockfp.jax as bfp, flax.serialization"]
)
def test_whatever_is_imported_first(order):
    program = f"""{order}
import jax.numpy as jnp
q = bfp.quantize(jnp.ones((4, 64)), "mxfp8_e4m3")
print(*flax.serialization.to_state_dict(q))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["codes_mxfp8_e4m3_float32_64", "scales"]


def test_flax_is_not_imported_unasked():
    program = """import sys, jax.numpy as jnp, blockfp.jax as bfp
bfp.quantize(jnp.ones((4, 64)), "nvfp4")
print("flax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
