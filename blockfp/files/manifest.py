"""Folders of checkpoints: numbered, each whole or not there at all, with checksums of its files.

FOLDER/
  step-00000200/             a checkpoint that is whole: it got its name when everything was on the disk
    manifest.json            the length and SHA-256 of every other file
    ..                       what the checkpoint consists of
  .step-00000300.tmp/        one being written, or left behind by a run that died
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadCheckpoint
from . import untrusted
from .atomic import to_disk

MANIFEST = "manifest.json"
VERSION = 1
_WHOLE = re.compile(r"step-(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.step-\d{8,}\.(tmp|old)")


@dataclass(frozen=True)
class FileSum:
    """Length in bytes and SHA-256 of a file."""

    length: int
    sha256: str


def folder_of(run: Path, step: int) -> Path:
    """Path of a step's checkpoint in a run's folder."""
    return run / f"step-{step:08d}"


def temporary_of(checkpoint: Path) -> Path:
    """Path at which a checkpoint is written until it is whole."""
    return checkpoint.parent / f".{checkpoint.name}.tmp"


def steps(run: Path) -> list[int]:
    """The steps that have checkpoints in a run's folder, ascending. It doesn't look for manifests."""
    there = run.iterdir() if run.is_dir() else ()
    found = {int(match[1]) for path in there if (match := _WHOLE.fullmatch(path.name))}
    # What is a file, or has more zeros in its name than a checkpoint gets, is somebody else's.
    return sorted(step for step in found if folder_of(run, step).is_dir())


def find(folder: Path, step: int | None = None) -> Path:
    """A checkpoint: `folder` itself if it is one, else that of a step in it, by default of the last.

    Raises:
        BadCheckpoint: there is none.
    """
    if (folder / MANIFEST).is_file():
        if step is not None and folder_of(folder.parent, step).name != folder.name:
            raise BadCheckpoint(f"{folder} is a checkpoint itself, not of step {step}: leave step out, or name {folder.parent}")
        return folder
    there = steps(folder)
    if not there:
        raise BadCheckpoint(f"{folder} holds no checkpoint: it has neither a {MANIFEST} nor a folder step-..")
    if step is not None and step not in there:
        raise BadCheckpoint(f"{folder} has no checkpoint of step {step}: there are {', '.join(map(str, there))}")
    return folder_of(folder, there[-1] if step is None else step)


def is_own(checkpoint: Path) -> bool:
    """Tells whether a folder is a checkpoint of blockfp's: by its manifest, or its name (step-.., also while it is written)."""
    names = {checkpoint.absolute().name, checkpoint.resolve().name}
    called = any(pattern.fullmatch(name) for pattern in (_WHOLE, _LEFT_BEHIND) for name in names)
    return called or os.path.lexists(checkpoint / MANIFEST)


def file_sum(path: Path) -> FileSum:
    """Reads a file whole; returns its length and checksum."""
    with untrusted.open_regular(path) as file:
        return FileSum(untrusted.length_of(file), hashlib.file_digest(file, "sha256").hexdigest())  # pyright: ignore[reportArgumentType]


