"""`blockfp.save` over what is there: the new file is whole and readable, or the old one stays as it was."""

import json
import os
import stat
import warnings

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


def moved(index, name):
    return index.rename(index.with_name(name))


def copied(index, name):
    index.with_name(name).write_bytes(index.read_bytes())


def compact(index, name):
    """As another program writes the same, after some white space."""
    content = json.loads(index.read_text())
    index.with_name(name).write_text("\n  " + json.dumps(content, separators=(",", ":")))


def linked(index, name):
    (index.parent / "elsewhere").mkdir()
    index.with_name(name).symlink_to(index.rename(index.parent / "elsewhere" / "index"))


@pytest.mark.parametrize("name", ["best.safetensors.index.json", "model.safetensors.index.json.bak", "kept"])
@pytest.mark.parametrize("keep", [moved, copied, compact, linked])
@pytest.mark.parametrize("after", [None, PAIR])
def test_parts_that_another_index_names_stay(tmp_path, keep, name, after):
    """One that somebody has renamed, or copied, before the next save."""
    path = tmp_path / "mödel.safetensors"
    index = path.with_name("mödel.safetensors.index.json")
    blockfp.save(path, OLD, file_bytes=PAIR)
    parts = set(json.loads(index.read_text())["weight_map"].values())
    keep(index, name)
    for _ in range(2):
        blockfp.save(path, NEW, file_bytes=after)
        assert_holds(path, NEW)
        assert parts < names(tmp_path)
        # Read under the name that an index needs.
        (tmp_path / "read.safetensors.index.json").write_bytes((tmp_path / name).read_bytes())
        assert_holds(tmp_path / "read.safetensors", OLD)
        (tmp_path / "read.safetensors.index.json").unlink()
    (tmp_path / name).unlink()
    blockfp.save(path, NEW, file_bytes=after)
    assert not parts & names(tmp_path)


def test_parts_that_an_unreadable_index_may_name_stay(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    blockfp.save(path, OLD, file_bytes=PAIR)
    index = tmp_path / "model.safetensors.index.json"
    parts = set(json.loads(index.read_text())["weight_map"].values())
    moved(index, "best.json")
    real = os.open

    def unreadable(name, *more, **options):
        if str(name).endswith("best.json"):
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, *more, **options)

    monkeypatch.setattr(os, "open", unreadable)
    blockfp.save(path, NEW, file_bytes=PAIR)
    monkeypatch.undo()
    assert parts < names(tmp_path)


@pytest.mark.parametrize("after", [None, PAIR])
@pytest.mark.parametrize("before", [None, PAIR])
def test_a_private_model_stays_private(tmp_path, before, after):
    path = tmp_path / "model.safetensors"
    blockfp.save(path, OLD, file_bytes=before)
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    blockfp.save(path, NEW, file_bytes=after)
    assert_holds(path, NEW)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("file_bytes", [None, PAIR])
def test_leftovers_of_a_model_that_has_been_saved_are_a_warning(tmp_path, monkeypatch, file_bytes):
    """Parts that can't be removed, and a folder that can't be listed: the new model is there all the same."""
    path = tmp_path / "model.safetensors"
    blockfp.save(path, OLD, file_bytes=PAIR)

    def failing(*_, **__):
        raise OSError(5, "Input/output error")

    for name in ("unlink", "listdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            with pytest.warns(UserWarning, match="has been saved, and the older model's parts can't all be removed"):
                blockfp.save(path, NEW, file_bytes=file_bytes)
        assert_holds(path, NEW)
        blockfp.save(path, OLD, file_bytes=PAIR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blockfp.save(path, NEW, file_bytes=file_bytes)
    assert len(names(tmp_path)) == (1 if file_bytes is None else 3)


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
