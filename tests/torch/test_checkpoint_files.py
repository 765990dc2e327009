"""Checkpoints that are cut short, altered, half written or still being written; real processes with gloo, killed or not."""

import enum
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from blockfp.torch_backend.checkpoint import plain_values
from blockfp.torch_backend.checkpoint.index import read_index
from processes import LIMIT, environment
from resumed import assert_is_part_of, model_of, shard, train
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint
from blockfp.files import manifest

SHAPES = [(64, 128), (37, 40)]
FORMAT = "mxfp8_e4m3_32x32"


class Step(enum.IntEnum):
    """A number that is more than one."""

    FIRST = 1


@pytest.fixture
def saved(tmp_path):
    """A run's folder with checkpoints of steps 1 and 2."""
    model = model_of(FORMAT, SHAPES)
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    for step in (1, 2):
        train(model, optimizer, step - 1, step)
        bfp.save_checkpoint(tmp_path / "run", model, optimizer, step=step)
    return tmp_path / "run"


def refused(run, match, **options):
    """Loading raises, and leaves the model and the optimizer as they were."""
    model, reference = model_of(FORMAT, SHAPES, seed=50), model_of(FORMAT, SHAPES, seed=50)
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(BadCheckpoint, match=match):
        bfp.load_checkpoint(run, model, optimizer, **options)
    assert_is_part_of(model, None, reference, None)
    assert not optimizer.state


def test_a_file_that_is_cut_short_is_named(saved):
    path = saved / "step-00000002" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    refused(saved, r"step-00000002/__0_0\.distcp has \d+ bytes instead of \d+")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_an_altered_file_is_named(saved, name):
    path = saved / "step-00000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(saved, rf"step-00000002/{name} has changed since it was saved: its SHA-256 differs")
    refused(saved / "step-00000002", "SHA-256")
    assert bfp.load_checkpoint(saved, model_of(FORMAT, SHAPES), step=1).step == 1


def test_a_file_that_is_gone_is_named(saved):
    (saved / "step-00000002" / "__0_0.distcp").unlink()
    refused(saved, r"__0_0\.distcp: No such file")


def test_a_manifest_that_is_none(saved):
    path = saved / "step-00000002" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text("{}")
    refused(saved, r"manifest\.json is not a manifest: KeyError")
    path.write_text(json.dumps(content | {"version": 2}))
    refused(saved, r"manifest\.json is of version 2; this blockfp reads version 1")
    # What isn't listed would not be looked at.
    path.write_text(json.dumps(content | {"files": {".metadata": content["files"][".metadata"]}}))
    refused(saved, r"manifest\.json doesn't list __0_0\.distcp")
    path.unlink()
    refused(saved, r"manifest\.json: No such file")


