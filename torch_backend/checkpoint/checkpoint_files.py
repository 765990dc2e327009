"""The files of a checkpoint: torch's DCP format, written whole or not at all, checked before it is read.

A rank writes its file and sums it up; DCP's own last exchange brings the sums to the coordinator, which writes DCP's index
(`.metadata`) and the manifest, and only then gives the folder its name (`files.manifest`). There is no moment at which a
process that dies leaves something that looks like a checkpoint and isn't.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from blockfp.errors import BadCheckpoint
from blockfp.files import manifest, untrusted
from blockfp.files.manifest import FileSum

from .index import INDEX, pieces, read_index, read_tensor


class _Summed(NamedTuple):
    """DCP's record of a written tensor with the sum of its file, on its way to the coordinator."""

    where: Any
    file: str
    sum: FileSum


class AtomicWriter(FileSystemWriter):
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
    """Returns the OSError that an error came from, or the error itself."""
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    return origin or error


def problems(checkpoint: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Returns what is wrong with this rank's share of a checkpoint's files.

    Raises:
        BadCheckpoint: there is no manifest.
    """
    files = list(manifest.read_manifest(checkpoint).items())[rank::world]
    found = (manifest.problem_with(checkpoint / name, expected) for name, expected in files)
    return [problem for problem in found if problem]


class CheckedReader(FileSystemReader):
    """Reads a checkpoint: from regular files in its folder alone, and nothing but what its index says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index: which tensors there are, their shapes and dtypes, and where they lie."""
        index = read_index(Path(self.path))
        assert index.storage_meta is not None
        index.storage_meta.load_id = self.load_id
        self._pieces = {key: (dtype, shape) for key, dtype, shape in pieces(index)}
        return index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what a plan wants, file by file.

        Raises:
            BadCheckpoint: a file can't be read, or a piece is not what the index says of it.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = Path(self.path) / name
            with untrusted.open_regular(path) as file:
                for item in items:
                    try:
                        self._read(file, item, planner)
                    except Exception as error:
                        raise BadCheckpoint(f"{path}, {item.storage_index.fqn}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> None:
        stream = self._slice_file(file, self.storage_data[item.storage_index])
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(stream.read()))
            return
        tensor = read_tensor(stream, *self._pieces[item.storage_index])
        for axis, (first, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, first, size)
        target = planner.resolve_tensor(item).detach()
        if target.shape != tensor.shape:  # copy_ would broadcast
            raise BadCheckpoint(f"{tuple(tensor.shape)} can't be read into {tuple(target.shape)}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)


class CheckedPlanner(DefaultLoadPlanner):
    """Plans as DCP does, and unpickles nothing but plain values (`weights_only`)."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value that is no tensor."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
