"""Checkpoints where something happens meanwhile: files change, calls fail, a program is told to stop, a machine crashes."""

import builtins
import contextlib
import errno
import io
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from unittest import mock

import gloo
import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.checkpoint import checkpoint_files, index
from blockfp.torch_backend.checkpoint.plain_values import open_checkpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint, BadFile
from blockfp.files import manifest, publishing

CALLS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "stat", "lstat", "fstat", "listdir", "scandir")
"""Functions of `os` that ask the file system, which Python's own libraries call by these names too."""


def model_of(value):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def is_of(model, value):
    return all(torch.equal(param, torch.full_like(param, value)) for param in model.parameters())


@pytest.fixture
def run(tmp_path):
    """A run's folder with a checkpoint of step 1, whose model is all 1."""
    bfp.save_checkpoint(tmp_path / "run", model_of(1.0), step=1)
    return tmp_path / "run"


@pytest.fixture
def other(tmp_path):
    """A checkpoint that has the same files, of the same lengths, with other values."""
    return bfp.save_checkpoint(tmp_path / "odd", model_of(2.0), step=1).wait()


def rewritten(path, other):
    with path.open("r+b") as file:
        file.write(other.read_bytes())


def replaced(path, other):
    shutil.copy(other, beside := path.with_suffix(".new"))
    beside.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_what_changes_behind_its_sum_is_not_loaded(run, other, change, name, monkeypatch):
    """All sums were right; then another checkpoint's file lies there."""
    checkpoint, model, original = run / "step-00000001", model_of(3.0), manifest.Files.sum_up
    assert (checkpoint / name).stat().st_size == (other / name).stat().st_size

    def then_changed(self, *share):
        problems = original(self, *share)
        change(checkpoint / name, other / name)
        return problems

    monkeypatch.setattr(manifest.Files, "sum_up", then_changed)
    if name == "manifest.json":  # which has been read
        assert bfp.load_checkpoint(run, model).step == 1
        assert is_of(model, 1.0)
        return
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(name)}.* was written to, or replaced, while the checkpoint was read"):
        bfp.load_checkpoint(run, model)
    assert is_of(model, 3.0)
    with pytest.raises(BadFile, match=r"was written to, or replaced|SHA-256 differs"):
        open_checkpoint(run)


def test_what_changes_between_two_tensors_is_not_loaded(run, other, monkeypatch):
    data, read, count = run / "step-00000001" / "__0_0.distcp", index.read_tensor, []

    def then_changed(*arguments):
        tensor = read(*arguments)
        count.append(1)
        if len(count) == 2:
            rewritten(data, other / data.name)
        return tensor

    model = model_of(3.0)
    monkeypatch.setattr(checkpoint_files, "read_tensor", then_changed)
    with pytest.raises(BadCheckpoint, match="while the checkpoint was read"):
        bfp.load_checkpoint(run, model)
    assert len(count) == 2
    assert not any((param == 2.0).any() for param in model.parameters())


def test_what_changes_under_an_export_is_not_exported(run, other):
    opened = open_checkpoint(run)
    first, second, *_ = (tensor for tensor in opened.tensors if tensor.name.startswith("model."))
    assert (first.read() == 1.0).all()
    rewritten(run / "step-00000001" / "__0_0.distcp", other / "__0_0.distcp")
    with pytest.raises(BadFile, match="was written to, or replaced, while the checkpoint was read"):
        second.read()


