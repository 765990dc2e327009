"""Readers beside a program that saves to the same path: what they read is one model or the other, whole."""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from command import run
from processes import LIMIT

import blockfp
from blockfp.errors import BadFile
from blockfp.files import modelfile, saving, untrusted

NAMES = ("a", "b", "c")
BYTES = 4 * 16 * 64 + 1
"""Of a file that holds one of the arrays."""


def model(value, rows=16):
    return {name: np.full((rows, 64), value, np.float32) for name in NAMES}


def quantized(value):
    return {name: blockfp.quantize(x, "mxfp8_e4m3") for name, x in model(value).items()}


def saves_in_between(monkeypatch, after, save):
    """Calls `save` once, when a file or a tensor has been read for the given time."""
    failing, count = modelfile.as_bad_file, 0

    @contextmanager
    def reading(*arguments):
        nonlocal count
        with failing(*arguments):
            yield
        count += 1
        if count == after:
            save()

    monkeypatch.setattr(modelfile, "as_bad_file", reading)
    return lambda: count >= after


def values(arrays):
    return {
        name: {float(v) for v in np.asarray(getattr(x, "dequantize", lambda x=x: x)()).ravel()} for name, x in arrays.items()
    }


@pytest.mark.parametrize("after", [None, BYTES])
@pytest.mark.parametrize("before", [None, BYTES])
@pytest.mark.parametrize("face", ["numpy", "torch", "jax"])
def test_a_model_that_is_replaced_while_it_is_loaded(tmp_path, monkeypatch, face, before, after):
    """By one of other shapes, whose data lie elsewhere in the file."""
    pytest.importorskip(face)
    load = importlib.import_module("blockfp" if face == "numpy" else f"blockfp.{face}").load
    path = tmp_path / "model.safetensors"
    moments, done = 0, True
    while done:
        moments += 1
        with monkeypatch.context() as patch:
            blockfp.save(path, model(1.0), file_bytes=before)
            done = saves_in_between(patch, moments, lambda: blockfp.save(path, model(2.0, rows=8), file_bytes=after))
            found = values(load(path))
            done = done()
        assert found in ({name: {1.0} for name in NAMES}, {name: {2.0} for name in NAMES}), (moments, found)
    assert moments > 4


def command(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


COMMANDS = {
    "quantize": ("--format", "mxfp8_e4m3"),
    "dequantize": (),
    "convert": ("--layout", "blockfp"),
    "check": ("--format", "mxfp8_e4m3", "--backend", "numpy", "--backend", "kernels"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_is_replaced_while_a_command_reads_it(tmp_path, monkeypatch, name):
    path, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    made = model if name in ("quantize", "check") else quantized
    moments, done = 0, True
    while done:
        moments += 1
        with monkeypatch.context() as patch:
            blockfp.save(path, made(1.0))
            done = saves_in_between(patch, moments, lambda: blockfp.save(path, made(2.0)))
            if name == "check":
                command(name, path, *COMMANDS[name], "--report", tmp_path / "r.json")
            else:
                command(name, path, out, *COMMANDS[name], "--force")
            done = done()
        if name == "check":
            [file] = json.loads((tmp_path / "r.json").read_text())["files"]
            found = {tensor["sha256"] for tensor in file["tensors"]}
        else:
            found = {value for each in values(blockfp.load(out)).values() for value in each}
        assert len(found) == 1, moments
    assert moments > 3


def test_models_of_a_writer_that_never_rests(tmp_path):
    """Another process saves as fast as it can, in one file, in parts and with other tensors; nobody sees half of a model."""
    path, ready = tmp_path / "model.safetensors", tmp_path / "ready"
    program = f"""
import itertools, os
import numpy as np
import blockfp
for i in itertools.count():
    arrays = {{name: np.full((16 + i % 3, 64), i, np.float32) for name in {NAMES}}}
    blockfp.save({str(path)!r}, arrays, file_bytes=(None, {BYTES}, {BYTES}, None)[i % 4])
    if i == 3:
        open({str(ready)!r}, "w").close()
"""
    with subprocess.Popen([sys.executable, "-c", program]) as writer:
        try:
            end = time.monotonic() + LIMIT
            while not ready.exists() and time.monotonic() < end:
                time.sleep(0.01)
            seen = set()
            for _ in range(300):
                found = {value for each in values(blockfp.load(path)).values() for value in each}
                assert len(found) == 1, found
                seen |= found
        finally:
            writer.kill()
    assert len(seen) > 3


def test_an_index_that_never_stands_still(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    blockfp.save(path, model(1.0), file_bytes=BYTES)
    failing = modelfile.as_bad_file

    @contextmanager
    def reading(*arguments):
        with failing(*arguments):
            yield
        with monkeypatch.context() as patch:
            patch.setattr(modelfile, "as_bad_file", failing)
            blockfp.save(path, model(1.0), file_bytes=BYTES)

    monkeypatch.setattr(modelfile, "as_bad_file", reading)
    with pytest.raises(BadFile, match=r"model\.safetensors: was replaced \d+ times while it was opened"):
        saving.open_whole(path)


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "npz"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "beyond those that are held"])
def test_a_file_that_is_written_to_where_it_stands(tmp_path, monkeypatch, suffix, held):
    """As other programs do, which leave the same file with other content: by its time of change."""
    path, x = tmp_path / f"x.{suffix}", model(1.0)["a"]
    monkeypatch.setattr(untrusted, "MOST_HELD", 256 if held else 0)
    {"safetensors": lambda: blockfp.save(path, {"x": x}), "npy": lambda: np.save(path, x), "npz": lambda: np.savez(path, x=x)}[
        suffix
    ]()
    [tensor] = modelfile.open_model(path).tensors
    np.testing.assert_array_equal(tensor.read(), x)
    time.sleep(0.05)  # a clock of file systems has ticks of some milliseconds
    content = bytearray(path.read_bytes())
    content[-3000:-2000] = bytes(1000)
    path.write_bytes(content)
    with pytest.raises(BadFile, match=rf"x\.{suffix}, tensor 'x': (was replaced or written to after it was opened|Bad CRC)"):
        tensor.read()


def test_more_files_than_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_HELD", len(untrusted._held) + 1)
    path = tmp_path / "model.safetensors"
    blockfp.save(path, model(1.0), file_bytes=BYTES)
    opened = saving.open_whole(path)
    assert values(blockfp.load(path)) == {name: {1.0} for name in NAMES}
    blockfp.save(path, model(2.0), file_bytes=BYTES)
    read = {tensor.name: tensor.read for tensor in opened.tensors}
    assert read["a"]().max() == 1.0
    with pytest.raises(BadFile, match=r"model-\w+-00002-of-00003\.safetensors, tensor 'b': no such file"):
        read["b"]()


def test_descriptors_are_given_back(tmp_path):
    path = tmp_path / "model.safetensors"

    def held():
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.islink(link))

    for file_bytes, files in ((None, 1), (BYTES, 3)):
        blockfp.save(path, model(1.0), file_bytes=file_bytes)
        blockfp.load(path)
        assert held() == 0
        opened = saving.open_whole(path)
        assert held() == files
        del opened
        assert held() == 0
