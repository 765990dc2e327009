"""Reads DCP's index (`.metadata`): each tensor's shape, dtype and chunks, and each chunk's file, offset and length.

The index is a pickle from an untrusted source. The unpickler runs no code of torch's: it builds attribute bags, which are
validated before they become torch's classes.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from blockfp.errors import BadCheckpoint
from blockfp.files import manifest, untrusted
from blockfp.files.manifest import Files

from ..distributed_internals import stored_at

INDEX = ".metadata"
"""File name of DCP's index."""

LONGEST = 2**30
"""Longest index that is read, in bytes. A chunk takes about 100."""

_MOST_AXES = 64


def read_index(files: Files) -> Metadata:
    """Reads DCP's index and checks it: the chunks of each tensor cover it exactly once and fit into their files.

    If there is a manifest, it must list every file that the index names. Raises BadCheckpoint otherwise.
    """
    checkpoint = files.folder
    path = checkpoint / INDEX
    try:
        with files.open(INDEX) as file:
            length = untrusted.length_of(file)
            if length > LONGEST:
                raise BadCheckpoint(f"{path} has {length} bytes: an index of up to {LONGEST} is read")
            content = file.read(length)
        _check_opcodes(content)
        raw = _IndexUnpickler(io.BytesIO(content)).load()
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path} is not an index of torch's DCP: {error}") from error
    except OSError as error:
        raise BadCheckpoint(f"{checkpoint} is not a DCP checkpoint: {path}: {error.strerror}") from error
    except Exception as error:
        raise BadCheckpoint(f"{path} is not an index of torch's DCP: {error!r}") from error
    index = _made_of(path, raw)
    lengths = _lengths(files, index)
    for name, what in index.state_dict_metadata.items():
        try:
            _check_pieces(index, name, what, lengths)
        except ValueError as error:
            raise BadCheckpoint(f"{path}: {name} {error}") from error
    held, there = sum(where.length for where in index.storage_data.values()), sum(lengths.values())
    if held > there:
        raise BadCheckpoint(f"{path} gives its tensors {held} bytes, and its files have {there}")
    return index


def pieces(index: Metadata) -> Iterator[tuple[MetadataIndex, torch.dtype, torch.Size]]:
    """Yields (key, dtype, shape) of each chunk of each tensor."""
    for name, what in index.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            for chunk in what.chunks:
                yield MetadataIndex(name, chunk.offsets), what.properties.dtype, chunk.sizes


def read_tensor(stream: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Reads a chunk that `torch.save` wrote; raises BadCheckpoint unless it is dense and has the index's dtype and shape."""
    tensor = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        raise BadCheckpoint(f"it is not a dense tensor but {type(tensor).__name__}")
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
        kinds = (f"{tensor.dtype} of shape {tuple(tensor.shape)}", f"{dtype} of shape {tuple(shape)}")
        raise BadCheckpoint(f"it is {kinds[0]}, and {kinds[1]} in the index")
    return tensor


def _lengths(files: Files, index: Metadata) -> dict[str, int]:
    """Returns the length in bytes of each file that the index names, from the manifest if there is one."""
    names = {where.relative_path for where in index.storage_data.values()}
    if files.listed is not None:
        if missing := {INDEX, *names} - files.listed.keys():
            raise BadCheckpoint(f"{files.folder / manifest.MANIFEST} doesn't list {', '.join(sorted(missing))}")
        return {name: files.listed[name].length for name in names}
    found = {}
    for name in sorted(names):
        path = files.folder / name
        try:
            if untrusted.leads_out(path):
                raise BadCheckpoint(f"{path} is a link out of the checkpoint's folder: put a copy of the file in its place")
            with files.open(name) as file:
                found[name] = untrusted.length_of(file)
        except OSError as error:
            raise BadCheckpoint(f"{path}: {error.strerror}") from error
    return found


def _check_pieces(index: Metadata, name: str, what: Any, lengths: dict[str, int]) -> None:
    """Raises ValueError if chunks overlap, leave a gap, or reach beyond the tensor or its file."""
    if isinstance(what, BytesStorageMetadata):
        _check_place(index, MetadataIndex(name), lengths, 0)
        return
    shape, itemsize = tuple(what.size), what.properties.dtype.itemsize
    elements = 0
    for chunk in what.chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"has shape {shape}, and a piece of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)}")
        if any(first + size > whole for first, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"of shape {shape} has a piece {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, beyond its end")
        count = math.prod(chunk.sizes)
        _check_place(index, MetadataIndex(name, chunk.offsets), lengths, count * itemsize)
        elements += count
    if elements != math.prod(shape):
        raise ValueError(f"of shape {shape} has {math.prod(shape)} elements, its pieces have {elements}")
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in what.chunks if math.prod(chunk.sizes)]
    if len(boxes) > 1 and _overlap(np.array(boxes, np.int64)):
        raise ValueError("has overlapping pieces")


