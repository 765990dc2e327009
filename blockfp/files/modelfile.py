"""Model files, tensor by tensor: reads .safetensors, .npy and .npz, writes .safetensors.

Opening a file reads its header and checks it against the file's size. Data are read on demand, so memory holds one tensor at a
time. The file stays open as long as its tensors exist, so header and data belong to the same file even if a writer replaces it.
A safetensors file is a JSON header followed by raw little-endian data without gaps. Its F4 has two elements in a byte, low
nibble first; NumPy's float4_e2m1fn has one.

Files are untrusted. Only regular files are opened, headers have a maximum length (`untrusted.HEADER_BYTES`, NumPy's 10,000
bytes), and nothing is allocated for data that the file is too small to hold.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

from ..definition import layout
from ..errors import BadFile
from . import untrusted
from .untrusted import HeldFile

_NAMES = "F64 float64, F32 float32, F16 float16, I64 int64, I32 int32, I16 int16, I8 int8, BOOL bool, C64 complex64"
_NAMES += ", U64 uint64, U32 uint32, U16 uint16, U8 uint8"
_SMALL = "BF16 bfloat16, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, F8_E8M0 float8_e8m0fnu, F4 float4_e2m1fn"
_SMALL += ", F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz"

BY_TAG = {tag: np.dtype(name) for tag, name in (pair.split() for pair in _NAMES.split(", "))}
BY_TAG |= {tag: np.dtype(getattr(ml_dtypes, name)) for tag, name in (pair.split() for pair in _SMALL.split(", "))}
"""NumPy dtypes by safetensors' names."""

TAGS = {dtype: tag for tag, dtype in BY_TAG.items()}
"""safetensors' names by NumPy dtype."""

F4 = BY_TAG["F4"]

METADATA = "__metadata__"
"""The key of the metadata in a header; no tensor can have this name."""

_MOST_AXES = 64
_DEFLATED = 1032
"""Maximum ratio of uncompressed to deflated bytes."""