def test_what_is_there_and_what_is_not(saved, tmp_path):
    refused(tmp_path, "holds no checkpoint")
    refused(saved, r"has no checkpoint of step 7, only 1, 2", step=7)
    refused(saved / "step-00000002", r"is a checkpoint itself, not of step 1", step=1)
    model = model_of(FORMAT, SHAPES)
    with pytest.raises(FileExistsError, match="is never overwritten"):
        bfp.save_checkpoint(saved, model, step=2)
    with pytest.raises(TypeError, match=r"extra\['cursor'\] must be a tensor, or numbers and strings, got dict"):
        bfp.save_checkpoint(saved, model, step=3, extra={"cursor": {"file": 1}})
    with pytest.raises(FileExistsError, match=r"step-00000002 is a checkpoint itself: save to the folder of the run, .*run$"):
        bfp.save_checkpoint(saved / "step-00000002", model, step=3)
    with pytest.raises(NotADirectoryError, match=r"manifest\.json is not a folder"):
        bfp.save_checkpoint(saved / "step-00000002" / "manifest.json", model, step=3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"keep": 0}, ValueError, "keep must be 1 or more, got 0"),
        ({"keep": 1.5}, TypeError, "keep must be an integer, got 1.5"),
        ({"step": -1}, ValueError, "step must be 0 or more, got -1"),
        ({"step": 5.0}, TypeError, "step must be an integer, got 5.0"),
        ({"step": None}, TypeError, "step must be an integer, got None"),
        ({"extra": 3}, TypeError, "extra must be a dictionary, got int"),
        ({"extra": {3: 1}}, TypeError, "extra must have strings for names, got 3"),
        ({"extra": {"s": Step.FIRST}}, TypeError, r"extra\['s'\] must be a tensor, or numbers and strings, got Step"),
        (
            {"extra": {"q": bfp.quantize(torch.ones(2, 32), FORMAT)}},
            TypeError,
            r"extra\['q'\] must be a dense tensor, got Quant",
        ),
        ({"model": {}}, TypeError, "model must be a torch.nn.Module, got dict"),
    ],
    ids=str,
)
def test_arguments_that_could_not_be_loaded_again(change, error, match, tmp_path):
    with pytest.raises(error, match=match):
        bfp.save_checkpoint(tmp_path, **({"model": torch.nn.Linear(2, 2), "step": 1} | change))
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy(tmp_path):
    """Schedulers and metrics make them; they are saved as Python's."""
    model = model_of(FORMAT, SHAPES)
    optimizer = bfp.AdamW(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    extra = {"loss": np.mean([1.0, 2.0]), "both": (np.int64(3), np.bool_(True))}
    bfp.save_checkpoint(tmp_path, model, optimizer, step=np.int64(7), extra=extra)
    loaded = bfp.load_checkpoint(tmp_path, model, optimizer, step=np.int64(7))
    assert (loaded.step, loaded.extra) == (7, {"loss": 1.5, "both": (3, True)})
    assert type(optimizer.param_groups[0]["lr"]) is float
    with pytest.raises(ValueError, match=r"optimizer's parameter 0, of shape \(64, 128\), isn't one of the model's"):
        bfp.save_checkpoint(tmp_path, model_of(FORMAT, SHAPES), optimizer, step=8)
    optimizer.param_groups[0]["eps"] = Step.FIRST
    with pytest.raises(
        TypeError, match=r"optimizer\.param_groups\[0\]\.eps must be a tensor, or numbers and strings, got Step"
    ):
        bfp.save_checkpoint(tmp_path, model, optimizer, step=8)


def test_a_value_that_only_a_foreign_program_wrote_is_refused(saved, monkeypatch):
    """Before anything is read into the model."""
    monkeypatch.setattr(plain_values, "plain", lambda name, value: value)
    monkeypatch.setattr(plain_values, "plain_extra", lambda extra: extra)
    bfp.save_checkpoint(saved, model_of(FORMAT, SHAPES), step=3, extra={"s": Harmful()})
    refused(saved, r"extra\.own\.s can't be read")


def test_what_a_dead_run_left_is_removed_and_old_ones_go(saved):
    (saved / ".step-00000003.tmp").mkdir()
    (saved / ".step-00000003.tmp" / "__0_0.distcp").write_bytes(b"half")
    (saved / "notes.txt").write_text("mine")
    assert manifest.steps(saved) == [1, 2]
    model = model_of(FORMAT, SHAPES)
    bfp.save_checkpoint(saved, model, step=3, keep=2)
    assert sorted(path.name for path in saved.iterdir()) == ["notes.txt", "step-00000002", "step-00000003"]
    # One that was moved to another disk, and linked.
    (saved / "step-00000002").rename(elsewhere := saved.parent / "elsewhere")
    (saved / "step-00000002").symlink_to(elsewhere)
    bfp.save_checkpoint(saved, model, step=4, keep=1)
    (saved / ".step-00000002.old").symlink_to(elsewhere)
    (saved / ".step-00000005.tmp").symlink_to(saved.parent / "gone")
    bfp.save_checkpoint(saved, model, step=5, keep=1)
    assert sorted(path.name for path in saved.iterdir()) == ["notes.txt", "step-00000005"]
    assert (elsewhere / "manifest.json").is_file()


def test_what_is_just_written_stays_also_after_going_back(saved):
    model = model_of(FORMAT, SHAPES)
    bfp.save_checkpoint(saved, model, step=300)
    bfp.load_checkpoint(saved, model, step=2)
    (saved / "step-00000007").write_text("a file")
    (saved / "step-00000008").mkdir()
    (saved / "step-000000009").mkdir()
    assert bfp.save_checkpoint(saved, model, step=150, keep=2).wait().is_dir()
    others = ["step-00000007", "step-00000008", "step-000000009"]
    assert sorted(path.name for path in saved.iterdir()) == sorted([*others, "step-00000150", "step-00000300"])
    assert bfp.load_checkpoint(saved, model).step == 300


def test_a_save_that_fails_leaves_what_was_there(saved, monkeypatch):
    model = model_of(FORMAT, SHAPES)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("no way")))
    with pytest.raises(OSError, match=r"step-00000003 was not saved: rank 0: OSError: no way"):
        bfp.save_checkpoint(saved, model, step=3)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000001", "step-00000002"]


# torch may say it in its thread, after save_checkpoint has returned.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_is_full(saved, wait):
    """It is named, nothing stays behind, and the next save is the next save."""
    model, before = model_of(FORMAT, [(64, 512)]), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
    try:
        with pytest.raises(
            OSError, match=r"step-00000003 was not saved: rank 0: OSError: \[Errno 27\] writing: File too large"
        ):
            bfp.save_checkpoint(saved, model, step=3, wait=wait).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000001", "step-00000002"]
    assert bfp.save_checkpoint(saved, model, step=4, wait=wait).wait().is_dir()


class Harmful:
    def __reduce__(self):
        return os.system, ("echo harm",)