def _check_place(index: Metadata, key: MetadataIndex, lengths: dict[str, int], nbytes: int) -> None:
    where = index.storage_data.get(key)
    part = "a value" if key.offset is None else f"a piece at {tuple(key.offset)}"
    if where is None:
        raise ValueError(f"has {part} that the index doesn't locate")
    if where.length < nbytes or where.offset + where.length > lengths[where.relative_path]:
        place = f"{where.length} bytes from {where.offset} of {where.relative_path}"
        raise ValueError(f"has {part} whose {nbytes} bytes don't fit into {place}")
    if where.transform_descriptors:
        raise ValueError(f"is stored through {where.transform_descriptors}, which is not supported")


def _overlap(boxes: np.ndarray) -> bool:
    """Returns whether any two of the boxes, an array [n, (offset, size), axes], share an element."""
    first, last = boxes[:, 0], boxes[:, 0] + boxes[:, 1]
    for axis in range(boxes.shape[2]):
        order = np.argsort(first[:, axis], kind="stable")
        if (first[order[1:], axis] >= last[order[:-1], axis]).all():
            return False  # separated along this axis
    # In slices of 256, to bound the memory of the pairwise comparison.
    for i in range(0, len(boxes), 256):
        apart: Any = ((first[i : i + 256, None] >= last[None]) | (last[i : i + 256, None] <= first[None])).any(-1)
        rows = np.arange(i, i + len(apart))
        apart[rows - i, rows] = True
        if not apart.all():
            return True
    return False


# Opcodes allowed in an index: with no argument or one of fixed length, and (_COUNTED) with a length prefix of so many bytes.
# None of them builds a large object from few bytes.
_FIXED = re.compile(rb"(?:[(0N)\]}l\x85-\x89tadeusRb\x81\x93\x94]|[\x80Khq].|M..|[Jj].{4}|[G\x95].{8})++", re.DOTALL)
_COUNTED = {0x8A: 1, ord("X"): 4, 0x8C: 1, 0x8D: 8}
_STOP, _GLOBAL, _LONG_BINPUT = b".cr"


def _check_opcodes(content: bytes) -> None:
    """Raises ValueError for any other opcode, or a memo index beyond the pickle's length.

    The unpickler allocates its memo up to the largest index, so four bytes could request gigabytes.
    """
    at, end = 0, len(content)
    while at < end:
        if fixed := _FIXED.match(content, at):
            at = fixed.end()
            continue
        code, at = content[at], at + 1
        if code == _STOP:
            return
        if width := _COUNTED.get(code):
            at += width + int.from_bytes(content[at : at + width], "little")
        elif code == _GLOBAL and (line := content.find(b"\n", at) + 1) and (line := content.find(b"\n", line) + 1):
            at = line
        elif code == _LONG_BINPUT and int.from_bytes(content[at : at + 4], "little") <= end:
            at += 4
        else:
            raise ValueError(f"it has the opcode {code:#x}, or what follows it, for which an index has no use")
    raise ValueError("it is truncated")


