"""Model files, tensor by tensor: reading .safetensors, .npy and .npz, writing .safetensors.

Opening a file reads its header and holds it against the file's size; a tensor's data are read when asked for, so memory holds
one tensor at a time. safetensors is a JSON header before raw little-endian data; the library's NumPy interface has neither
bfloat16 nor the small floats, hence the few lines here, and the library checks what they don't.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_NAMES = "F64 float64, F32 float32, F16 float16, I64 int64, I32 int32, I16 int16, I8 int8, BOOL bool, C64 complex64"
_NAMES += ", U64 uint64, U32 uint32, U16 uint16, U8 uint8"
_SMALL = "BF16 bfloat16, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, F8_E8M0 float8_e8m0fnu"

DTYPES = {tag: np.dtype(name) for tag, name in (pair.split() for pair in _NAMES.split(", "))}
DTYPES |= {tag: np.dtype(getattr(ml_dtypes, name)) for tag, name in (pair.split() for pair in _SMALL.split(", "))}
"""NumPy's dtype for safetensors' name of it."""

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
"""safetensors' name for a NumPy dtype."""

METADATA = "__metadata__"
"""What a header calls the file's strings, and no tensor can be called."""

_BAD_DATA = (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, NotImplementedError)


class BadFile(ValueError):
    """A file that can't be used; the message names it, and the tensor where there is one."""

    def __init__(self, path: Path, problem: object, tensor: str | None = None):
        where = f"{path}, tensor {tensor!r}" if tensor is not None else f"{path}"
        # Some exceptions of others have no text.
        super().__init__(f"{where}: {str(problem) or repr(problem)}")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, its data not read yet.

    Attributes:
        name: its key in the file; for .npy the file's stem.
        dtype: NumPy's dtype.
        shape: its shape.
        read: reads the data. Raises `BadFile`.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def skipped(self) -> str | None:
        """Why it can't be quantized, or None where it can."""
        if self.dtype.name not in ("float32", "float16", "bfloat16"):
            return f"dtype {self.dtype.name}"
        if len(self.shape) < 2:
            return f"{len(self.shape)} axis" if len(self.shape) else "a scalar"
        return None


@dataclass(frozen=True)
class Model:
    """An open file: its tensors in the file's order, and the metadata of a .safetensors."""

    path: Path
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_model(path: Path) -> Model:
    """Reads the header of a .safetensors, .npy or .npz file.

    bfloat16 in .npy and .npz, which NumPy writes as two bytes without a type ("V2"), is read as such.

    Raises:
        BadFile: no such file, another kind of file, or one that is truncated or corrupt.
    """
    readers = {".safetensors": _open_safetensors, ".npy": _open_npy, ".npz": _open_npz}
    if path.suffix not in readers:
        raise BadFile(path, f"the name must end in {', '.join(readers)}")
    if not path.is_file():
        raise BadFile(path, "is a directory" if path.is_dir() else "no such file")
    try:
        return readers[path.suffix](path)
    except BadFile:
        raise
    except _BAD_DATA as error:
        raise BadFile(path, error) from error


def _open_safetensors(path: Path) -> Model:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise BadFile(path, f"not a safetensors file, or cut short: its header should have {length} bytes")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop(METADATA, None) or {}
            entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            tensors = tuple(_safetensors_entry(path, 8 + length, size, name, **entry) for name, entry in entries)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise BadFile(path, f"the header is not JSON: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise BadFile(path, f"the header is not one of safetensors: {error!r}") from error
    try:
        # Holes, overlaps, double names.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise BadFile(path, error) from error
    return Model(path, tensors, metadata)


def _safetensors_entry(
    path: Path, data: int, size: int, name: str, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    if dtype not in DTYPES:
        raise BadFile(path, f"dtype {dtype} is not known", name)
    start, end = data_offsets
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)):
        raise BadFile(path, f"shape {shape} and data_offsets {data_offsets} must be integers of 0 or more", name)
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != nbytes:
        raise BadFile(path, f"{dtype} of shape {shape} has {nbytes} bytes, the header gives it {end - start}", name)
    if data + end > size:
        raise BadFile(path, f"cut short: its data end at byte {data + end}, the file at {size}", name)

    def read() -> np.ndarray:
        with path.open("rb") as file:
            file.seek(data + start)
            content = bytearray(nbytes)
            if file.readinto(content) != nbytes:
                raise BadFile(path, "cut short", name)
        return np.frombuffer(content, DTYPES[dtype]).reshape(shape)

    return Tensor(name, DTYPES[dtype], tuple(shape), read)


def _open_npy(path: Path) -> Model:
    tensor = _npy(path, path.stem, lambda: path.open("rb"), path.stat().st_size)
    return Model(path, (tensor,))


def _open_npz(path: Path) -> Model:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if not members:
        raise BadFile(path, "holds no arrays")

    def opener(member: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
        return lambda: zipfile.ZipFile(path).open(member)

    return Model(path, tuple(_npy(path, m.filename.removesuffix(".npy"), opener(m), m.file_size) for m in members))


def _npy(path: Path, name: str, opened: Callable[[], IO[bytes]], size: int) -> Tensor:
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with opened() as file:
            version = np.lib.format.read_magic(file)
            if version not in headers:
                raise BadFile(path, f"version {version} of the npy format is not one of {list(headers)}", name)
            shape, _, stored = headers[version](file)
            header_size = file.tell()
    except _BAD_DATA as error:
        raise error if isinstance(error, BadFile) else BadFile(path, error, name) from error
    if stored.hasobject:
        raise BadFile(path, "holds Python objects, which are not read", name)
    dtype = np.dtype(ml_dtypes.bfloat16) if stored.str in ("|V2", "<V2") else stored.newbyteorder("=")
    nbytes = math.prod(shape) * dtype.itemsize
    if header_size + nbytes > size:
        raise BadFile(
            path, f"cut short: {dtype.name} of shape {shape} has {nbytes} bytes, {size - header_size} are there", name
        )

    def read() -> np.ndarray:
        try:
            with opened() as file:
                x = np.lib.format.read_array(file, allow_pickle=False)
                file.read(1)  # the end of a zip member, where its checksum is looked at
        except _BAD_DATA as error:
            raise BadFile(path, error, name) from error
        # NumPy makes a scalar that it lays out anew one of shape (1,).
        return x.view(dtype) if stored.kind == "V" else np.ascontiguousarray(x, dtype).reshape(shape)

    return Tensor(name, dtype, shape, read)


@dataclass(frozen=True)
class Entry:
    """What a tensor to be written is: its key, NumPy dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


def write_safetensors(
    path: Path, entries: Sequence[Entry], arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Writes a .safetensors file; `arrays` gives (name, array) for each of `entries`, in any order, one held at a time.

    Raises:
        ValueError: two entries have one name, or an array isn't what its entry says.
    """
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    where: dict[str, tuple[Entry, int]] = {}
    offset = 0
    # Readers view tensors in place: larger types first keeps every one aligned.
    for entry in sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name)):
        if entry.name in where:
            raise ValueError(f"two tensors would be called {entry.name!r}")
        end = offset + math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.name] = {"dtype": TAGS[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
        where[entry.name] = (entry, offset)
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for name, array in arrays:
            entry, offset = where.pop(name)
            if (array.dtype, array.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"tensor {name!r} is {array.dtype} {array.shape}, expected {entry.dtype} {entry.shape}")
            file.seek(start + offset)
            file.write(array.tobytes())
    if where:
        raise ValueError(f"no data for the tensors {', '.join(where)}")
