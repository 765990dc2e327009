"""A checkpoint of torch's DCP as a file of tensors, one of them in memory at a time, without a process group."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from blockfp import manifest
from blockfp.export import TIED
from blockfp.manifest import BadCheckpoint
from blockfp.modelfile import BadFile, Model, Tensor

from .checkpoint_files import INDEX, problems, read_index, read_listed_index
from .plain_values import read_plain


def open_checkpoint(folder: Path, step: int | None = None) -> Model:
    """A checkpoint's tensors; of what is no tensor only the names of tied weights (`export.TIED`), as the metadata.

    Args:
        folder: a run's folder, a checkpoint that `save_checkpoint` wrote (its checksums are looked at), or any folder of DCP's.
        step: which checkpoint of a run; by default the last.

    Raises:
        BadFile: there is no checkpoint, or a file is missing, truncated or altered.
    """
    try:
        if step is not None or not (folder / ".metadata").is_file():
            folder = manifest.find(folder, step)
        ours = (folder / manifest.MANIFEST).is_file()
        if ours and (found := problems(folder)):
            raise BadFile(folder, "; ".join(found))
        index = read_listed_index(folder) if ours else read_index(folder)
        tied = {name: str(first) for name, first in read_plain(folder, index, (TIED,)).items()}
    except BadCheckpoint as error:
        raise BadFile(folder, error) from error
    tensors = []
    for name, what in index.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            try:
                dtype, shape = _numpy_dtype(what.properties.dtype), tuple(what.size)
            except Exception as error:  # a damaged index holds anything
                raise BadFile(folder / INDEX, repr(error), str(name)) from error
            tensors.append(Tensor(str(name), dtype, shape, partial(_read, folder, index, name, what)))
    return Model(folder, tuple(tensors), tied)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def _read(folder: Path, index: Metadata, name: str, what: TensorStorageMetadata) -> np.ndarray:
    at = folder / INDEX
    try:
        whole = torch.empty(what.size, dtype=what.properties.dtype)
        for chunk in what.chunks:
            where = index.storage_data[MetadataIndex(name, chunk.offsets)]
            if where.transform_descriptors:
                raise BadFile(folder, f"is stored through {where.transform_descriptors}, which is not read here", name)
            at = folder / where.relative_path
            with at.open("rb") as file:
                file.seek(where.offset)
                part = torch.load(io.BytesIO(file.read(where.length)), map_location="cpu", weights_only=True)
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = part
        return whole.reshape(-1).view(torch.uint8).numpy().view(_numpy_dtype(whole.dtype)).reshape(what.size)
    except BadFile:
        raise
    except Exception as error:  # a damaged index leads to any
        raise BadFile(at, repr(error), name) from error
