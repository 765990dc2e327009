"""Reads and writes a checkpoint's files in DCP's format, with a SHA-256 of each.

torch's planners, writer and reader do the work. torch's own `save` and `load` aren't used: they need a registered process
group, which ends with the training, and they wrap every exception, even Ctrl-C.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from blockfp.errors import BadCheckpoint
from blockfp.files.atomic import naming
from blockfp.files.manifest import Files, FileSum

from .index import pieces, read_tensor
from .ranks import Exchange


class _Summed:
    """A file that hashes what is written to it."""

    def __init__(self, file: Any):
        self._file = file
        self._digest = hashlib.sha256()
        self._length = 0

    def write(self, content: Any) -> int:
        # If Ctrl-C interrupts torch's writer, its destructor finishes the archive later; an error there would abort the
        # process.
        if self._file.closed:
            return len(content)
        self._digest.update(content)
        written = self._file.write(content)
        self._length += written
        return written

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def sum(self) -> FileSum:
        return FileSum(self._length, self._digest.hexdigest())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _SummedFiles(FileSystem):
    """torch's file system, recording the length and hash of each file it writes."""

    def __init__(self, sums: dict[str, FileSum]):
        self._sums = sums

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with naming(Path(path), "writing"), _as_it_was(), super().create_stream(path, mode) as file:
            summed = _Summed(file)
            yield summed
        self._sums[Path(path).name] = summed.sum()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self._sums[Path(new_path).name] = self._sums.pop(Path(path).name)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Raises the original error (a full disk, Ctrl-C) instead of the second one that torch's writer raises while closing."""
    outside = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        origin: BaseException | None = error
        while isinstance(origin, Exception) and not isinstance(origin, OSError):
            origin = origin.__cause__ or origin.__context__
            origin = None if origin is outside else origin
        if origin is None or origin is error:
            raise
        raise origin from None


class SummedWriter(FileSystemWriter):
    """Writes one file per rank into a folder and syncs it to disk; `sums` has the length and hash of each file by name."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.sums: dict[str, FileSum] = {}
        self.fs = _SummedFiles(self.sums)


def write(
    state: dict[str, Any],
    writer: SummedWriter,
    exchange: Exchange,
    publish: Callable[[dict[str, FileSum]], None],
    error: Callable[[str], Exception],
) -> None:
    """Writes nested dictionaries: one file per rank; the first rank then writes the index and calls `publish` with all sums.

    `publish` comes last, so a process that dies earlier leaves nothing that looks like a checkpoint. If a rank fails, all raise
    `error` of the failures' text.
    """
    planner, metadata = DefaultSavePlanner(), []

    def plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), exchange.rank == 0)
        writer.set_up_storage_writer(exchange.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[SavePlan]) -> list[SavePlan]:
        plans, whole = planner.create_global_plan(plans)
        metadata.append(whole)
        return writer.prepare_global_plan(plans)

    def write_own() -> tuple[list[WriteResult], dict[str, FileSum]]:
        return writer.write_data(planner.finish_plan(own), planner).wait(), writer.sums

    def finish(written: list[tuple[list[WriteResult], dict[str, FileSum]]]) -> list[None]:
        writer.finish(metadata[0], [results for results, _ in written])
        sums = dict(writer.sums)
        for _, of_rank in written:
            sums |= of_rank
        publish(sums)
        return [None] * exchange.world

    own = exchange.together(error, plan, divide)
    exchange.together(error, write_own, finish)


def read(state: dict[str, Any], files: Files, index: Metadata) -> None:
    """Reads a checkpoint's tensors into `state`'s and sets the other values; entries missing in the checkpoint stay.

    Raises BadCheckpoint if a file can't be read or has changed since it was hashed, or a chunk contradicts the index.
    """
    reader, planner = CheckedReader(files, index), CheckedPlanner(allow_partial_load=True)
    planner.set_up_planner(state, index)
    reader.set_up_storage_reader(index, is_coordinator=False)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner)


class CheckedReader(FileSystemReader):
    """DCP's reader, restricted to regular files in the checkpoint's folder and to chunks that match the index."""

    def __init__(self, files: Files, index: Metadata):
        super().__init__(files.folder)
        self._files = files
        self._pieces = {key: (dtype, shape) for key, dtype, shape in pieces(index)}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items file by file; raises BadCheckpoint as `read` does."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self._files.open(name) as file:
                for item in items:
                    try:
                        self._read(name, file, item, planner)
                    except Exception as error:
                        raise BadCheckpoint(f"{self._files.folder / name}, {item.storage_index.fqn}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> None:
        stream = self._slice_file(file, self.storage_data[item.storage_index])
        if item.type == LoadItemType.BYTE_IO:
            content = io.BytesIO(stream.read())
            self._files.check(name, file)
            planner.load_bytes(item, content)
            return
        tensor = read_tensor(stream, *self._pieces[item.storage_index])
        self._files.check(name, file)
        for axis, (first, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, first, size)
        target = planner.resolve_tensor(item).detach()
        if target.shape != tensor.shape:  # copy_ would broadcast
            raise BadCheckpoint(f"{tuple(tensor.shape)} can't be read into {tuple(target.shape)}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)


class CheckedPlanner(DefaultLoadPlanner):
    """DCP's planner, unpickling with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a value that is not a tensor, after checking that `weights_only` accepts it."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