class _Raw:
    """An unpickled object: its constructor arguments and state, uninterpreted."""

    def __new__(cls, *args: Any) -> _Raw:
        raw = object.__new__(cls)
        raw.args, raw.state = args, None
        return raw

    def __init__(self, *args: Any):
        self.args: tuple[Any, ...] = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Builds only dtypes, sizes and `_Raw` objects.

    It makes its own class for each name: a pickle can set class attributes, which would change torch's.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        full = f"{module}.{name}"
        if full == "torch.Size":
            return torch.Size
        if full not in _IN_INDEX:
            raise BadCheckpoint(f"it names {full}, which an index has no use for")
        if full not in self._classes:
            self._classes[full] = type(name, (_Raw,), {})
        return self._classes[full]


_IN_INDEX = {
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    # Early releases of Python 3.11 pickle Enum members through getattr; it is not called here.
    "builtins.getattr",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}


def _made_of(path: Path, raw: Any) -> Metadata:
    """Builds DCP's `Metadata` from an unpickled index."""
    state = _state(raw, "Metadata")
    tensors, places = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        held = type(raw).__name__
        raise BadCheckpoint(f"{path} is not an index of torch's DCP: it holds a {held} without tensors or their places")
    index = Metadata({}, None, {}, StorageMeta(), version if isinstance(version := state.get("version"), str) else None)
    for name, what in tensors.items():
        if not isinstance(name, str):
            raise BadCheckpoint(f"{path} has a tensor named {name!r}, which is not a string")
        index.state_dict_metadata[name] = _failing(path, repr(name), _what, what)
    for key, where in places.items():
        place = _failing(path, "a place", _place, key, where)
        if place[0] in index.storage_data:
            raise BadCheckpoint(f"{path} locates {place[0].fqn} twice")
        index.storage_data[place[0]] = place[1]
    return index


def _failing(path: Path, what: str, make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except Exception as error:  # a damaged index may contain anything
        raise BadCheckpoint(f"{path} is malformed at {what}: {error!r}") from error


def _state(raw: Any, name: str) -> dict[str, Any]:
    """Returns the object's attributes if it is of class `name`, else {}."""
    return raw.state if type(raw).__name__ == name and isinstance(raw, _Raw) and isinstance(raw.state, dict) else {}


def _what(raw: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(raw, _Raw) and type(raw).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(raw, "TensorStorageMetadata")
    dtype, layout = state["properties"].state[:2]
    if not isinstance(dtype, torch.dtype) or layout.args != ("torch.strided",):
        raise ValueError(f"{dtype} and {layout.args} are not the dtype and layout of a dense tensor")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    made = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(dtype), _size(state["size"]), made)


def _place(raw_key: Any, raw: Any) -> tuple[MetadataIndex, Any]:
    key, state = _state(raw_key, "MetadataIndex"), _state(raw, "_StorageInfo")
    offset, name = key.get("offset"), state["relative_path"]
    if not isinstance(key["fqn"], str) or not untrusted.is_plain_name(name):
        raise ValueError(f"{key['fqn']!r} can't be in {name!r}, which is not a file in its folder")
    if not untrusted.is_size(state["offset"]) or not untrusted.is_size(state["length"]):
        raise ValueError(f"{key['fqn']!r} can't be at {state['offset']!r} with {state['length']!r} bytes")
    through = state.get("transform_descriptors")
    where = stored_at(name, state["offset"], state["length"], None if not through else [str(one) for one in through])
    return MetadataIndex(key["fqn"], None if offset is None else _size(offset)), where


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"{value!r} is not a shape")
    return _checked_size(value)


@lru_cache(maxsize=65536)
def _checked_size(value: tuple[Any, ...]) -> torch.Size:
    """Returns the validated size; cached, since an index repeats few sizes many times."""
    if len(value) > _MOST_AXES or not all(map(untrusted.is_size, value)):
        raise ValueError(f"{value!r} is not a shape")
    if math.prod(size or 1 for size in value) >= 2**60:
        raise ValueError(f"shape {tuple(value)} is larger than any memory")
    return torch.Size(value)
