"""Folders of runs to which several jobs save: each checkpoint that was said to be saved is there, whole, and its job's own."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
import warnings
from unittest import mock

import processes
import pytest
from bad_files import sum_of

from blockfp.files import manifest, publishing


def write(draft, content):
    """Writes a checkpoint of one file; returns its sums."""
    path = draft.folder / "data"
    path.write_bytes(content)
    return {"data": sum_of(path)}


def save(run, step, content=b"", keep=None):
    draft = publishing.begin(manifest.folder_of(run, step))
    draft.publish(write(draft, content), keep)
    return draft.checkpoint


def content_of(checkpoint):
    """What a checkpoint holds, by its manifest."""
    files = manifest.Files(checkpoint)
    assert not files.sum_up()
    return (checkpoint / "data").read_bytes()


@pytest.fixture
def other_job():
    """As another process would, whose locks are other ones in this process, too."""

    def called(function, *arguments, **options):
        with mock.patch.dict(publishing._ours, clear=True):
            return function(*arguments, **options)

    return called


def test_a_folder_that_is_being_written_stays(tmp_path):
    run = tmp_path / "run"
    first = publishing.begin(manifest.folder_of(run, 1))
    sums = write(first, b"first")
    with pytest.warns(UserWarning, match=rf"{first.folder} is being written: another process saves to this folder"):
        save(run, 2, b"second")
    first.publish(sums, None)
    assert [content_of(manifest.folder_of(run, step)) for step in manifest.steps(run)] == [b"first", b"second"]


def test_one_of_two_jobs_saves_a_step(tmp_path):
    """The other is told; nothing of the first one's is replaced."""
    checkpoint = manifest.folder_of(tmp_path, 1)
    first = publishing.begin(checkpoint)
    with pytest.warns(UserWarning, match="is being written"):
        second = publishing.begin(checkpoint)
    first_sums, second_sums = write(first, b"first"), write(second, b"second")
    second.publish(second_sums, 1)
    with pytest.raises(FileExistsError, match="step-00000001 exists: another process has saved this step meanwhile"):
        first.publish(first_sums, 1)
    first.give_up()
    assert content_of(checkpoint) == b"second"
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_what_another_job_saved_meanwhile_is_not_surplus(tmp_path, other_job):
    save(tmp_path, 1)
    other_job(save, tmp_path, 2)
    with pytest.warns(UserWarning, match=r"step-00000002 was saved by another process meanwhile: keep=1 leaves it"):
        save(tmp_path, 3, keep=1)
    assert manifest.steps(tmp_path) == [2, 3]
    # A job that goes on from here takes over what is there.
    publishing.take_over(tmp_path)
    save(tmp_path, 4, keep=1)
    assert manifest.steps(tmp_path) == [4]
    other_job(save, tmp_path, 5, keep=1)
    assert manifest.steps(tmp_path) == [5]


@pytest.mark.parametrize("files", [(), ("manifest.json",), ("data",), ("data", "manifest.json")])
def test_what_a_dead_job_left_goes(tmp_path, files):
    """Killed at any moment, or of a version that had no token in its folders' names."""
    for name in (".step-00000003.0123456789ab.tmp", ".step-00000003.tmp", ".step-00000003.0123456789ab.old"):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("")
    save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_without_locks_nothing_is_taken_for_left_behind(tmp_path):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    with mock.patch.object(fcntl, "flock", none):
        first = publishing.begin(manifest.folder_of(tmp_path, 1))
        sums = write(first, b"first")
        with pytest.warns(
            UserWarning, match=r"tmp is left over from an earlier save and can't be removed: .* locking: .*manifest.json"
        ):
            save(tmp_path, 2)
        first.publish(sums, None)
    assert manifest.steps(tmp_path) == [1, 2]


def job(run, number, steps, keep, jobs, said):
    """Saves steps, each with its own content, and writes down which it was told are saved."""
    warnings.simplefilter("ignore")
    publishing.take_over(run)
    saved = []
    said.with_suffix(".ready").touch()
    while len(list(said.parent.glob("*.ready"))) < jobs:
        time.sleep(0.001)
    for step in steps:
        draft = None
        try:
            draft = publishing.begin(manifest.folder_of(run, step))
            draft.publish(write(draft, f"{number} {step} ".encode() * 100), keep)
            saved.append(step)
        except FileExistsError:
            if draft is not None:
                draft.give_up()
    said.write_text(json.dumps(saved))


@pytest.mark.parametrize("own_steps", [False, True])
def test_jobs_that_race(tmp_path, own_steps):
    run, jobs, steps = tmp_path / "run", 4, 25
    each = [[jobs * i + number if own_steps else i for i in range(steps)] for number in range(jobs)]
    keep = 2 if own_steps else None
    program = """
import pathlib, runpy, sys
file, run, said, *rest = sys.argv[1:]
number, steps, keep, jobs = map(eval, rest)
runpy.run_path(file)["job"](pathlib.Path(run), number, steps, keep, jobs, pathlib.Path(said))
"""
    children = []
    for number in range(jobs):
        files, rest = (__file__, run, tmp_path / f"said-{number}"), map(repr, (number, each[number], keep, jobs))
        call = [sys.executable, "-P", "-c", program, *files, *rest]
        children.append(subprocess.Popen(call, env=processes.environment()))
    for child in children:
        assert child.wait(processes.LIMIT) == 0
    said = [json.loads((tmp_path / f"said-{number}").read_text()) for number in range(jobs)]
    # `keep` leaves two to each job: its own last ones.
    expected = {step: number for number, saved in enumerate(said) for step in (saved[-2:] if own_steps else saved)}
    assert sum(map(len, said)) == (jobs * steps if own_steps else steps)
    there = manifest.steps(run)
    assert expected.items() <= {step: int(content_of(manifest.folder_of(run, step)).split()[0]) for step in there}.items()
    assert own_steps or there == list(range(steps))
    assert {path.name for path in run.iterdir()} == {manifest.folder_of(run, step).name for step in there}


def test_a_folder_that_could_not_be_made_durable_has_no_name(tmp_path):
    save(tmp_path, 1, b"old")
    draft = publishing.begin(manifest.folder_of(tmp_path, 2))
    sums = write(draft, b"new")
    calls = []

    def fails_once(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(path)
        if path == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        mock.patch.object(os, "fsync", fails_once),
        pytest.raises(OSError, match=rf"flushing to the disk: Input/output error: '{tmp_path}'"),
    ):
        draft.publish(sums, 1)
    assert calls == [str(draft.folder / "manifest.json"), str(draft.folder), str(tmp_path)]
    assert manifest.steps(tmp_path) == [1]
    draft.give_up()
    assert content_of(save(tmp_path, 2, b"again", keep=1)) == b"again"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_an_answer_that_nfs_has_lost(tmp_path):
    """The folder is renamed, and the client, which asks again, is told that there is none."""

    def renamed(source, target):
        original(source, target)
        if str(source).endswith(".tmp"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))

    original = os.rename
    with mock.patch.object(os, "rename", renamed):
        assert content_of(save(tmp_path, 1, b"one")) == b"one"
