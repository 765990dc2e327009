"""A file system that fails, at each of its calls in turn: what was there is whole, and the error says with which file."""

import errno
import importlib
import io
import os

import numpy as np
import pytest
from command import run

import blockfp
from blockfp.errors import BadFile

CALLS = ("open", "fsync", "replace", "unlink", "mkdir", "listdir", "stat", "fstat", "preadv", "fchmod", "write")
ARRAYS = {f"{name}.weight": np.ones((16, 64), np.float32) for name in "ab"}
OLD = {name: blockfp.quantize(x, "mxfp8_e4m3") for name, x in ARRAYS.items()}
NEW = {name: blockfp.quantize(2 * x, "mxfp8_e4m3") for name, x in ARRAYS.items()}
PART = 16 * 64 + 16 * 2 + 1


class Calls:
    """Has the call of this number fail, among those to the file system that name nothing outside of a folder."""

    def __init__(self, patch, folder, failing, number):
        self.count, self.folder, self.failing, self.number = 0, str(folder), failing, number
        for name in CALLS[:-1]:
            patch.setattr(os, name, self.counted(getattr(os, name)))
        opened = io.open

        def open_counted(file, mode="r", *arguments, **options):
            found = opened(file, mode, *arguments, **options)
            if "w" in mode and "b" in mode and str(file).startswith(self.folder):
                found = Writer(self, found)
            return found

        patch.setattr(io, "open", open_counted)

    def counted(self, call):
        def counting(*arguments, **options):
            where = arguments[0]
            open_already = isinstance(where, int)
            if str(os.readlink(f"/proc/self/fd/{where}") if open_already else where).startswith(self.folder):
                self.next(None if open_already else str(where))
            return call(*arguments, **options)

        return counting

    def next(self, name=None):
        """Fails as the system does: with a name where the call takes one."""
        self.count += 1
        if self.count == self.failing:
            raise OSError(self.number, os.strerror(self.number), *([] if name is None else [name]))


class Writer:
    def __init__(self, calls, file):
        self.calls, self.file = calls, file

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *exception):
        return self.file.__exit__(*exception)

    def write(self, data):
        self.calls.next()
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def command(*arguments):
    result = run(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise OSError(f"exit code {result.exit_code}: {result.stderr}")


def save_one(folder):
    blockfp.save(folder / "m.safetensors", NEW)


def save_parts(folder):
    blockfp.save(folder / "m.safetensors", NEW, file_bytes=PART)


def requantize(folder):
    command("dequantize", folder / "new.safetensors", folder / "m.safetensors", "--force")


def convert(folder):
    command("convert", folder / "new.safetensors", folder / "a" / "b", "--layout", "compressed-tensors", "--force")


def load(folder):
    blockfp.load(folder / "m.safetensors")


def value(path):
    return {float(np.asarray(x.dequantize() if hasattr(x, "dequantize") else x).max()) for x in blockfp.load(path).values()}


@pytest.mark.filterwarnings("ignore:.*older model's parts:UserWarning")
@pytest.mark.parametrize(
    ("action", "before"),
    [(save_one, PART), (save_parts, PART), (save_parts, None), (requantize, PART), (convert, None), (load, PART), (load, None)],
)
def test_every_call_fails_once(tmp_path, monkeypatch, action, before):
    failing, errors = 0, 0
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a disk would take its time
    while True:
        failing += 1
        number = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT)[failing % 4]
        folder = tmp_path / str(failing)
        folder.mkdir()
        blockfp.save(folder / "new.safetensors", NEW)
        blockfp.save(folder / "m.safetensors", OLD, file_bytes=before)
        error = None
        with monkeypatch.context() as patch:
            calls = Calls(patch, folder, failing, number)
            try:
                action(folder)
            except (OSError, BadFile) as raised:
                error = raised
        if calls.count < failing:
            assert error is None
            break
        errors += error is not None
        # Errors name something in the folder, and say more than the system does.
        assert error is None or str(folder) in str(error), error
        found = value(folder / "m.safetensors")
        assert found in ({1.0}, {2.0})
        written = found == {2.0} or (folder / "a" / "b" / "config.json").exists()
        assert error is not None or written or action is load, failing
        assert not (written and error) or "has been saved" in str(error) or "flushing to the disk" in str(error), error
        # What couldn't be removed goes with the next save, and nothing else has stayed.
        save_parts(folder)
        there = [path for path in folder.rglob("*") if path.is_file() and path.parent == folder]
        assert len(there) == 4, there
    assert failing > 5
    assert errors > failing / 2


def test_memory_that_runs_out_is_a_memory_error(monkeypatch):
    """Also where a large result lies in memory of our own."""
    reused_memory = importlib.import_module("blockfp.kernels.reused_memory")

    def full(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(reused_memory.mmap, "mmap", full)
    monkeypatch.setattr(reused_memory, "_waiting", type(reused_memory._waiting)())
    with pytest.raises(MemoryError, match=r"8388608 bytes"):
        reused_memory.array(8 << 20)