def write_manifest(checkpoint: Path, files: Mapping[str, FileSum]) -> None:
    """Writes the manifest, and has it and the folder on the disk before it returns."""
    entries = {name: {"length": s.length, "sha256": s.sha256} for name, s in sorted(files.items())}
    path = checkpoint / MANIFEST
    path.write_text(json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n")
    to_disk(path)
    to_disk(checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, FileSum]:
    """Reads the manifest: the files of a checkpoint with their lengths and checksums.

    Raises:
        BadCheckpoint: there is no manifest, or it is not one.
    """
    path = checkpoint / MANIFEST
    try:
        content = untrusted.read_json(path)
        if content["version"] != VERSION:
            raise BadCheckpoint(f"{path} is of version {content['version']!r}; this blockfp reads version {VERSION}")
        found = {name: FileSum(entry["length"], entry["sha256"]) for name, entry in content["files"].items()}
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise error if isinstance(error, BadCheckpoint) else BadCheckpoint(f"{path} is no manifest: {error!r}") from error
    for name, expected in found.items():
        if not untrusted.is_plain_name(name):
            raise BadCheckpoint(f"{path} names {name!r}, which is no file in its folder")
        if not untrusted.is_size(expected.length) or not isinstance(expected.sha256, str):
            raise BadCheckpoint(f"{path} has no length and SHA-256 for {name!r}: {expected}")
    return found


def problem_with(path: Path, expected: FileSum, *, sum: bool = True) -> str | None:
    """The problem with a file of a checkpoint, or None.

    Args:
        path: the file.
        expected: what it must be.
        sum: whether it is read, too, and its SHA-256 compared; otherwise it is only looked at.
    """
    try:
        if untrusted.leads_out(path):
            return f"{path} is a link out of the checkpoint's folder: put a copy of the file in its place"
        with untrusted.open_regular(path) as file:
            length = untrusted.length_of(file)
        if length != expected.length:
            return f"{path} has {length} bytes and should have {expected.length}: it was cut short or written to"
        if sum and file_sum(path) != expected:
            return f"{path} is not what was saved: its SHA-256 differs from the one in {MANIFEST}"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def begin(checkpoint: Path) -> None:
    """Makes an empty folder to write a checkpoint to, `temporary_of(checkpoint)`, and removes what runs that died left.

    Raises:
        FileExistsError: there is a checkpoint of this name, or the run's folder is a checkpoint itself.
        OSError: the run's folder is a file, or can't be written to.
    """
    run = checkpoint.parent
    if checkpoint.exists():
        raise FileExistsError(f"{checkpoint} exists: a checkpoint is never overwritten; save another step, or remove it first")
    if (run / MANIFEST).is_file():
        raise FileExistsError(f"{run} is a checkpoint itself: save to the folder of the run, {run.parent}")
    if run.exists() and not run.is_dir():
        raise NotADirectoryError(f"{run} is no folder, which checkpoints need")
    run.mkdir(parents=True, exist_ok=True)
    for path in run.iterdir():
        if _LEFT_BEHIND.fullmatch(path.name) and (path.is_dir() or path.is_symlink()):
            try:
                _delete(path)
            except OSError as error:
                if path == temporary_of(checkpoint):
                    raise OSError(error.errno, f"{path}, which a run that died left, can't be removed: {error}") from error
                warnings.warn(f"{path} was left behind and can't be removed: {error}", stacklevel=2)
    temporary_of(checkpoint).mkdir()


def give_up(checkpoint: Path) -> None:
    """Removes what was written for a checkpoint that didn't become one."""
    shutil.rmtree(temporary_of(checkpoint), ignore_errors=True)


def publish(checkpoint: Path, files: Mapping[str, FileSum], keep: int | None) -> None:
    """Gives a checkpoint that is on the disk its name, in one step; then removes others until `keep` are left.

    Those of the lowest steps go first; this one stays, also where the run went back and there are later steps. What can't be
    removed is a warning: the checkpoint is there.

    Raises:
        OSError: a file isn't there, or not whole. Nothing is renamed or removed then.
    """
    temporary = temporary_of(checkpoint)
    found = [problem for name, expected in files.items() if (problem := problem_with(temporary / name, expected, sum=False))]
    if found:
        raise OSError(f"{'; '.join(found)}: every rank must write to one folder, on a file system that all of them see")
    write_manifest(temporary, files)
    os.rename(temporary_of(checkpoint), checkpoint)
    to_disk(checkpoint.parent)
    if keep is not None:
        there = [folder_of(checkpoint.parent, step) for step in steps(checkpoint.parent)]
        others = [path for path in there if path != checkpoint and (path / MANIFEST).is_file()]
        _remove(others[: max(0, len(others) + 1 - keep)])


def _remove(surplus: Iterable[Path]) -> None:
    for old in surplus:
        # Renamed first: nobody then finds half of it.
        hidden = old.parent / f".{old.name}.old"
        try:
            os.rename(old, hidden)
            _delete(hidden)
        except OSError as error:
            warnings.warn(f"{old} is surplus and can't be removed: {error}", stacklevel=2)


def _delete(folder: Path) -> None:
    """Removes a folder; of one that lies elsewhere the link to it."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
