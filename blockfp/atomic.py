"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; at the end what is there takes the place of `path`, in one step.

    An exception leaves the old file as it was and removes the new one. A process that is killed leaves the old file whole,
    and a file whose name starts with "." and ends in ".tmp" beside it.

    The new file is on the disk before it gets its name, so that a crash of the machine doesn't leave an empty one.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
        to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    to_disk(path.parent)


def to_disk(path: Path) -> None:
    """Returns when a file, or the names in a folder, would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
