"""Checkpoints of Orbax: the same bits back, of no other format, and arrays again where nothing says what was saved."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp

X = jnp.asarray(sample("bf16_valued", (6, 40), "bfloat16"))
STACK = jnp.asarray(sample("gaussian", (3, 16, 32)))


def tree(format):
    stack = bfp.quantize_params({"nvfp4": STACK, "fp8_current": STACK[0]}, lambda path: path)
    return {"w": bfp.quantize(X, format), "layers": [stack], "plain": X[0], "step": jnp.int32(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree("mxfp8_e4m3"))
    return path


def test_into_the_same_formats(saved):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved, jax.eval_shape(lambda: tree("mxfp8_e4m3")))
    assert_same_tree(restored, tree("mxfp8_e4m3"))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxint8", "mxfp8_e4m3_floor", "mxfp8_e4m3_32x32"])
@pytest.mark.parametrize("options", [{}, {"strict": False}], ids=["strict", "not strict"])
def test_into_another_format_raises(format, options, saved):
    like = jax.eval_shape(lambda: tree(format))
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=f"codes_{format}_bfloat16_40"):
        checkpointer.restore(saved, like, **options)


def test_into_another_dtype_or_width_raises(saved):
    for x in (X.astype("float32"), X[:, :39]):
        like = jax.eval_shape(lambda x=x: tree("mxfp8_e4m3") | {"w": bfp.quantize(x, "mxfp8_e4m3")})
        with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match="codes_mxfp8_e4m3_bfloat16_40"):
            checkpointer.restore(saved, like)


def test_without_a_target(saved):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved)
    assert_same_tree(bfp.rebuild_params(restored), tree("mxfp8_e4m3"))


def test_a_training_state(tmp_path):
    optimizer, params = bfp.adamw(0.1), {"w": bfp.quantize(X, "mxfp6_e3m2_32x32")}
    updates, state = optimizer.update({"w": jnp.ones_like(X)}, optimizer.init(params), params)
    whole = {"params": bfp.apply_updates(params, updates), "state": state}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(whole))
        manager.wait_until_finished()
        restored = manager.restore(3, args=ocp.args.StandardRestore(jax.eval_shape(lambda: whole)))
    assert_same_tree(restored, whole)


def parts(**changes):
    codes = np.zeros((4, 64), np.uint8)
    return {"w": {"codes_mxfp8_e4m3_float32_64": codes, "scales": np.zeros((4, 2), np.uint8)} | changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scales": None}, ValueError, "w: codes, scales and tensor_scale make a quantized array, got codes_mxfp8"),
        ({"scales": np.zeros((4, 3), np.uint8)}, ValueError, r"w: scales of mxfp8_e4m3 .* must have shape \(4, 2\)"),
        ({"scales": np.zeros((4, 2), np.float32)}, TypeError, "w: scales of mxfp8_e4m3 must be uint8"),
        ({"tensor_scale": np.float32(1)}, ValueError, "w: mxfp8_e4m3 has no tensor_scale"),
        ({"codes_mxfp9_float32_64": 0}, ValueError, "w: format 'mxfp9' is not known"),
        ({"codes_mxfp4_e2m1_float32_64": 0}, ValueError, "w: codes, scales and tensor_scale make a quantized array, got"),
        ({"codes_mxfp8_e4m3_float32_64_of_8_64_on_d_2_as_Shard_0": 0}, ValueError, "unshard_params"),
    ],
)
def test_parts_that_make_no_array(changes, error, message):
    with pytest.raises(error, match=message):
        bfp.rebuild_params(parts(**changes))


def test_parts_of_a_cut_array_know_how_it_was_cut():
    """Stored rows of three devices and of one can have the same shapes, and are not the same."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    params = bfp.shard_params({"w": bfp.quantize(X[:6], "mxfp8_e4m3")}, mesh, {"w": jax.sharding.PartitionSpec("d")})
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(params)
    assert path[-1].name == "codes_mxfp8_e4m3_bfloat16_40_of_6_40_on_d_4_as_Shard_0"
