"""Damaged and made-up files, with seeds that stay: all that reads them refuses them by name, or reads them; nothing else."""

import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command import run
from processes import LIMIT

pytest.importorskip("torch", reason="checkpoints are PyTorch's")

import bad_files
import fuzz
from bad_files import STEP, sum_of

import blockfp
import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint, BadFile
from blockfp.files import manifest, modelfile


def test_bad_files():
    """A hundred and fifty, in a process of its own: what it reads may not allocate more than it is allowed."""
    program = Path(fuzz.__file__)
    command = [sys.executable, program, "--files", "150", "--seconds", "80", "--seed", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "findings: 0" in done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    bad_files.samples(folder)
    return folder


@pytest.fixture
def checkpoint(whole, tmp_path):
    """A checkpoint of two layers and an optimizer, to be damaged."""
    import shutil

    return Path(shutil.copytree(whole / "run", tmp_path / "run")) / STEP


def summed(checkpoint):
    """Makes the checksums anew, as somebody who means harm would."""
    files = {path.name: sum_of(path) for path in checkpoint.iterdir() if path.name != manifest.MANIFEST}
    (checkpoint / manifest.MANIFEST).write_bytes(manifest.text_of(files))


def refused(checkpoint, match):
    """By loading, which leaves the model as it was, and by `blockfp export`, which writes nothing."""
    load = fuzz.readers("checkpoint", checkpoint, checkpoint.parent)["load_checkpoint"]
    with pytest.raises(BadCheckpoint, match=match):
        load()
    with pytest.raises(fuzz.Refused):
        fuzz.command("export", checkpoint, checkpoint.parent / "m.safetensors")()
    assert not (checkpoint.parent / "m.safetensors").exists()


def damage_index(checkpoint, change):
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    summed(checkpoint)


def halved(index):
    piece = index.state_dict_metadata["model.0.bias"].chunks[0]
    piece.sizes = type(piece.sizes)([piece.sizes[0] // 2])


def longer(index):
    index.state_dict_metadata["extra.own.cursor"].size = type(index.state_dict_metadata["model.0.bias"].size)([10**12])


def doubled(index):
    index.state_dict_metadata["model.0.bias"].chunks *= 2


def other_dtype(index):
    import torch

    index.state_dict_metadata["extra.own.cursor"].properties.dtype = torch.int32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda index: index.state_dict_metadata["model.0.bias"].chunks.clear(), r"bias of shape \(32,\) has 32 .* have 0"),
        (halved, r"model\.0\.bias of shape \(32,\) has 32 elements, its pieces have 16"),
        (longer, r"extra\.own\.cursor of shape \(1000000000000,\) has 1000000000000 elements, its pieces have 3"),
        (doubled, r"model\.0\.bias of shape \(32,\) has 32 elements, its pieces have 64"),
        (lambda index: index.storage_data.clear(), r"has a .* that the index doesn't locate"),
        (lambda index: setattr(index, "storage_data", None), "without tensors or their places"),
    ],
)
def test_an_index_that_leaves_something_out(checkpoint, change, match):
    """No byte of memory that nothing was read into comes out of the library."""
    damage_index(checkpoint, change)
    refused(checkpoint, match)


def test_a_piece_of_another_dtype_than_its_index_says(checkpoint):
    damage_index(checkpoint, other_dtype)
    load = fuzz.readers("checkpoint", checkpoint, checkpoint.parent)["load_checkpoint"]
    with pytest.raises(
        BadCheckpoint, match=r"cursor: it is torch\.int64 of shape \(3,\), and torch\.int32 of shape \(3,\) in the"
    ):
        load()


def test_pieces_that_overlap():
    from blockfp.torch_backend.checkpoint.index import _overlap

    rng = np.random.default_rng(0)
    grid = np.array([[[i, j], [2, 3]] for i in range(0, 40, 2) for j in range(0, 60, 3)])
    assert not _overlap(rng.permutation(grid))
    for _ in range(20):
        moved = rng.permutation(grid)
        one = rng.integers(len(moved))
        moved[one, 0] += rng.choice([[1, 0], [-1, 0], [0, 1], [0, -2], [1, 1]])
        brute = any(
            all(a[0, k] < b[0, k] + b[1, k] and b[0, k] < a[0, k] + a[1, k] for k in range(2))
            for i, a in enumerate(moved)
            for b in moved[:i]
        )
        assert _overlap(moved) == brute