def test_the_sum_is_of_what_was_written(run, monkeypatch):
    """A disk that keeps other bytes than it was given is found, and isn't asked what the right ones are."""
    original = os.fsync

    def then_damaged(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        original(descriptor)
        if path.endswith(".distcp"):
            with open(path, "r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(b"damage")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", then_damaged)
        bfp.save_checkpoint(run, model_of(1.0), step=2)
    with pytest.raises(BadCheckpoint, match=r"step-00000002/__0_0\.distcp has changed since it was saved: its SHA-256 differs"):
        bfp.load_checkpoint(run, model_of(3.0))


def test_a_folder_that_is_called_as_another_step(run):
    shutil.copytree(run / "step-00000001", run / "step-00000009")
    (run / "step-00000008").symlink_to("step-00000001")
    for load in (lambda: bfp.load_checkpoint(run, model_of(3.0)), lambda: open_checkpoint(run)):
        with pytest.raises((BadCheckpoint, BadFile), match=r"step-00000009 is of step 1: call it step-00000001, or by a name"):
            load()
    with pytest.raises(BadCheckpoint, match="step-00000008 is of step 1:"):
        bfp.load_checkpoint(run, model_of(3.0), step=8)
    (run / "step-00000009").rename(run / "best")
    assert bfp.load_checkpoint(run / "best", model_of(3.0)).step == 1


class Failing:
    """The file system, one call of which fails."""

    def __init__(self, number, code):
        self.number, self.code, self.count = number, code, 0
        self.patches = [mock.patch.object(os, name, self.failing(getattr(os, name))) for name in CALLS]
        self.patches += [mock.patch.object(holder, "open", self.failing(io.open)) for holder in (builtins, io)]

    def failing(self, original):
        def call(*arguments, **options):
            path = arguments[0] if arguments else "."
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            if ".py" in str(path):
                return original(*arguments, **options)
            self.count += 1
            if self.count == self.number:
                told = () if isinstance(arguments[0], int) else (os.fspath(arguments[0]),)
                raise OSError(self.code, os.strerror(self.code), *told)
            return original(*arguments, **options)

        return call

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch)
            self.undo = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.undo.close()


CODES = (errno.EIO, errno.EXDEV, errno.ESTALE, errno.ENOSPC)


def outcome(action, *errors):
    """What it raises, of these, or None."""
    try:
        action()
    except errors as error:
        return error
    return None


def test_each_call_of_the_file_system_fails_once(run, tmp_path):
    """Either step is there and loads, an error or a warning names the path, and nothing else is left."""
    failures, number, done = 0, 0, False
    while not done:
        number += 1
        shutil.copytree(run, here := tmp_path / str(number))
        with warnings.catch_warnings(record=True) as said, Failing(number, CODES[number % 4]) as failing:
            warnings.simplefilter("always")
            error = outcome(lambda here=here: bfp.save_checkpoint(here, model_of(2.0), step=2, keep=1), OSError)
        done, saved = failing.count < number, error is None
        said = [*(str(one.message) for one in said), *([] if saved else [str(error)])]
        assert all(f"{here}" in text for text in said), (number, said)
        assert not [path.name for path in here.iterdir() if path.name.startswith(".")], (number, said)
        model = model_of(3.0)
        assert bfp.load_checkpoint(here, model).step == (2 if saved else 1), (number, said)
        assert is_of(model, 2.0 if saved else 1.0)
        failures += not saved
    assert number > 30
    assert failures > 15


def test_each_call_fails_once_under_a_load(run):
    number, done = 0, False
    while not done:
        number += 1
        model = model_of(3.0)
        with Failing(number, CODES[number % 4]) as failing:
            error = outcome(lambda model=model: bfp.load_checkpoint(run, model), BadCheckpoint, OSError)
        assert is_of(model, 1.0) if error is None else str(run) in str(error), number
        done = failing.count < number
    assert number > 50


class Stop:
    """Raises in the middle of Python code, as a signal's handler does: at one of the calls of functions."""

    def __init__(self, number, kind):
        self.number, self.kind, self.count, self.raised = number, kind, 0, False

    def __call__(self, frame, event, _):
        # What runs while an object is freed, as torch's stream and generators do, can't raise.
        name = f"{frame.f_code.co_qualname} {frame.f_back.f_code.co_qualname}"
        if event == "call" and "<genexpr>" not in name and "NoCloseWriter.close" not in name:
            self.count += 1
            if self.count == self.number:
                self.raised = True
                sys.setprofile(None)
                raise self.kind

    def during(self, action):
        sys.setprofile(self)
        try:
            action()
        finally:
            sys.setprofile(None)


