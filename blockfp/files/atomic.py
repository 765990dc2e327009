"""Files and folders that are on the disk when they have their names, files whole or not at all, and errors that name them."""

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
"""The extended attribute in which Linux keeps a file's access control list."""


@contextmanager
def naming(path: Path, doing: str) -> Iterator[None]:
    """Has an OSError that leaves it say what was done with which file: the system's own often say neither.

    An error that names a file keeps that, and says `path` as well. What an inner `naming` has said stays.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            if str(path) in str(error):
                raise
            raise type(error)(f"{doing} {path}: {error}") from error
        if error.strerror == os.strerror(error.errno):  # else somebody has said it
            what = doing if error.filename in (None, str(path)) else f"{doing} {path}"
            error.strerror = f"{what}: {error.strerror}"
            error.args = (error.errno, error.strerror)  # what a pickle keeps
            error.filename = str(path) if error.filename is None else error.filename
        raise


@contextmanager
def replacing(path: Path, like: Path | None = None) -> Iterator[Path]:
    """Yields the path of an empty file beside `path` to write to; at the end it takes the place of `path`, in one step.

    An exception leaves the old file as it was and removes the new one; an OSError names `path`. A process that is killed
    leaves the old file whole, and a file whose name starts with "." and ends in ".tmp" beside it, which the next `replacing`
    of the same path removes: the kernel has let go of its lock.

    The new file is on the disk before it gets its name, so that a crash of the machine doesn't leave an empty one. It has the
    permissions, the owner and the group of the old one, or of `like` (see `_keep_access`), and nobody reads it before.

    Raises:
        OSError: it can't be written, or what has its name is no regular file. Where the message says that it has been saved,
            the new file is there, and may be gone after a crash of the machine.
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
    """Holds the lock of a file whose writer has ended.

    Raises:
        BlockingIOError: it hasn't.
        OSError: there is no such file, or the file system has no locks.
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
    """Waits until a file, or the names in a folder, would survive a crash of the machine."""
    with naming(path, "flushing to the disk"):
        _flush(path)


def make_folder(path: Path) -> None:
    """Makes a folder where there is none, and those above it; the name of each is on the disk before the next is made."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with naming(path, "making the folder"):
        try:
            path.mkdir()
        except FileExistsError as error:
            if not path.is_dir():  # else another process has made it
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
    to_disk(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems of networks have no such call for folders.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def _access(path: Path) -> tuple[os.stat_result, bytes | None] | None:
    """Who may do what with the file of this name, or with that to which a link of this name leads; None without one."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    refuse_others(path, found.st_mode)
    return found, _acl(path)


def _acl(file: Path | int) -> bytes | None:
    try:
        return os.getxattr(file, _ACL)
    except OSError:  # it has none, or the file system hasn't
        return None


def _keep_access(path: Path, descriptor: int, old: os.stat_result, acl: bytes | None) -> None:
    """Gives a new file the owner, the group, the access control list and the permissions of the one that it replaces.

    Who isn't root can't give files away. The file is then its writer's own, with a warning, and a group that can't be kept has
    no more rights than others. A program's right to run as its owner (setuid, setgid) is not kept: the content is new.
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
    elif _acl(descriptor) is not None:  # by a default of the folder
        os.removexattr(descriptor, _ACL)
    os.fchmod(descriptor, mode)


def _locked(path: Path, mode: int) -> tuple[Path, int]:
    """Makes a new file beside `path`; returns it and the open descriptor that holds its lock."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            # Where the file system has no locks nobody takes it for left behind either.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_open(temporary, descriptor):
                return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        # Another process found it before it was locked, and has removed it.
        os.close(descriptor)


def is_open(path: Path, descriptor: int) -> bool:
    """Tells whether a name still means the open file."""
    try:
        with naming(path, "looking at"):
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