def test_an_index_changes_nothing_outside_of_it(checkpoint):
    """A pickle can set attributes of the classes that it names: torch's stay as they are."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    text = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}\x8c\x08harmed!!\x88s\x86b."
    (checkpoint / ".metadata").write_bytes(text)
    summed(checkpoint)
    refused(checkpoint, "is not an index of torch's DCP")
    assert not hasattr(MetadataIndex, "harmed!!")


@pytest.mark.parametrize("text", [b"\x80\x04}r\xff\xff\xff\x7f.", b"\x80\x04\x96" + b"\xff" * 6 + b"\0\0.", b"\x80\x04."])
def test_an_index_of_few_bytes_that_wants_much(checkpoint, text):
    (checkpoint / ".metadata").write_bytes(text)
    summed(checkpoint)
    refused(checkpoint, "is not an index of torch's DCP")


def rewrite_files(checkpoint, change):
    path = checkpoint / manifest.MANIFEST
    content = json.loads(path.read_text())
    change(content["files"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["/dev/zero", "../x", "a/b", "..", ".", "", "a\0b", "\ud800", "x" * 300])
def test_a_manifest_names_files_in_its_folder(checkpoint, name):
    rewrite_files(checkpoint, lambda files: files.update({name: {"length": 0, "sha256": "0" * 64}}))
    refused(checkpoint, r"manifest\.json names .*, which is not a file in its folder")


@pytest.mark.parametrize("length", [-1, 2**63, "5", 0.5, None, True, [1]])
def test_lengths_in_a_manifest_are_lengths(checkpoint, length):
    rewrite_files(checkpoint, lambda files: files["__0_0.distcp"].update(length=length))
    refused(checkpoint, "has no length and SHA-256 for '__0_0.distcp'")


def test_a_manifest_of_numbers_that_are_none(checkpoint):
    path = checkpoint / manifest.MANIFEST
    for text in ('{"version": 1, "files": {"x": {"length": Infinity}}}', "[" * 10_000, "1" * 10_000, "\xff\xfe"):
        path.write_text(text, encoding="latin-1")
        refused(checkpoint, r"manifest\.json is not a manifest")


@pytest.mark.parametrize("kind", ["fifo", "device", "link out", "folder"])
def test_files_of_a_checkpoint_are_files(checkpoint, tmp_path, kind):
    """Nothing waits for a pipe, or reads a device to its end."""
    path = checkpoint / "__0_0.distcp"
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (elsewhere := tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to("/dev/zero" if kind == "device" else elsewhere)
    refused(checkpoint, r"__0_0\.distcp(: is not a regular file|: is a directory| is a link out of the checkpoint's folder)")
    (checkpoint / manifest.MANIFEST).unlink()
    foreign = checkpoint.rename(tmp_path / "foreign")
    with pytest.raises(fuzz.Refused):
        fuzz.command("export", foreign, tmp_path / "m.safetensors")()


def test_a_step_without_a_manifest_is_not_exported(checkpoint, tmp_path):
    (checkpoint / manifest.MANIFEST).unlink()
    (tmp_path / "latest").symlink_to(checkpoint)
    out = tmp_path / "m.safetensors"
    for source in (checkpoint, checkpoint.parent, tmp_path / "latest"):
        with pytest.raises(fuzz.Refused):
            fuzz.command("export", source, out)()
    checkpoint.rename(tmp_path / "foreign")
    result = run("export", tmp_path / "foreign", out)
    assert result.exit_code == 0, result.output
    assert "foreign has no checksums" in result.output.replace("\n", "")


def test_files_of_a_model_are_files(tmp_path):
    for name in ("x.npy", "x.npz", "x.safetensors", "x.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(BadFile, match=rf"{name}.*is not a regular file"):
            blockfp.load(tmp_path / name) if "safetensors" in name else modelfile.open_model(tmp_path / name)


def test_a_header_is_not_read_where_it_is_too_long(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((3 * 2**30).to_bytes(8, "little"))
        file.truncate(3 * 2**30 + 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadFile, match=r"x\.safetensors: a header of 3221225472 bytes is not read: at most 100000000"):
        blockfp.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000


@pytest.mark.parametrize(
    ("shape", "data"),
    [([0, 2**63], 0), ([2**62, 2**62], 0), ([0, 2**62, 2**62], 0), ([1] * 70, 4), ([10**400], 4), ([True], 4)],
)
def test_shapes_that_no_array_has(tmp_path, shape, data):
    path = tmp_path / "x.safetensors"
    text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, data]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    with pytest.raises(BadFile, match=r"x\.safetensors, tensor 'w'"):
        blockfp.load(path)


def test_an_archive_that_lies_about_its_size(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(1000, np.float32))
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"x\.npz, tensor 'x': should have 4294967294 bytes, and \d+ can't hold them"):
        modelfile.open_model(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", b"")
    with pytest.raises(BadFile, match="is compressed by method 14: NumPy stores or deflates"):
        modelfile.open_model(path)


def test_names_are_printed_as_they_are_written_in_python(tmp_path):
    path = tmp_path / "x.safetensors"
    blockfp.save(path, {"\x1b[2J\x07\n": np.ones(3, np.float32), "w": np.ones((2, 32), np.float32)})
    output = run("check", path, "--format", "mxfp8_e4m3", "--backend", "numpy").output
    assert "\\x1b[2J\\x07\\n" in output
    assert "\x1b[2J" not in output


def test_a_full_disk_is_said_with_the_files_name(tmp_path):
    """By the functions and by the command, whichever part of a model it is."""
    import signal

    x = {"w": np.ones((64, 512), np.float32), "v": np.ones((64, 512), np.float32)}
    blockfp.save(tmp_path / "in.safetensors", x)
    before, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        for options in ({}, {"file_bytes": 100_000}):
            with pytest.raises(OSError, match=r"File too large: '.*out.*\.safetensors'"):
                blockfp.save(tmp_path / "out.safetensors", x, **options)
        result = run("quantize", tmp_path / "in.safetensors", tmp_path / "q.safetensors", "--format", "nvfp4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert result.exit_code == 2
    assert "q.safetensors" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_errors_can_be_sent_to_other_ranks():
    for error in (BadFile(Path("x"), "is bad", "w"), BadFile(Path("x"), ValueError()), BadCheckpoint("bad")):
        sent = pickle.loads(pickle.dumps(error))
        assert type(sent) is type(error)
        assert str(sent) == str(error)


def test_masked_arrays_are_refused(tmp_path):
    import blockfp.jax

    x = np.ma.masked_greater(np.ones((4, 32), np.float32), 0.5)
    for action in (
        lambda: blockfp.quantize(x, "mxfp8_e4m3"),
        lambda: blockfp.fake_quantize(x, "nvfp4"),
        lambda: blockfp.jax.quantize(x, "nvfp4"),
    ):
        with pytest.raises(TypeError, match=r"masked array.* x\.filled\(\.\.\) or x\.data"):
            action()
    with pytest.raises(BadFile, match="it is a masked array, and a file has no masks"):
        blockfp.save(tmp_path / "x.safetensors", {"x": x})


def test_a_killed_save_leaves_nothing_to_the_next(tmp_path):
    """Temporary files, parts half written and whole ones go with the next save; those of a save that is under way stay."""
    program = f"""
