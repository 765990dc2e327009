"""The files of a checkpoint: torch's DCP format, written whole or not at all, checked before it is read.

A rank writes its file and sums it up; DCP's own last exchange brings the sums to the coordinator, which writes DCP's index
(`.metadata`) and the manifest, and only then gives the folder its name (`blockfp.manifest`). There is no moment at which a
process that dies leaves something that looks like a checkpoint and isn't.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from blockfp import manifest
from blockfp.manifest import BadCheckpoint, FileSum

INDEX = ".metadata"
"""What DCP calls the file that says what lies where."""


class _Summed(NamedTuple):
    """What DCP keeps of a written tensor, on its way to the coordinator."""

    where: Any
    file: str
    sum: FileSum


class WholeOrNothing(FileSystemWriter):
    """Writes a checkpoint that has its name only when it is whole.

    Args:
        checkpoint: the folder it is to be; `manifest.begin` was called for it.
        keep: how many checkpoints stay in the folder around it; None for all.
    """

    def __init__(self, checkpoint: Path, keep: int | None):
        super().__init__(manifest.temporary_of(checkpoint), single_file_per_rank=True, sync_files=True)
        self._checkpoint = checkpoint
        self._keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file and sums it up."""
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            # torch hides a disk that is full behind an error of its own.
            raise _of_the_disk(error) from error
        names = {result.storage_data.relative_path for result in written}
        sums = {name: manifest.file_sum(Path(self.path) / name) for name in names}
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([_with_sum(result, sums) for result in written])
        return summed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index and the manifest, and publishes the checkpoint; the coordinator's part."""
        summed: list[_Summed] = [result.storage_data for rank in results for result in rank]
        plain = [[dataclasses.replace(r, storage_data=r.storage_data.where) for r in rank] for rank in results]
        super().finish(metadata, plain)
        files = {one.file: one.sum for one in summed}
        files[INDEX] = manifest.file_sum(Path(self.path) / INDEX)
        manifest.publish(self._checkpoint, files, self._keep)


def _with_sum(result: WriteResult, sums: dict[str, FileSum]) -> WriteResult:
    name = result.storage_data.relative_path
    return dataclasses.replace(result, storage_data=_Summed(result.storage_data, name, sums[name]))


def _of_the_disk(error: BaseException) -> BaseException:
    """The OSError that an error came from; itself where it came from none."""
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    return origin or error


def problems(checkpoint: Path, rank: int = 0, world: int = 1) -> list[str]:
    """What is wrong with this rank's share of a checkpoint's files.

    Raises:
        BadCheckpoint: there is no manifest.
    """
    files = list(manifest.read_manifest(checkpoint).items())[rank::world]
    found = (manifest.problem_with(checkpoint / name, expected) for name, expected in files)
    return [problem for problem in found if problem]


class PlainReader(FileSystemReader):
    """Reads a checkpoint; of Python objects only those of which DCP's index consists."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index: which tensors there are, of what shape and dtype, and where."""
        index = read_index(Path(self.path))
        assert index.storage_meta is not None
        index.storage_meta.load_id = self.load_id
        return index


def read_listed_index(checkpoint: Path) -> Metadata:
    """DCP's index of a checkpoint whose manifest, and so `problems`, has every file that it names.

    Raises:
        BadCheckpoint: it is no index, or the manifest lacks a file.
    """
    index, listed = read_index(checkpoint), manifest.read_manifest(checkpoint)
    used = {INDEX, *(where.relative_path for where in (index.storage_data or {}).values())}
    if used - listed.keys():
        raise BadCheckpoint(f"{checkpoint / manifest.MANIFEST} doesn't list {', '.join(sorted(used - listed.keys()))}")
    return index


def read_index(checkpoint: Path) -> Metadata:
    """DCP's index of a checkpoint.

    Raises:
        BadCheckpoint: there is none, or it holds what an index doesn't.
    """
    from torch.distributed.checkpoint.metadata import StorageMeta

    path = checkpoint / INDEX
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise BadCheckpoint(f"{checkpoint} is no checkpoint of torch's DCP: {path}: {error.strerror}") from error
    except Exception as error:
        raise BadCheckpoint(f"{path} is not an index of torch's DCP: {error!r}") from error
    if not isinstance(index, Metadata) or not isinstance(getattr(index, "state_dict_metadata", None), dict):
        raise BadCheckpoint(f"{path} is not an index of torch's DCP: it holds a {type(index).__name__} without tensors")
    if getattr(index, "storage_meta", None) is None:
        index.storage_meta = StorageMeta()
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Makes nothing but the plain values that DCP's index consists of, so that reading a foreign one runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _IN_INDEX:
            raise BadCheckpoint(f"it names {module}.{name}, which an index has no use for")
        return super().find_class(module, name)


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
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}


class PlainPlanner(DefaultLoadPlanner):
    """Plans as DCP does, and unpickles nothing but plain values (`weights_only`)."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value that is no tensor."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
