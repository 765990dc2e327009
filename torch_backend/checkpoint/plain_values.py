"""Saves and reads a checkpoint's non-tensor values: settings, counters and names of types that `weights_only` loads."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from blockfp.errors import BadCheckpoint, BadFile
from blockfp.files import manifest
from blockfp.files.manifest import Files
from blockfp.files.modelfile import Model
from blockfp.files.modelfile import Tensor as Entry
from blockfp.files.names import CAST, EXTRA, INPUT, STEP, TIED

from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .index import INDEX, read_index, read_tensor


def plain(name: str, value: Any) -> Any:
    """Converts a value for saving: NumPy scalars become Python's, also inside containers; a `CastWeight` becomes its values.

    Raises TypeError, with `name`, for anything that couldn't be loaded again.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return value
    if isinstance(value, Tensor):
        if isinstance(local := sharding.local_of(value), CastWeight):
            return placed(value, local.values.detach())
        if isinstance(local, QuantizedTensor) or value.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {type(value).__name__} of {value.layout}: dequantize it first")
        return value
    if isinstance(value, dict):
        return {key: plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(f"{name}[{i}]", inner) for i, inner in enumerate(value))
    raise TypeError(f"{name} must be a tensor, or numbers and strings, got {type(value).__name__}")


def plain_extra(extra: Any) -> dict[str, Any]:
    """Converts `save_checkpoint`'s `extra`; raises TypeError unless it maps names to tensors, scalars, strings or tuples."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dictionary, got {type(extra).__name__}")
    found = {}
    for name, value in (extra or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"extra must have strings for names, got {name!r}")
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, dict | list | tuple) or (isinstance(part, Tensor) and part is not value):
                raise TypeError(f"extra[{name!r}] must be a tensor, or numbers and strings, got {type(part).__name__}")
        found[name] = plain(f"extra[{name!r}]", value)
    return found


def described_extra(extra: Mapping[str, Any]) -> dict[str, str]:
    """Describes each value of `extra`, for the check that it is equal on all ranks."""
    return {f"extra[{name!r}]": _described(value) for name, value in extra.items()}


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        content, what = repr(value).encode(), repr(value)
        if len(content) <= 200:
            return what
        what = f"{what[:100]} .."
    else:
        what = f"{value.dtype} of shape {tuple(value.shape)}"
        if sharding.mesh_of(value) is not None:
            return f"{what} on {value.device_mesh}"  # pyright: ignore[reportAttributeAccessIssue]
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{what} with SHA-256 {hashlib.sha256(content).hexdigest()[:16]} .."


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps a tied parameter's other names to its first, the one that optimizers use."""
    first: dict[int, str] = {}
    tied = {}
    for name, param in model_names.parameters(model).items():
        if id(param) in first:
            tied[name] = first[id(param)]
        else:
            first[id(param)] = name
    return tied


def cast_names(model: nn.Module) -> dict[str, str]:
    """Maps a weight in high precision (`CastWeight`) to the name of its format, under its first name if it is tied."""
    found: dict[int, tuple[str, str]] = {}
    for name, param in model_names.parameters(model).items():
        if isinstance(local := sharding.local_of(param), CastWeight):
            found.setdefault(id(param), (name, str(local.format)))
    return dict(found.values())


def read_plain(files: Files, index: Metadata, parts: tuple[str, ...]) -> dict[str, Any]:
    """Reads the non-tensor values whose DCP name starts with one of `parts`; raises BadCheckpoint if one isn't plain."""
    found = {}
    for name, what in index.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata) or not name.startswith(parts):
            continue
        try:
            where = index.storage_data[MetadataIndex(name)]
            with files.open(where.relative_path) as file:
                file.seek(where.offset)
                content = file.read(where.length)
            found[name] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise BadCheckpoint(f"{files.folder}: {name} can't be read: {error}") from error
    return found


# ---- DCP


def open_checkpoint(folder: Path, step: int | None = None) -> Model:
    """Opens a checkpoint and verifies its checksums; the metadata has tied names and formats (`names.TIED`, `CAST`, `INPUT`).

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
        noted = read_plain(files, index, (f"{EXTRA}.{TIED}.", f"{EXTRA}.{CAST}.", f"{EXTRA}.{INPUT}."))
    except BadCheckpoint as error:
        raise BadFile(folder, error) from error
    tensors = []
    for name, what in index.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            try:
                dtype = _numpy_dtype(what.properties.dtype)
            except TypeError as error:
                raise BadFile(folder / INDEX, f"{what.properties.dtype} is not a NumPy dtype: {error}", name) from error
            tensors.append(Entry(name, dtype, tuple(what.size), partial(_read, files, index, name, what)))
    return Model(folder, tuple(tensors), {name: str(value) for name, value in noted.items()})


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
