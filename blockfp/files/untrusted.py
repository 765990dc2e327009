"""Reads untrusted files: only regular files, and never more than they contain."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

HEADER_BYTES = 100_000_000
"""Maximum length of a header, index or manifest, as in the safetensors library."""


MOST_HELD = 256
"""Maximum number of files held open; most systems allow 1,024 descriptors per process."""


class NotPlain(OSError):
    """The path is not a regular file, but a folder, device, pipe or socket."""


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file, or a link to one, for reading; doesn't read anything else.

    Raises OSError if it doesn't exist or can't be read, and `NotPlain` if it isn't a regular file.
    """
    # Check before opening, because opening a device can have effects, and again, because the path may have been replaced.
    refuse_others(path, os.stat(path).st_mode)
    # The file object owns the descriptor from the start, so no interrupt can close it twice.
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    try:
        refuse_others(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def refuse_others(path: Path, mode: int) -> None:
    """Raises NotPlain unless the mode belongs to a regular file."""
    if not stat.S_ISREG(mode):
        raise NotPlain(0, "is a directory" if stat.S_ISDIR(mode) else "is not a regular file", str(path))


class HeldFile:
    """A regular file, opened once and read many times, even if its path is replaced meanwhile.

    A process holds at most `MOST_HELD` files open. Further files are reopened for each reader and must be unchanged.

    Attributes:
        path: the path when it was opened.
        length: size in bytes when it was opened.
        close: closes the file. Otherwise garbage collection does, where Python would swallow a Ctrl-C.
    """

    def __init__(self, path: Path):
        """Opens a file or the target of a link. Raises OSError as `open_regular` does."""
        file = open_regular(path)
        self.close = weakref.finalize(self, _let_go, file)
        self.path = path
        self._seen = _state_of(file)
        self._file = file if len(_held) < MOST_HELD else None
        if self._file is None:
            self.close()
        else:
            _held.add(file.fileno())

    @property
    def length(self) -> int:
        return self._seen[2]

    @contextmanager
    def reader(self) -> Iterator[IO[bytes]]:
        """Yields the file from its beginning, with a separate position for each reader and thread.

        Raises OSError if the length or modification time changed since it was opened.
        """
        file = self._file or open_regular(self.path)
        try:
            if file is not self._file:
                self._check(file)
            with io.BufferedReader(_At(file.fileno())) as reader:
                yield reader
            self._check(file)
        finally:
            if file is not self._file:
                file.close()

    def _check(self, file: IO[bytes]) -> None:
        if _state_of(file) != self._seen:
            raise OSError(errno.ESTALE, "was replaced or written to after it was opened", str(self.path))


_held: set[int] = set()
"""Descriptors of the files held open."""


def _let_go(file: IO[bytes]) -> None:
    _held.discard(file.fileno())
    file.close()


def _state_of(file: IO[bytes]) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _At(io.RawIOBase):
    """An open file with its own position."""

    def __init__(self, descriptor: int):
        self._descriptor, self._at = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._descriptor).st_size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, f"negative position {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._at)
        self._at += count
        return count


def length_of(file: IO[bytes]) -> int:
    """Returns the number of bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def read_header(file: IO[bytes], length: int, what: str, most: int = HEADER_BYTES) -> bytes:
    """Reads `length` bytes; raises ValueError if that exceeds `most` or the file."""
    if length > most:
        raise ValueError(f"{what} of {length} bytes is not read: at most {most}")
    content = file.read(length)
    if len(content) != length:
        raise ValueError(f"truncated: {what} should have {length} bytes, but has {len(content)}")
    return content


def parse_json(content: bytes, what: str, most: int = HEADER_BYTES) -> Any:
    """Parses JSON from at most `most` bytes, with at most `most` / 10 values.

    Raises ValueError for invalid JSON, duplicate names in an object, too many values or too deep nesting.
    """
    if sum(map(content.count, (b"[", b"{", b","))) > most // 10:
        raise ValueError(f"{what} holds more than {most // 10} values")
    try:
        return json.loads(content.decode(), parse_constant=_no_number, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def read_json(path: Path, most: int = HEADER_BYTES) -> Any:
    """Reads and parses a JSON file of at most `most` bytes.

    Raises OSError if it can't be read or isn't a regular file, ValueError if it is invalid or too large.
    """
    with open_regular(path) as file:
        return parse_json(read_header(file, length_of(file), "the file", most), "the file", most)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"duplicate name {twice!r}")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def is_plain_name(name: object) -> bool:
    """Returns whether a value is a plain file name, without a path."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def leads_out(path: Path) -> bool:
    """Returns whether a path is a link out of its folder."""
    return path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent))


def is_size(value: object) -> bool:
    """Returns whether a value is an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def printable(text: str) -> str:
    """Escapes control characters in untrusted text for a terminal, as Python's repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
