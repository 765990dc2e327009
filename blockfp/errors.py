"""Exceptions of blockfp. This module imports only the standard library."""

from __future__ import annotations

from pathlib import Path


class BadFile(ValueError):
    """A file is unusable; the message names the file and, if the error concerns one tensor, the tensor."""

    def __init__(self, path: Path, problem: object, tensor: str | None = None):
        # Some third-party exceptions have no text, and a corrupt file can contain names of a megabyte.
        told = _shortened(str(problem) or repr(problem))
        where = f"{path}, tensor {_shortened(repr(tensor))}" if tensor is not None else f"{path}"
        super().__init__(f"{where}: {told}")
        self._given = (path, told, tensor)

    def __reduce__(self):
        # Ranks send exceptions to each other as pickles.
        return BadFile, self._given


class BadCheckpoint(ValueError):
    """A checkpoint is unusable; the message names the file or entry and the problem."""


class BadBackend(ValueError):
    """A backend of `blockfp check` can't be found or breaks the protocol; the message names the problem."""


def _shortened(text: str) -> str:
    return text if len(text) < 2000 else f"{text[:1000]} .. {text[-200:]}"
