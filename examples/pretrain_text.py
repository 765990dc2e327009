"""The text of `pretrain.py`: sources and documentation of the installed Python packages, as bytes.

A hash of its name decides whether a file is held out, so a file is always on the same side. Repeated paragraphs are dropped,
and held-out files come first: none of their paragraphs, except short ones, remains in the training text.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SUFFIXES = frozenset((".c", ".cpp", ".cu", ".h", ".hpp", ".md", ".py", ".pyi", ".rst"))
LARGEST_FILE = 1_000_000
SHORT = 40
"""Bytes of a paragraph that may come again: closing brackets, bare returns."""
HELD_OUT = 32
"""One file of so many is held out, and as small a part of the bytes at most."""


@dataclass(frozen=True)
class Text:
    """A prepared text.

    Attributes:
        training, held_out: uint8, mapped from files.
        digest: SHA-256 of both.
    """

    training: np.ndarray
    held_out: np.ndarray
    digest: str


def folders() -> list[Path]:
    """Returns the folders of Python's own and the installed packages' files."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def files(roots: list[Path]) -> list[tuple[bytes, Path]]:
    """Returns (hash of the name below its root, path) of each text file, ordered by hash."""
    found = {}
    for root in roots:
        for folder, below, names in os.walk(root):
            # Packages below the standard library are a root of their own.
            below[:] = [name for name in below if name not in ("site-packages", "__pycache__")]
            for name in names:
                path = Path(folder, name)
                if path.suffix in SUFFIXES:
                    found.setdefault(hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(), path)
    return sorted(found.items())


def is_held_out(name: bytes) -> bool:
    """Decides by the hash of a file's name."""
    return name[-1] < 256 // HELD_OUT


def new_paragraphs(text: bytes, seen: set[bytes]) -> bytes:
    """Returns a file's paragraphs that aren't in `seen`, and adds them to it."""
    kept = []
    for paragraph in text.split(b"\n\n"):
        digest = hashlib.blake2b(paragraph.strip(), digest_size=16).digest()
        if len(paragraph) < SHORT or digest not in seen:
            kept.append(paragraph)
        seen.add(digest)
    return b"\n\n".join(kept)


def collect(roots: list[Path], limit: int) -> tuple[bytes, bytes]:
    """Returns (training, held out): files in a random but fixed order, until the training text has `limit` bytes.

    Raises:
        FileNotFoundError: there is less than 100 kB of text.
    """
    named, seen = files(roots), set()
    held_out = joined((path for name, path in named if is_held_out(name)), limit // HELD_OUT, seen)
    training = joined((path for name, path in named if not is_held_out(name)), limit, seen)
    if min(len(training), HELD_OUT * len(held_out)) < 100_000:
        raise FileNotFoundError(f"no text to speak of in {', '.join(map(str, roots))}: are packages installed as archives?")
    return training, held_out


def joined(paths: Iterator[Path], limit: int, seen: set[bytes]) -> bytes:
    """Joins the new paragraphs of files."""
    parts, size = [], 0
    for path in paths:
        if size >= limit:
            break
        if path.is_file() and path.stat().st_size <= LARGEST_FILE:
            parts.append(new_paragraphs(path.read_bytes(), seen))
            size += len(parts[-1])
    return b"\n".join(parts)[:limit]


def prepare(folder: Path, limit: int, roots: list[Path] | None = None) -> None:
    """Writes the text into a folder, unless it exists; several processes may do so at once.

    Args:
        folder: gets training.bin, held_out.bin, and text.json, which is written last.
        limit: maximum bytes of training text.
        roots: folders to search, by default `folders()`.
    """
    if (folder / "text.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = collect(roots or folders(), limit)
    about = {"limit": limit, "training": len(training), "held_out": len(held_out)}
    about["digest"] = hashlib.sha256(training + held_out).hexdigest()
    for name, content in (("training.bin", training), ("held_out.bin", held_out), ("text.json", json.dumps(about).encode())):
        # Under its name it is whole.
        new = folder / f"{name}.{os.getpid()}"
        new.write_bytes(content)
        new.replace(folder / name)


def read(folder: Path, limit: int) -> Text:
    """Returns the text written by `prepare`.

    Raises:
        ValueError: it was prepared with another limit.
    """
    about = json.loads((folder / "text.json").read_text())
    if about["limit"] != limit:
        raise ValueError(f"{folder} was prepared with a limit of {about['limit']} bytes, not {limit}: name another folder")
    parts = [np.memmap(folder / f"{name}.bin", np.uint8, "r") for name in ("training", "held_out")]
    return Text(*parts, about["digest"])


class Order:
    """Pieces of a text in random order, each once per epoch; a single number gives the position.

    Args:
        text: uint8.
        length: bytes in a piece.
        seed: seed of the order.
    """

    def __init__(self, text: np.ndarray, length: int, seed: int):
        self.text, self.length, self.seed = text, length, seed
        self.pieces = len(text) // length
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Returns uint8 [count, length]: pieces first .. first + count - 1."""
        return np.stack([self._piece(number) for number in range(first, first + count)])

    def _piece(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.pieces)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.pieces)
        start = self._order[place] * self.length
        return self.text[start : start + self.length]