def stored_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Returns the bytes of a tensor's data in a file."""
    return -(-math.prod(shape) // 2) if dtype == F4 else math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, read on demand.

    Attributes:
        name: its key in the file; for .npy the file's stem.
        dtype: NumPy's dtype.
        shape: its shape.
        read: reads the data; raises `BadFile`.
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
        return stored_bytes(self.shape, self.dtype)

    @property
    def skipped(self) -> str | None:
        """The reason why it can't be quantized, or None."""
        if self.dtype.name not in ("float32", "float16", "bfloat16"):
            return f"dtype {self.dtype.name}"
        if len(self.shape) < 2:
            return f"{len(self.shape)} axis" if len(self.shape) else "a scalar"
        return None

    @property
    def unchecked(self) -> str | None:
        """The reason why `blockfp check` has nothing of it to compare, or None."""
        return self.skipped or (None if self.elements else "no elements")


@dataclass(frozen=True)
class Model:
    """An open file: its tensors in file order, and the metadata of a .safetensors file.

    Attributes:
        path, tensors, metadata: of the file.
        files: the open files that tensors are read from.
    """

    path: Path
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: tuple[HeldFile, ...] = ()

    def close(self) -> None:
        """Closes its files."""
        for file in self.files:
            file.close()


def open_model(path: Path) -> Model:
    """Reads the header of a .safetensors, .npy or .npz file.

    NumPy writes bfloat16 as two untyped bytes ("V2"); they are read as bfloat16. Raises BadFile if the file doesn't exist, is
    truncated or corrupt, or has another type.
    """
    readers = {".safetensors": _open_safetensors, ".npy": _open_npy, ".npz": _open_npz}
    if path.suffix not in readers:
        raise BadFile(path, f"the name must end in {', '.join(readers)}")
    with as_bad_file(path):
        return readers[path.suffix](HeldFile(path))


@contextmanager
def as_bad_file(path: Path, tensor: str | None = None) -> Iterator[None]:
    """Converts any exception raised while reading this file to a BadFile."""
    try:
        yield
    except BadFile:
        raise
    except FileNotFoundError as error:
        raise BadFile(path, "no such file", tensor) from error
    except OSError as error:
        raise BadFile(path, error.strerror or error, tensor) from error
    except MemoryError as error:
        raise BadFile(path, "it needs more memory than is available", tensor) from error
    except Exception as error:
        raise BadFile(path, error, tensor) from error


def _problem_with_shape(shape: Sequence[int], dtype: np.dtype) -> str | None:
    """Returns why no array can have this shape, or None."""
    if len(shape) > _MOST_AXES or not all(map(untrusted.is_size, shape)):
        return f"shape {_shortened(shape)} must be integers of 0 or more, {_MOST_AXES} at most"
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        return f"shape {_shortened(shape)} is larger than any memory"
    return None


def odd_f4(shape: Sequence[int], dtype: np.dtype) -> str | None:
    """Returns why a tensor can't be stored, or None: 4-bit elements must fill bytes."""
    odd = dtype == F4 and math.prod(shape) % 2
    return f"has {math.prod(shape)} elements of 4 bits, which don't fill bytes" if odd else None


def _shortened(shape: Sequence[int]) -> str:
    text = repr(list(shape[: _MOST_AXES + 1]))
    return text if len(text) < 200 else f"{text[:200]} .."


def _open_safetensors(file: HeldFile) -> Model:
    path = file.path
    with file.reader() as reader:
        length = int.from_bytes(reader.read(8), "little")
        if file.length < 8 or length > file.length - 8:
            raise BadFile(path, f"not a safetensors file, or truncated: its header should have {length} bytes")
        content = untrusted.read_header(reader, length, "a header")
    try:
        header = untrusted.parse_json(content, "the header")
    except ValueError as error:
        raise BadFile(path, f"the header is not JSON: {error}") from error
    tensors, end = [], 0
    try:
        metadata = {} if (strings := header.pop(METADATA, None)) is None else strings
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise TypeError(f"{METADATA} must be strings by strings")
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensors.append(_safetensors_entry(file, 8 + length, end, name, **entry))
            end += tensors[-1].nbytes
    except BadFile:
        raise
    except Exception as error:
        raise BadFile(path, f"the header is not one of safetensors: {error!r}") from error
    if beyond := file.length - (8 + length + end):
        raise BadFile(path, f"has {beyond} bytes after its tensors")
    return Model(path, tuple(tensors), metadata, (file,))


def _safetensors_entry(
    file: HeldFile, data: int, first: int, name: str, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    """Parses a header entry; data must begin `first` bytes after byte `data` of the file."""
    path = file.path
    name.encode()  # raises for a lone surrogate
    if dtype not in BY_TAG:
        raise BadFile(path, f"dtype {dtype} is not known", name)
    start, end = data_offsets
    if not isinstance(shape, list) or not all(map(untrusted.is_size, data_offsets)):
        raise BadFile(path, f"shape and data_offsets {_shortened(data_offsets)} must be integers of 0 or more", name)
    if problem := _problem_with_shape(shape, BY_TAG[dtype]) or odd_f4(shape, BY_TAG[dtype]):
        raise BadFile(path, problem, name)
    nbytes = stored_bytes(shape, BY_TAG[dtype])
    if end - start != nbytes:
        raise BadFile(path, f"{dtype} of shape {shape} has {nbytes} bytes, the header gives it {end - start}", name)
    if data + end > file.length:
        raise BadFile(path, f"truncated: its data end at byte {data + end}, the file at {file.length}", name)
    if start != first:
        raise BadFile(path, f"its data begin at byte {start} of all data, and those before end at {first}", name)

    def read() -> np.ndarray:
        with as_bad_file(path, name), file.reader() as reader:
            reader.seek(data + start)
            content = bytearray(nbytes)
            if reader.readinto(content) != nbytes:  # pyright: ignore[reportAttributeAccessIssue]
                raise BadFile(path, "truncated", name)
        held = np.frombuffer(content, np.uint8)
        if BY_TAG[dtype] == F4:
            held = layout.unpack(held, 4, 2 * nbytes)
        return held.view(BY_TAG[dtype]).reshape(shape)

    return Tensor(name, BY_TAG[dtype], tuple(shape), read)


_Opened = Callable[[], AbstractContextManager[IO[bytes]]]


def _open_npy(file: HeldFile) -> Model:
    return Model(file.path, (_npy(file.path, file.path.stem, file.reader, file.length),), files=(file,))


def _open_npz(file: HeldFile) -> Model:
    path = file.path
    with file.reader() as reader, zipfile.ZipFile(reader) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if not members:
        raise BadFile(path, "holds no arrays")
    twice = [name for name, times in Counter(member.filename for member in members).items() if times > 1]
    if twice or sum(member.compress_size for member in members) > file.length:
        raise BadFile(path, f"has {twice[0]!r} twice" if twice else "its arrays overlap, or extend beyond its end")

    def opener(member: zipfile.ZipInfo) -> _Opened:
        @contextmanager
        def opened() -> Iterator[IO[bytes]]:
            with file.reader() as reader, zipfile.ZipFile(reader) as archive, archive.open(member) as stream:
                yield stream

        return opened

    return Model(path, tuple(_npy(path, _name_of(path, m), opener(m), m.file_size) for m in members), files=(file,))


def _name_of(path: Path, member: zipfile.ZipInfo) -> str:
    """Checks that a member's length is possible; returns the array's name."""
    name = member.filename.removesuffix(".npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadFile(path, f"is compressed by method {member.compress_type}: NumPy stores or deflates", name)
    most = member.compress_size * (_DEFLATED if member.compress_type == zipfile.ZIP_DEFLATED else 1)
    if member.file_size > most:
        raise BadFile(path, f"should have {member.file_size} bytes, and {member.compress_size} can't hold them", name)
    return name


def _npy(path: Path, name: str, opened: _Opened, size: int) -> Tensor:
    with as_bad_file(path, name):
        with opened() as file:
            shape, stored, header_size = _npy_header(path, name, file)
        if stored.hasobject:
            raise BadFile(path, "holds Python objects, which are not read", name)
        if stored.subdtype is not None or not stored.itemsize:
            raise BadFile(path, f"dtype {stored} is not read", name)
        dtype = np.dtype(ml_dtypes.bfloat16) if stored.str in ("|V2", "<V2") else stored.newbyteorder("=")
        if problem := _problem_with_shape(shape, dtype):
            raise BadFile(path, problem, name)
        nbytes = math.prod(shape) * dtype.itemsize
        there = size - header_size
        if there < nbytes:
            raise BadFile(path, f"truncated: {dtype.name} of shape {shape} needs {nbytes} bytes, the file has {there}", name)
        if there > nbytes:
            raise BadFile(
                path, f"has {there - nbytes} bytes after its array of shape {shape}; one array per file is read", name
            )

    def read() -> np.ndarray:
        with as_bad_file(path, name):
            with opened() as file:
                x = np.lib.format.read_array(file, allow_pickle=False)
                file.read(1)  # reads to the end of a zip member, where its checksum is verified
            if (x.dtype, x.size) != (stored, math.prod(shape)):
                raise BadFile(path, "was changed after it was opened", name)
            # np.ascontiguousarray turns a scalar into shape (1,).
            return x.view(dtype) if stored.kind == "V" else np.ascontiguousarray(x, dtype).reshape(shape)

    return Tensor(name, dtype, shape, read)


def _npy_header(path: Path, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, int]:
    """Returns shape and dtype of an .npy array, and the offset of its data."""
    headers = {(1, 0): (2, np.lib.format.read_array_header_1_0), (2, 0): (4, np.lib.format.read_array_header_2_0)}
    version = np.lib.format.read_magic(file)
    if version not in headers:
        raise BadFile(path, f"version {version} of the npy format is not one of {list(headers)}", name)
    width, read_array_header = headers[version]
    prefix = file.read(width)
    length = int.from_bytes(prefix, "little")
    if length > 65535:  # NumPy would read all of it before rejecting it
        raise BadFile(path, f"a header of {length} bytes is not read", name)
    header = prefix + file.read(length)
    shape, _, stored = read_array_header(io.BytesIO(header))
    return shape, stored, 8 + len(header)


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its key, NumPy dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


def write_safetensors(
    path: Path, entries: Sequence[Entry], arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Writes a .safetensors file, holding one array at a time.

    `arrays` yields (name, array) for each of `entries`, in any order. Raises ValueError if two entries have the same name, or
    if an array doesn't match its entry.
    """
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    where: dict[str, tuple[Entry, int]] = {}
    offset = 0
    # Readers view tensors in place; sorting larger types first keeps all tensors aligned.
    for entry in sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name)):
        if entry.name in where:
            raise ValueError(f"two tensors would be called {entry.name!r}")
        end = offset + stored_bytes(entry.shape, entry.dtype)
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
            if entry.dtype == F4:
                array = layout.pack(np.frombuffer(array.tobytes(), np.uint8) & 0xF, 4)
            file.write(array.tobytes())
    if where:
        raise ValueError(f"no data for the tensors {', '.join(where)}")
