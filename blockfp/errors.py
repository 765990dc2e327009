"""blockfp's own errors. Importing them needs nothing but Python."""

from __future__ import annotations

from pathlib import Path


class BadFile(ValueError):
    """A file that can't be used; the message names it, and the tensor where there is one."""

    def __init__(self, path: Path, problem: object, tensor: str | None = None):
        # Some exceptions of others have no text, and some files names of a megabyte.
        told = _shortened(str(problem) or repr(problem))
        where = f"{path}, tensor {_shortened(repr(tensor))}" if tensor is not None else f"{path}"
        super().__init__(f"{where}: {told}")
        self._given = (path, told, tensor)

    def __reduce__(self):
        # Ranks send each other what they raise.
        return BadFile, self._given


class BadCheckpoint(ValueError):
    """A checkpoint that can't be used; the message names the file, or the entry, and what is wrong with it."""


class BadBackend(ValueError):
    """A backend of `blockfp check` that can't be found or doesn't do what it must; the message says what is wrong."""


def _shortened(text: str) -> str:
    return text if len(text) < 2000 else f"{text[:1000]} .. {text[-200:]}"
