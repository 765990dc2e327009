"""Opens a DCP checkpoint as a file of lazily read tensors, without a process group."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from blockfp.errors import BadCheckpoint, BadFile
from blockfp.files import manifest
from blockfp.files.modelfile import Model, Tensor
from blockfp.files.names import EXTRA, STEP, TIED

from .index import INDEX, read_index, read_tensor
from .plain_values import read_plain


def open_checkpoint(folder: Path, step: int | None = None) -> Model:
    """Opens a checkpoint and verifies its checksums; the metadata maps tied names (`names.TIED`).

    `folder` is a run (`step` picks the checkpoint, by default the last), a checkpoint, or any DCP folder. Only the last may
    lack checksums. Raises BadFile if there is none, a file is missing or altered, or chunks don't cover a tensor.
    """
    try:
        if step is not None or not (folder / INDEX).is_file():
            folder = manifest.find(folder, step)
        files = manifest.Files(folder)
        if files.listed is not None and (found := files.sum_up()):
            raise BadFile(folder, "; ".join(found))
        index = read_index(files)
        if files.listed is not None:
            manifest.check_step(folder, read_plain(files, index, (f"{EXTRA}.{STEP}",)).get(f"{EXTRA}.{STEP}"))
        tied = {name: str(first) for name, first in read_plain(files, index, (f"{EXTRA}.{TIED}.",)).items()}
    except BadCheckpoint as error:
        raise BadFile(folder, error) from error
    tensors = []
    for name, what in index.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            try:
                dtype = _numpy_dtype(what.properties.dtype)
            except TypeError as error:
                raise BadFile(folder / INDEX, f"{what.properties.dtype} is not a NumPy dtype: {error}", name) from error
            tensors.append(Tensor(name, dtype, tuple(what.size), partial(_read, files, index, name, what)))
    return Model(folder, tuple(tensors), tied)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def _read(files: manifest.Files, index: Metadata, name: str, what: TensorStorageMetadata) -> np.ndarray:
    at = files.folder / INDEX
    try:
        # `read_index` has checked that the chunks cover the tensor.
        whole = torch.empty(what.size, dtype=what.properties.dtype, device="cpu")
        for chunk in what.chunks:
            where = index.storage_data[MetadataIndex(name, chunk.offsets)]
            at = files.folder / where.relative_path
            with files.open(where.relative_path) as file:
                file.seek(where.offset)
                content = file.read(where.length)
            part = read_tensor(io.BytesIO(content), whole.dtype, chunk.sizes)
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = part
        return whole.reshape(-1).view(torch.uint8).numpy().view(_numpy_dtype(whole.dtype)).reshape(what.size)
    except BadCheckpoint as error:
        raise BadFile(at, error, name) from error
    except Exception as error:  # a damaged file can raise anything
        raise BadFile(at, repr(error), name) from error
