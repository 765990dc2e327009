"""`blockfp.save` over what is there: the new file is whole and readable, or the old one stays as it was."""

import json

import numpy as np
import pytest
from held_formats import OTHER_CHOICES

import blockfp
from blockfp.errors import BadFile
from blockfp.files import saving

OLD = {f"w{i}": np.full((8, 32), i, np.float32) for i in range(4)}
NEW = {name: value + 100 for name, value in OLD.items()}
PAIR = 2 * OLD["w0"].nbytes


def names(folder):
    return {path.name for path in folder.iterdir()}


def assert_holds(path, arrays):
    loaded = blockfp.load(path)
    assert {name: float(x[0, 0]) for name, x in loaded.items()} == {name: float(x[0, 0]) for name, x in arrays.items()}


@pytest.mark.parametrize("after", [None, PAIR])
@pytest.mark.parametrize("before", [None, PAIR])
@pytest.mark.parametrize("parts", [0, 2, 3, 4])
def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch, before, after, parts):
    """At the first part, at the second, at the last array, and not at all; over one file and over several."""
    path = tmp_path / "model.safetensors"
    (tmp_path / "model-notes.safetensors").write_text("someone else's")
    blockfp.save(path, OLD, file_bytes=before)
    there = names(tmp_path)
    written = []

    def full(x):
        if len(written) == parts:
            raise OSError(28, "No space left on device")
        written.append(x)
        return np.asarray(x)

    if parts < len(NEW):
        with pytest.raises(OSError, match="No space left"):
            saving.write(path, NEW, full, after, {})
        assert names(tmp_path) == there
        assert_holds(path, OLD)
        return
    saving.write(path, NEW, full, after, {})
    assert_holds(path, NEW)
    assert_holds(tmp_path, NEW)
    left = names(tmp_path) - {"model-notes.safetensors"}
    if after is None:
        assert left == {"model.safetensors"}
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert left == {"model.safetensors.index.json", *index["weight_map"].values()}
        assert len(left) == 3


def test_an_index_that_is_not_ours_removes_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").write_text("")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("[", '{"weight_map": {"a": "config.json", "b": "other.safetensors", "c": "../x", "d": ""}}'):
        index.write_text(text)
        blockfp.save(tmp_path / "model.safetensors", OLD, file_bytes=PAIR)
        assert {"config.json", "other.safetensors"} < names(tmp_path)
        assert_holds(tmp_path, OLD)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({"w": OLD["w0"]}, {"metadata": {"step": 5}}, TypeError, "metadata must be strings by strings"),
        ({"w": OLD["w0"]}, {"metadata": {"blockfp": "x"}}, ValueError, "is blockfp's own"),
        ({"__metadata__": OLD["w0"]}, {}, BadFile, "a name must be a string other than '__metadata__'"),
        ({3: OLD["w0"]}, {}, BadFile, "tensor 3: a name must be a string"),
        ([OLD["w0"]], {}, TypeError, "tensors must be a mapping from names to arrays, got list"),
        ({"w": np.array(["text"])}, {}, BadFile, "tensor 'w': dtype <U4 can't be stored"),
        ({"w": OLD["w0"]}, {"file_bytes": 1.5}, ValueError, "file_bytes must be an integer of 1 or more, got 1.5"),
        ({"w": OLD["w0"]}, {"file_bytes": 0}, ValueError, "file_bytes must be an integer of 1 or more, got 0"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, arrays, options, error, message):
    path = tmp_path / "model.safetensors"
    blockfp.save(path, OLD)
    with pytest.raises(error, match=message):
        blockfp.save(path, arrays, **options)
    assert names(tmp_path) == {"model.safetensors"}
    assert_holds(path, OLD)


def test_a_tensor_that_two_files_have_is_named(tmp_path):
    blockfp.save(tmp_path / "model.safetensors", OLD, file_bytes=PAIR)
    *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    blockfp.save(last, OLD)
    with pytest.raises(BadFile, match=r"tensor 'w0': is in more than one of its files"):
        blockfp.load(tmp_path)


def test_a_damaged_index_is_named(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text in ('{"weight_map": {"x": ""}}', '{"weight_map": {"x": null}}', '{"weight_map": 3}', "[" * 100_000, "\xff"):
        index.write_text(text, encoding="latin-1")
        with pytest.raises(BadFile, match=r"model\.safetensors\.index\.json: is not an index"):
            blockfp.load(index)


def test_what_torch_cannot_save_is_named(tmp_path):
    torch = pytest.importorskip("torch")
    import blockfp.torch as bfp

    path = tmp_path / "model.safetensors"
    layer = bfp.Linear(64, 64, recipe="mxfp8", weights="high_precision")
    bfp.save(path, dict(layer.named_parameters()))
    assert torch.equal(bfp.load(path)["weight"], layer.weight.values)
    quantized = bfp.Linear(64, 64, recipe="mxfp8", device="meta").weight
    for tensor, message in (
        (torch.eye(2).to_sparse(), "it must be dense, got layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "it is on the meta device"),
        (quantized, "it is on the meta device"),
        (layer.weight[:32].detach(), "it is a shard, not a whole tensor"),
        ([1, 2], "it must be an array, got list"),
    ):
        with pytest.raises(BadFile, match=f"tensor 'w': {message}"):
            bfp.save(path, {"w": tensor})
    assert set(bfp.load(path)) == {"weight", "bias"}


def test_a_file_says_how_scales_were_chosen(tmp_path):
    """4-over-6 by each bound and error: the values are NVFP4's, the names their own."""
    x = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    made = {format.name: blockfp.quantize(x, format) for format in OTHER_CHOICES}
    blockfp.save(tmp_path / "model.safetensors", made)
    found = blockfp.load(tmp_path / "model.safetensors")
    for name, q in made.items():
        assert found[name].format.name == name
        np.testing.assert_array_equal(found[name].dequantize(), q.dequantize())
