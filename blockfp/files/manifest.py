"""Folders of checkpoints: numbered, complete or absent, with checksums of their files.

FOLDER/
  step-00000200/             a complete checkpoint, renamed to this once everything was on disk (`publishing`)
    manifest.json            length and SHA-256 of every other file
    ..                       files of the checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import BadCheckpoint
from . import untrusted
from .atomic import naming

MANIFEST = "manifest.json"
VERSION = 1
LEFT_BEHIND = re.compile(r"\.step-\d{8,}(\.[0-9a-f]{12})?\.(tmp|old)")
"""Names of folders that are incomplete or being removed."""

_WHOLE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class FileSum:
    """Length in bytes and SHA-256 of a file."""

    length: int
    sha256: str


def folder_of(run: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint in a run's folder."""
    return run / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """Returns the steps with checkpoints in a run's folder, ascending, without looking for manifests."""
    there = run.iterdir() if run.is_dir() else ()
    found = {int(match[1]) for path in there if (match := _WHOLE.fullmatch(path.name))}
    # Skip files, and names with more zeros than blockfp writes.
    return sorted(step for step in found if folder_of(run, step).is_dir())


def find(folder: Path, step: int | None = None) -> Path:
    """Returns a checkpoint: `folder` itself, or that of a step in it (by default the last). Raises BadCheckpoint if there is
    none."""
    if (folder / MANIFEST).is_file():
        if step is not None and folder_of(folder.parent, step).name != folder.name:
            raise BadCheckpoint(f"{folder} is a checkpoint itself, not of step {step}: leave step out, or name {folder.parent}")
        return folder
    there = steps(folder)
    if not there:
        raise BadCheckpoint(f"{folder} holds no checkpoint: it has neither a {MANIFEST} nor a folder step-..")
    if step is not None and step not in there:
        raise BadCheckpoint(f"{folder} has no checkpoint of step {step}, only {', '.join(map(str, there))}")
    return folder_of(folder, there[-1] if step is None else step)


def check_step(checkpoint: Path, step: Any) -> None:
    """Raises BadCheckpoint if a checkpoint has no step, or a step that contradicts the folder's name."""
    if not untrusted.is_size(step):
        raise BadCheckpoint(f"{checkpoint} doesn't say which step it is of")
    if (name := _WHOLE.fullmatch(checkpoint.name)) and int(name[1]) != step:
        proper = folder_of(checkpoint.parent, step).name
        raise BadCheckpoint(
            f"{checkpoint} is of step {step}: call it {proper}, or by a name that isn't a step's, and load it so"
        )


def is_own(checkpoint: Path) -> bool:
    """Returns whether a folder is a blockfp checkpoint, by its manifest or its name (step-.., or a temporary name)."""
    names = {checkpoint.absolute().name, checkpoint.resolve().name}
    called = any(pattern.fullmatch(name) for pattern in (_WHOLE, LEFT_BEHIND) for name in names)
    return called or os.path.lexists(checkpoint / MANIFEST)


def _sum_of(file: IO[bytes]) -> FileSum:
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    return FileSum(file.tell(), digest)


def text_of(files: Mapping[str, FileSum]) -> bytes:
    """Returns the manifest of these files."""
    entries = {name: {"length": s.length, "sha256": s.sha256} for name, s in sorted(files.items())}
    return (json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n").encode()


def problem_with(path: Path, length: int) -> str | None:
    """Checks that a checkpoint's file has the expected length, without reading it; returns the problem or None."""
    try:
        if untrusted.leads_out(path):
            return f"{path} is a link out of the checkpoint's folder: put a copy of the file in its place"
        with untrusted.open_regular(path) as file:
            found = untrusted.length_of(file)
        if found != length:
            return f"{path} has {found} bytes instead of {length}: it was truncated or written to"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


class Stamp(NamedTuple):
    """Length and modification time, which change if a file is written to or replaced."""

    length: int
    written_ns: int


class Files:
    """The files of a checkpoint; reading one that changed since it was first seen raises an error.

    Attributes:
        folder: the checkpoint's folder.
        listed: the manifest's entries, or None for another program's checkpoint without a manifest.
        stamps: stamps of the files seen so far. With a manifest, these files were checked; `take` adds other ranks' stamps.

    Raises:
        BadCheckpoint: a checkpoint of blockfp has no valid manifest.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.stamps: dict[str, Stamp] = {}
        self.listed = self._read_manifest() if is_own(folder) else None

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file; raises BadCheckpoint, before or after the caller reads it, if it changed since it was first seen."""
        path = self.folder / name
        with untrusted.open_regular(path) as file, naming(path, "reading"):
            self.check(name, file)
            yield file
            self.check(name, file)

    def check(self, name: str, file: IO[bytes]) -> None:
        """Raises BadCheckpoint if an open file changed since it was first seen."""
        status = os.fstat(file.fileno())
        stamp = Stamp(status.st_size, status.st_mtime_ns)
        if self.stamps.setdefault(name, stamp) != stamp:
            raise BadCheckpoint(f"{self.folder / name} was written to, or replaced, while the checkpoint was read")

    def sum_up(self, rank: int = 0, world: int = 1) -> list[str]:
        """Checks a rank's share of the files against the manifest and records their stamps; returns the problems."""
        assert self.listed is not None
        problems = (self._problem(name, expected) for name, expected in list(self.listed.items())[rank::world])
        return [problem for problem in problems if problem]

    def take(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Adds another rank's stamps; returns a problem for each file that differs."""
        other = [name for name, stamp in stamps.items() if self.stamps.setdefault(name, stamp) != stamp]
        return [f"{self.folder / name} is not the same file on all ranks, or was written to meanwhile" for name in other]

    def _problem(self, name: str, expected: FileSum) -> str | None:
        path = self.folder / name
        if problem := problem_with(path, expected.length):
            return problem
        try:
            with self.open(name) as file:
                if _sum_of(file) != expected:
                    return f"{path} has changed since it was saved: its SHA-256 differs from the one in {MANIFEST}"
        except OSError as error:
            return f"{path}: {error.strerror}"
        except BadCheckpoint as error:
            return str(error)
        return None

    def _read_manifest(self) -> dict[str, FileSum]:
        path = self.folder / MANIFEST
        try:
            with self.open(MANIFEST) as file:
                content = untrusted.parse_json(untrusted.read_header(file, untrusted.length_of(file), "the file"), "the file")
            if content["version"] != VERSION:
                raise BadCheckpoint(f"{path} is of version {content['version']!r}; this blockfp reads version {VERSION}")
            found = {name: FileSum(entry["length"], entry["sha256"]) for name, entry in content["files"].items()}
        except OSError as error:
            raise BadCheckpoint(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (
                error if isinstance(error, BadCheckpoint) else BadCheckpoint(f"{path} is not a manifest: {error!r}")
            ) from error
        for name, expected in found.items():
            if not untrusted.is_plain_name(name) or name == MANIFEST:
                raise BadCheckpoint(f"{path} names {name!r}, which is not a file in its folder")
            if not untrusted.is_size(expected.length) or not isinstance(expected.sha256, str):
                raise BadCheckpoint(f"{path} has no length and SHA-256 for {name!r}: {expected}")
        return found
