"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; at the end what is there takes the place of `path`, in one step.

    An exception leaves the old file as it was and removes the new one; an OSError that names no file then names `path`. A
    process that is killed leaves the old file whole, and a file whose name starts with "." and ends in ".tmp" beside it, which
    the next `replacing` of the same path removes: the kernel has let go of its lock.

    The new file is on the disk before it gets its name, so that a crash of the machine doesn't leave an empty one.
    """
    remove_left_behind(path)
    temporary, descriptor = None, -1
    try:
        temporary, descriptor = _locked(path)
        yield temporary
        to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
    to_disk(path.parent)


def being_written(path: Path) -> dict[str, Path]:
    """Temporary files of `path` by the token in their names: those being written, and those left behind by processes killed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{12}})\.tmp")
    with suppress(OSError), os.scandir(path.parent) as entries:
        return {match[1]: path.with_name(entry.name) for entry in entries if (match := pattern.fullmatch(entry.name))}
    return {}


def remove_left_behind(path: Path) -> None:
    """Removes temporary files of `path` that no process is writing any more."""
    for temporary in being_written(path).values():
        # What can't be opened, locked or removed stays: that stops nobody.
        with suppress(OSError), left_behind(temporary):
            temporary.unlink()


@contextmanager
def left_behind(path: Path) -> Iterator[None]:
    """Holds the lock of a file whose process doesn't live any more.

    Raises:
        BlockingIOError: it does.
        OSError: there is no such file, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with naming(path, "flock"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_open(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


def to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path, "fsync"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, with names that would survive a crash of the machine.

    Raises:
        OSError: something else has one of the names, or it can't be made.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    # Another process may make it now.
    path.mkdir(exist_ok=True)
    to_disk(path.parent)


@contextmanager
def naming(path: Path, operation: str) -> Iterator[None]:
    """Gives an OSError that names no file the path, and says what was being done to it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror} in {operation}", str(path)) from error
        raise


def _locked(path: Path) -> tuple[Path, int]:
    """Makes a new file beside `path`; returns it and the open descriptor that holds its lock."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Where the file system has no locks nobody takes it for left behind either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_open(temporary, descriptor):
            return temporary, descriptor
        # Another process found it before it was locked, and has removed it.
        os.close(descriptor)


def is_open(path: Path, descriptor: int) -> bool:
    """Tells whether a name still means the open file."""
    try:
        with naming(path, "fstat"):
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