def test_an_index_that_would_run_something_is_refused(saved):
    (saved / "step-00000002" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(BadCheckpoint, match=r"it names posix\.system, which an index has no use for"):
        read_index(manifest.Files(saved / "step-00000002"))


@pytest.mark.parametrize("reduce", [lambda member, _: (getattr, (type(member), member.name)), enum.Enum.__reduce_ex__])
def test_indexes_of_every_release_of_python(saved, monkeypatch, reduce):
    """Python 3.11 began with pickling members of an Enum as `getattr(class, name)`, as Debian's still does."""
    index = saved / "step-00000002" / ".metadata"
    written = pickle.loads(index.read_bytes())
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    index.write_bytes(pickle.dumps(written))
    read = read_index(manifest.Files(saved / "step-00000002"))
    assert read.state_dict_metadata.keys() == written.state_dict_metadata.keys()


def test_what_an_index_names_is_not_called(saved):
    (saved / "step-00000002" / ".metadata").write_bytes(pickle.dumps(Gets()))
    with pytest.raises(BadCheckpoint, match="without tensors or their places"):
        read_index(manifest.Files(saved / "step-00000002"))


class Gets:
    def __reduce__(self):
        return getattr, ("harm", "upper")


def test_kills_at_random_moments(tmp_path):
    """After each, of one process and of two, the last whole checkpoint loads, and is the one of its step to the bit."""
    program = Path(__file__).parent / "support" / "killed_while_saving.py"
    command = [sys.executable, program, tmp_path, "--kills", "6", "--both"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 12
    # Every other one of one process hit a checkpoint half written, with two to lose.
    assert [".tmp" in line and "," in line.split("]")[0] for line in found[1:6:2]] == [True] * 3, found


def behind_the_trainings_back(rank):
    folder = Path(os.environ["RUN"])
    model = shard(model_of("nvfp4_16x16", SHAPES), "fsdp2")
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 3)
    saving = bfp.save_checkpoint(folder / "run", model, optimizer, step=3, wait=False)
    # The training goes on, with collectives of its own, while step 3 is written.
    train(model, optimizer, 3, 6)
    assert saving.wait() == folder / "run" / "step-00000003"
    assert saving.done()
    bfp.save_checkpoint(folder / "run", model, optimizer, step=6, wait=False)
    train(model, optimizer, 6, 7)
    bfp.save_checkpoint(folder / "run", model, optimizer, step=7)
    for step in (3, 6, 7):
        whole = model_of("nvfp4_16x16", SHAPES)
        whole_optimizer = bfp.AdamW(whole.parameters(), lr=0.1)
        train(whole, whole_optimizer, 0, step)
        other = shard(model_of("nvfp4_16x16", SHAPES, seed=50), "fsdp2")
        other_optimizer = bfp.AdamW(other.parameters(), lr=0.1)
        bfp.load_checkpoint(folder / "run", other, other_optimizer, step=step)
        assert_is_part_of(other, other_optimizer, whole, whole_optimizer)
    # An error is the same on every rank, also where only one looks at the file that is broken.
    if rank == 0:
        path = folder / "run" / "step-00000007" / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    for action, match in (
        (lambda: bfp.load_checkpoint(folder / "run", model), "__1_0.distcp has"),
        (lambda: bfp.save_checkpoint(folder / "run", model, step=6), "is never overwritten"),
    ):
        with pytest.raises((BadCheckpoint, FileExistsError), match=match):
            action()


def each_kind_of_mesh(rank):
    folder = Path(os.environ["RUN"])
    whole = {}
    for steps in (3, 5):
        whole[steps] = model_of("nvfp4_16x16", SHAPES)
        optimizer = bfp.AdamW(whole[steps].parameters(), lr=0.1)
        train(whole[steps], optimizer, 0, steps)
        whole[steps] = whole[steps], optimizer
    for source, target in (("strided", "fsdp4"), ("fsdp4", "hsdp"), ("hsdp", "strided")):
        model = shard(model_of("nvfp4_16x16", SHAPES), source)
        optimizer = bfp.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 0, 3)
        bfp.save_checkpoint(folder / source, model, optimizer, step=3)
        other = shard(model_of("nvfp4_16x16", SHAPES, seed=50), target)
        other_optimizer = bfp.AdamW(other.parameters(), lr=0.5)
        bfp.load_checkpoint(folder / source, other, other_optimizer)
        assert_is_part_of(other, other_optimizer, *whole[3])
        train(other, other_optimizer, 3, 5)
        assert_is_part_of(other, other_optimizer, *whole[5])


@pytest.mark.parametrize(("function", "world"), [("behind_the_trainings_back", 2), ("each_kind_of_mesh", 4)])
def test_processes_with_gloo(function, world, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN", str(tmp_path))
    gloo.run(world, __file__, function)