import os, signal, sys
import numpy as np
import blockfp
from blockfp.files import saving
original, parts = saving.replacing, []
def replacing(path, *like):
    if path.name.endswith("-00003-of-00004.safetensors"):
        print("there", flush=True)
        sys.stdin.read(1)
        with original(path) as temporary:
            temporary.write_bytes(bytes(100))
            os.kill(os.getpid(), signal.SIGKILL)
    return original(path, *like)
saving.replacing = replacing
blockfp.save({str(tmp_path / "m.safetensors")!r}, {{str(i): np.ones(100, np.float32) for i in range(4)}}, file_bytes=400)
"""
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        assert process.stdout.readline() == "there\n"
    dead, alive = running
    for process, left in ((dead, True), (alive, False)):
        # The first is killed, and the second goes on while another save removes what the first left.
        process.communicate("x")
        assert process.returncode == -9
        there = sorted(path.name for path in tmp_path.iterdir())
        assert sum("of-00004" in name for name in there) == (5 if left else 3), there
        blockfp.save(tmp_path / "m.safetensors", {"x": np.ones(3, np.float32)}, file_bytes=1000)
        there = sorted(path.name for path in tmp_path.iterdir())
        # Of the one under way: two parts, and the index's temporary file.
        assert sum("of-00004" in name for name in there) == (2 if left else 0), there
        assert sum(name.endswith(".tmp") for name in there) == (1 if left else 0), there
        assert set(blockfp.load(tmp_path / "m.safetensors")) == {"x"}
    assert bfp.load(tmp_path / "m.safetensors")["x"].sum() == 3