def stopped_all_over(_):
    """A process of its own: torch's switches, such as that of `no_grad`, may stay as they were where they are interrupted."""
    run = Path(os.environ["RUN"])

    def save():
        bfp.save_checkpoint(run, model_of(2.0), step=2)

    def load():
        bfp.load_checkpoint(run, model_of(3.0), step=1)

    for action in (save, load):
        counted = Stop(0, KeyboardInterrupt)
        counted.during(action)
        shutil.rmtree(run / "step-00000002", ignore_errors=True)
        for number in range(1, counted.count, counted.count // 40):
            stop = Stop(number, (KeyboardInterrupt, SystemExit)[number % 2])
            error = outcome(lambda action=action, stop=stop: stop.during(action), BaseException)
            assert type(error) is stop.kind if stop.raised else error is None, (action, number, error)
            shutil.rmtree(run / "step-00000002", ignore_errors=True)
    save()
    assert [path.name for path in sorted(run.iterdir())] == ["step-00000001", "step-00000002"]


def test_requests_to_stop_are_raised_as_they_are(run, monkeypatch):
    """At moments all over a save and a load. Afterwards all goes on."""
    monkeypatch.setenv("RUN", str(run))
    gloo.run(1, __file__, "stopped_all_over", backend=None)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["write_data", "sum_up", "read_data", "find", "begin"])
def test_one_rank_is_told_to_stop(run, kind, where, monkeypatch):
    """It stops; the others get an error that names what stopped it, and where."""
    holders = {
        "write_data": FileSystemWriter,
        "sum_up": manifest.Files,
        "read_data": checkpoint_files.CheckedReader,
        "find": manifest,
        "begin": publishing,
    }
    holder = holders[where]
    original, odd = getattr(holder, where), 0 if where in ("find", "begin") else 1

    def stops(*arguments):
        if dist.get_rank() == odd:
            raise kind
        return original(*arguments)

    monkeypatch.setattr(holder, where, stops)

    def rank_main(rank):
        model = model_of(1.0)
        if where in ("write_data", "begin"):
            bfp.save_checkpoint(run, model, step=2)
        else:
            bfp.load_checkpoint(run, model)

    errors = threaded.errors(2, rank_main)
    assert type(errors[odd]) is kind
    other = errors[1 - odd]
    assert isinstance(other, Exception)
    told = str(other) + "".join(getattr(other, "__notes__", ()))
    assert kind.__name__ in told, other
    assert f"rank {odd}" in told
    assert [path.name for path in run.iterdir()] == ["step-00000001"]


def test_each_name_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """What would survive a crash, by the order of calls: a name does once its folder was flushed after it was given."""
    root = str(tmp_path)
    flushed, names = set(), []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        originals["fsync"](descriptor)
        flushed.update({path, *(name for name in names if os.path.dirname(name) == path)})

    def mkdir(path, *arguments):
        originals["mkdir"](path, *arguments)
        names.append(os.fspath(path))

    def rename(source, target):
        source, target = os.fspath(source), os.fspath(target)
        inside = [f"{root}/new/run/.{target.rpartition('/')[2]}", target]
        if target.rpartition("/")[2].startswith("step-"):
            # All that it consists of, and the folders in which it will be.
            files = {f"{source}/{name}" for name in os.listdir(source)}
            assert {"manifest.json", ".metadata", "__0_0.distcp"} <= {file.rpartition("/")[2] for file in files}, inside
            assert {source, f"{source}/manifest.json", f"{source}/__0_0.distcp"} <= flushed
            assert {f"{root}/new", f"{root}/new/run"} <= flushed
        if target.endswith(".old"):
            assert [name for name in names if name.endswith("step-00000002")][-1] in flushed
        originals["rename"](source, target)
        names.append(target)

    originals = {name: getattr(os, name) for name in ("fsync", "mkdir", "rename")}
    for name, counted in (("fsync", fsync), ("mkdir", mkdir), ("rename", rename)):
        monkeypatch.setattr(os, name, counted)
    for step in (1, 2):
        bfp.save_checkpoint(tmp_path / "new" / "run", model_of(1.0), step=step, keep=1)
        assert f"{root}/new/run/step-0000000{step}" in flushed
    assert any(name.endswith(".old") for name in names)
