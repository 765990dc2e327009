"""Trees in files: safetensors for NumPy, JAX and PyTorch, Orbax onto another mesh; all to the bit."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import CASES
from same_trees import assert_same_tree
from samples import sample

import blockfp
import blockfp.jax as bfp
from blockfp.errors import BadFile

FSDP, TP = CASES["FSDP 8"], CASES["FSDP 4 x TP 2, row"]


@pytest.fixture(scope="module")
def tree():
    w = [jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((82, 40), (96, 64)))]
    return {
        "layers": [{"up": bfp.quantize(w[0], "mxfp6_e3m2_32x32"), "bias": jnp.arange(5, dtype="bfloat16")}],
        "head": bfp.quantize(w[1].astype("bfloat16"), "nvfp4_16x16"),
        "step": jnp.int32(7),
        "small": jnp.ones((4, 4), "float8_e4m3fn"),
    }


@pytest.fixture(scope="module")
def bfp_torch():
    pytest.importorskip("torch")
    return pytest.importorskip("blockfp.torch")


@pytest.fixture(scope="module")
def placed(tree):
    return bfp.shard_params(
        tree,
        FSDP.mesh,
        {"layers": P("fsdp"), "head": P("fsdp"), "step": P(), "small": P()} | {"layers": [{"up": P("fsdp"), "bias": P()}]},
    )


@pytest.mark.parametrize("file_bytes", [None, 4000], ids=["one", "several"])
def test_every_framework_reads_and_writes_it(tree, placed, file_bytes, tmp_path, bfp_torch):
    paths = [tmp_path / name / "model.safetensors" for name in ("jax", "numpy", "torch")]
    for path in paths:
        path.parent.mkdir()
    bfp.save(paths[0], placed, file_bytes=file_bytes, metadata={"by": "jax"})
    assert (tmp_path / "jax" / "model.safetensors.index.json").exists() == (file_bytes is not None)
    blockfp.save(paths[1], blockfp.load(paths[0]), file_bytes=file_bytes)
    bfp_torch.save(paths[2], bfp_torch.load(paths[1].parent), file_bytes=file_bytes)
    for path in paths:
        assert_same_tree(bfp.load(path, jax.eval_shape(lambda: tree)), tree)
    arrays, tensors = blockfp.load(paths[2]), bfp_torch.load(paths[2])
    assert set(arrays) == set(tensors) == {"layers.0.up", "layers.0.bias", "head", "step", "small"}
    up, q = tensors["layers.0.up"], tree["layers"][0]["up"]
    assert (up.format, str(up.dtype), tuple(up.shape)) == (q.format, "torch.float32", (82, 40))
    np.testing.assert_array_equal(up.codes.numpy(), q.codes)
    assert arrays["head"].dtype.name == "bfloat16"
    assert str(tensors["small"].dtype) == "torch.float8_e4m3fn"


def test_saving_over_a_file_leaves_one_of_both_kinds(tmp_path):
    path, arrays = tmp_path / "model.safetensors", {str(i): np.full((8, 32), i, np.float32) for i in range(3)}
    blockfp.save(path, arrays, file_bytes=1)
    assert not path.exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["0", "1", "2"]
    assert index["metadata"]["total_size"] == 3 * 8 * 32 * 4
    assert set(blockfp.load(path)) == set(blockfp.load(tmp_path)) == set(arrays)
    blockfp.save(path, {"only": arrays["0"]})
    assert set(blockfp.load(tmp_path)) == {"only"}


def test_a_stack_with_a_scale_for_each_matrix_is_taken_apart(tmp_path, bfp_torch):
    """As many arrays as it has matrices, which NumPy and PyTorch read; JAX puts them together again."""
    w = sample("exponents", (2, 3, 8, 32))
    tree = {
        "fp8": bfp.quantize_params(w[0], "fp8_current"),
        "nvfp4": bfp.quantize_params(w, "nvfp4"),
        "shared": bfp.quantize(w[0], "fp8_e4m3"),
        "single": bfp.quantize_params(w[0, :1], "nvfp4"),
    }
    path = tmp_path / "model.safetensors"
    bfp.save(path, tree)
    assert_same_tree(bfp.load(path, jax.eval_shape(lambda: tree)), tree)
    arrays, tensors = blockfp.load(path), bfp_torch.load(path)
    names = {f"fp8.{i}" for i in range(3)} | {f"nvfp4.{i}.{j}" for i in range(2) for j in range(3)}
    assert set(arrays) == set(tensors) == names | {"shared", "single.0"}
    q = tree["nvfp4"]
    for found in (arrays["nvfp4.1.2"], tensors["nvfp4.1.2"]):
        assert tuple(found.shape) == (8, 32)
        for part in ("codes", "scales", "tensor_scale"):
            np.testing.assert_array_equal(getattr(found, part), getattr(q, part)[1, 2])
    # What another framework wrote so is a stack too.
    blockfp.save(path, arrays)
    assert_same_tree(bfp.load(path, tree), tree)


def test_bad_files_and_leaves(tree, placed, tmp_path):
    path = tmp_path / "model.safetensors"
    bfp.save(path, tree)
    with pytest.raises(ValueError, match=r"head: .* has 'head' as nvfp4_16x16 of bfloat16 \(96, 64\), expected float32 \(3,\)"):
        bfp.load(path, tree | {"head": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"layers\.1\.bias: .* has no tensor 'layers\.1\.bias'"):
        bfp.load(path, {"layers": [tree["layers"][0], tree["layers"][0]]})
    with pytest.raises(BadFile, match="'head': it is a shard, not a whole array"):
        blockfp.save(path, {"head": placed["head"]})
    with pytest.raises(BadFile, match="'w_scale': its name is needed"):
        blockfp.save(path, {"w": blockfp.quantize(np.ones((4, 32), np.float32), "mxint8"), "w_scale": np.ones(3)})
    with pytest.raises(BadFile, match=r"must end in \.safetensors"):
        blockfp.save(tmp_path / "model.npz", {})
    with pytest.raises(BadFile, match="'a': it must be an array, got list"):
        blockfp.save(path, {"a": [1]})
    with pytest.raises(BadFile, match="'k': dtype key<fry> can't be stored"):
        bfp.save(path, {"k": jax.random.key(0)})
    stack = bfp.quantize_params(jnp.ones((3, 8, 32)), "fp8_current")
    with pytest.raises(ValueError, match=r"two leaves have the same path, 'a\.2'"):
        bfp.save(path, {"a": stack, "a.2": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"a: .* has no tensor 'a\.0'"):
        bfp.load(path, {"a": stack})
    with pytest.raises(ValueError, match="two leaves have the same path"):
        bfp.save(path, {"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}})
    index = tmp_path / "other.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "../elsewhere.safetensors"}}')
    with pytest.raises(BadFile, match="names files outside its folder"):
        blockfp.load(index)
    index.write_text('{"weight_map": {"x": "model.safetensors"}}')
    with pytest.raises(BadFile, match="names tensors that its files lack: x"):
        blockfp.load(index)
    # What could not be written left what was there.
    assert set(blockfp.load(path)) == {"layers.0.up", "layers.0.bias", "head", "step", "small"}


def test_64_bits_come_without_a_change_or_not_at_all(tmp_path):
    path = tmp_path / "model.safetensors"
    small = {"step": np.array(7), "half": np.array([0.5, np.nan, -np.inf])}
    blockfp.save(path, small)
    loaded = bfp.load(path)
    for name, x in small.items():
        np.testing.assert_array_equal(loaded[name], x)
        assert loaded[name].dtype.itemsize == 4
    with pytest.raises(
        ValueError, match=r"expected float64 \(3,\) \(it is float64 in the file, which JAX keeps with jax_enable"
    ):
        bfp.load(path, small)
    for x in (np.array(2**31), np.array([1 / 3]), np.array([1e300]), np.array([2**32], np.uint64)):
        blockfp.save(path, {"x": x})
        with pytest.raises(BadFile, match=f"tensor 'x': its values need {x.dtype}, .* jax_enable_x64"):
            bfp.load(path)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(bfp.load(path)["x"], x)


def test_orbax_onto_another_mesh(tree, placed, tmp_path):
    with warnings.catch_warnings():
        # Orbax and what it imports remark on themselves.
        warnings.simplefilter("ignore")
        import orbax.checkpoint as ocp

        optimizer = bfp.adamw(1e-3)
        trained = {"head": tree["head"]}
        state = optimizer.init(trained)
        saved = {"params": bfp.unshard_params(placed), "state": state}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "checkpoint", saved)
            checkpointer.wait_until_finished()
            everywhere = NamedSharding(TP.mesh, P())
            shapes = jax.eval_shape(lambda: {"params": tree, "state": state})
            target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), shapes)
            restored = checkpointer.restore(tmp_path / "checkpoint", target)
    assert_same_tree(restored["params"], tree)
    assert_same_tree(restored["state"], state)
    specs = {"layers": [{"up": P(("tp", "fsdp")), "bias": P()}], "head": P("fsdp", "tp"), "step": P(), "small": P()}
    again = bfp.shard_params(restored["params"], TP.mesh, specs)
    assert_same_tree(bfp.unshard_params(again), tree)
