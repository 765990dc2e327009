"""Reading files that anybody may have written: regular ones alone, and no more of them than they hold."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO, Any

HEADER_BYTES = 100_000_000
"""The longest header, index or manifest that is read: what the safetensors library allows."""

_VALUES = 10_000_000
"""Lists, objects and entries in one, at most: each takes up to a hundred bytes."""


class NotPlain(OSError):
    """Says that a path is no regular file, but a folder, a device, a pipe or a socket."""


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file, or a link to one, for reading; of anything else nothing is read.

    Raises:
        OSError: there is none, or it can't be read. `NotPlain` says that it is something else.
    """
    # Looked at first, since opening a device may do something; and again, since it may have been replaced.
    _refuse_others(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_others(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotPlain(0, "is a directory" if stat.S_ISDIR(mode) else "is no regular file", str(path))


def length_of(file: IO[bytes]) -> int:
    """Number of bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def read_header(file: IO[bytes], length: int, what: str) -> bytes:
    """Reads `length` bytes.

    Raises:
        ValueError: they are more than a header may have, or than there are.
    """
    if length > HEADER_BYTES:
        raise ValueError(f"{what} of {length} bytes is not read: at most {HEADER_BYTES}")
    content = file.read(length)
    if len(content) != length:
        raise ValueError(f"cut short: {what} should have {length} bytes, {len(content)} are there")
    return content


def parse_json(content: bytes, what: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is not JSON, or nests deeper or holds more than anything that blockfp reads does.
    """
    if sum(map(content.count, (b"[", b"{", b","))) > _VALUES:
        raise ValueError(f"{what} holds more than {_VALUES} values")
    try:
        return json.loads(content, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def read_json(path: Path) -> Any:
    """Reads and parses a file of JSON.

    Raises:
        OSError: it can't be read, or is no regular file.
        ValueError: it is not JSON, or too large.
    """
    with open_regular(path) as file:
        return parse_json(read_header(file, length_of(file), "the file"), "the file")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def is_plain_name(name: object) -> bool:
    """Tells whether a value is the name of a file in a folder, and leads nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def leads_out(path: Path) -> bool:
    """Tells whether a name in a folder is a link that leads out of it."""
    return path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent))


def is_size(value: object) -> bool:
    """Tells whether a value is a whole number from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def printable(text: str) -> str:
    """Makes others' text fit for a terminal: control characters stand as Python writes them in a string."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
