"""Atomic replacement of files, durable folders, and OSErrors that name the file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .untrusted import refuse_others

_ACL = "system.posix_acl_access"
"""The extended attribute that holds a file's access control list on Linux."""


@contextmanager
def naming(path: Path, doing: str) -> Iterator[None]:
    """Adds the action and the path to an OSError, which often names neither.

    If the error already names a file, both names are kept. An inner `naming` takes precedence.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            if str(path) in str(error):
                raise
            raise type(error)(f"{doing} {path}: {error}") from error
        if error.strerror == os.strerror(error.errno):  # otherwise an inner `naming` has changed it
            what = doing if error.filename in (None, str(path)) else f"{doing} {path}"
            error.strerror = f"{what}: {error.strerror}"
            error.args = (error.errno, error.strerror)  # pickles only keep args
            error.filename = str(path) if error.filename is None else error.filename
        raise


@contextmanager
def replacing(path: Path, like: Path | None = None) -> Iterator[Path]:
    """Yields the path of an empty temporary file next to `path`; on exit it replaces `path` atomically.

    After an exception the old file is unchanged and the temporary file is removed; an OSError names `path`. If the process is
    killed, the old file stays whole and the temporary file (".NAME.TOKEN.tmp") remains. Its lock is released then, so the next
    `replacing` of the same path removes it.

    The temporary file is flushed to disk before the rename, so a crash of the machine can't leave an empty file. It gets the
    permissions, owner and group of the old file, or of `like` (see `_keep_access`), and is private until then.

    Raises:
        OSError: the file can't be written, or `path` exists and is not a regular file. If the message says that it has been
            saved, the new file is in place, but a crash of the machine may undo that.
    """
    remove_left_behind(path)
    with naming(path, "saving"):
        old = _access(like or path)
        temporary, descriptor = _locked(path, 0o666 if old is None else 0o600)
        try:
            yield temporary
            if old is not None:
                _keep_access(path, descriptor, *old)
            os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    with naming(path, "it has been saved, and a crash of the machine may undo that, since its folder can't be flushed"):
        _flush(path.parent)


def being_written(path: Path) -> dict[str, Path]:
    """Returns the temporary files of `path` by their token: those being written and those of killed processes."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{12}})\.tmp")
    with suppress(OSError), os.scandir(path.parent) as entries:
        return {match[1]: path.with_name(entry.name) for entry in entries if (match := pattern.fullmatch(entry.name))}
    return {}


def remove_left_behind(path: Path) -> None:
    """Removes temporary files of `path` that no process is writing."""
    for temporary in being_written(path).values():
        # Skip files that can't be opened, locked or removed: they do no harm.
        with suppress(OSError), left_behind(temporary):
            temporary.unlink()


@contextmanager
def left_behind(path: Path) -> Iterator[None]:
    """Locks a file whose writer has ended.

    Raises:
        BlockingIOError: its writer still holds the lock.
        OSError: the file doesn't exist, or the file system doesn't support locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with naming(path, "locking"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_open(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


def to_disk(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    with naming(path, "flushing to the disk"):
        _flush(path)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; each name is flushed to disk before the next folder is created."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with naming(path, "making the folder"):
        try:
            path.mkdir()
        except FileExistsError as error:
            if not path.is_dir():  # otherwise another process created it
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
    to_disk(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't flush folders.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def _access(path: Path) -> tuple[os.stat_result, bytes | None] | None:
    """Returns the status and access control list of the file, following links; None if it doesn't exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    refuse_others(path, found.st_mode)
    return found, _acl(path)


def _acl(file: Path | int) -> bytes | None:
    try:
        return os.getxattr(file, _ACL)
    except OSError:  # the file has none, or the file system doesn't support them
        return None


def _keep_access(path: Path, descriptor: int, old: os.stat_result, acl: bytes | None) -> None:
    """Gives a new file the owner, group, access control list and permissions of the file that it replaces.

    Only root can change owners. Otherwise the file keeps its writer as owner, with a warning, and a group that can't be kept
    gets the rights of others. setuid and setgid are dropped, because the content is new.
    """
    mode, new = stat.S_IMODE(old.st_mode) & 0o777, os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError as error:
            try:
                os.fchown(descriptor, -1, old.st_gid)
            except OSError:
                acl, mode = None, mode & (0o707 | (mode & 0o007) << 3)
            before, after = (f"uid {one.st_uid}, gid {one.st_gid}" for one in (old, os.fstat(descriptor)))
            warnings.warn(f"{path} belonged to {before}, and belongs to {after} now: {error.strerror}", stacklevel=4)
    if acl is not None:
        os.setxattr(descriptor, _ACL, acl)
    elif _acl(descriptor) is not None:  # inherited from the folder's default
        os.removexattr(descriptor, _ACL)
    os.fchmod(descriptor, mode)


def _locked(path: Path, mode: int) -> tuple[Path, int]:
    """Creates a temporary file next to `path`; returns it and the open descriptor that holds its lock."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            # On a file system without locks, nobody removes temporary files either.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_open(temporary, descriptor):
                return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        # Another process saw the file before it was locked and removed it.
        os.close(descriptor)


def is_open(path: Path, descriptor: int) -> bool:
    """Returns whether a path still refers to the open file."""
    try:
        with naming(path, "looking at"):
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
