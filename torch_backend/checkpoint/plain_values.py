"""A checkpoint's values beside tensors: settings, counters, names. Plain ones only, so that `weights_only` reads them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from blockfp.errors import BadCheckpoint
from blockfp.files.manifest import Files

from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight


def plain(name: str, value: Any) -> Any:
    """Returns a value as it is saved: NumPy's numbers become Python's, in dictionaries, lists and tuples too; tensors stay.

    Of weights that are cast when they are gathered, which modules other than blockfp's show as they are, the values.

    Args:
        name: of the value, for errors.

    Raises:
        TypeError: it holds what couldn't be loaded again.
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
    """Returns the `extra` of `save_checkpoint` as it is saved.

    Raises:
        TypeError: it is no dictionary by name, or holds something that is neither a tensor, nor numbers, strings, None and
            tuples of them.
    """
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
    """Describes each value of an `extra`, which is saved once for all ranks: they must have it alike."""
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
    """Maps the further names of each parameter to its first one, which optimizers know."""
    first: dict[int, str] = {}
    tied = {}
    for name, param in model_names.parameters(model).items():
        if id(param) in first:
            tied[name] = first[id(param)]
        else:
            first[id(param)] = name
    return tied


def read_plain(files: Files, index: Metadata, parts: tuple[str, ...]) -> dict[str, Any]:
    """Reads all values of a checkpoint that are no tensors, by DCP's names.

    Args:
        files: the checkpoint's.
        index: its index.
        parts: what names must begin with.

    Raises:
        BadCheckpoint: one can't be read, or is none of the plain values that `weights_only` allows.
    """
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
