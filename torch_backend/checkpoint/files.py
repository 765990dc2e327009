"""Named tensors in .safetensors files, the same that NumPy and JAX read (`blockfp.saving`)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockfp import saving
from blockfp.array import QuantizedArray

from ..check import to_numpy, to_torch
from ..quantized_tensor.tensor import QuantizedTensor


def save(
    path: str | PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes named tensors, quantized or not, to a .safetensors file, or to several; see `blockfp.save`.

    Args:
        path: name of the file, ending in .safetensors.
        tensors: whole tensors by name, such as `dict(model.named_parameters())`; of a sharded model use `save_checkpoint`.
        file_bytes, metadata: as for `blockfp.save`.

    Raises:
        blockfp.modelfile.BadFile: a tensor is a shard, or of a dtype that can't be stored.
    """
    saving.write(Path(path), tensors, _to_numpy, file_bytes, metadata or {})


def load(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Reads what `save` of any framework wrote.

    Args:
        path: as for `blockfp.load`.
        device: where to put the tensors.

    Returns:
        Tensors and quantized tensors by name.

    Raises:
        blockfp.modelfile.BadFile: see `blockfp.load`.
    """
    return {name: _to_torch(array).to(device) for name, array in saving.read(Path(path))}


def _to_numpy(part: Tensor):
    part = part.detach().cpu().contiguous()
    # NumPy has no small floats of its own: ml_dtypes' have the same names as torch's.
    if part.dtype.is_floating_point and part.element_size() == 1:
        import ml_dtypes

        return part.view(torch.uint8).numpy().view(getattr(ml_dtypes, str(part.dtype).removeprefix("torch.")))
    return to_numpy(part)


def _to_torch(array: Any) -> Tensor:
    if not isinstance(array, QuantizedArray):
        if array.dtype.name.startswith("float8"):
            return torch.from_numpy(array.view("uint8")).view(getattr(torch, array.dtype.name))
        return to_torch(array)
    parts = (None if part is None else to_torch(part) for part in (array.codes, array.scales, array.tensor_scale))
    dtype = getattr(torch, array.dtype.name)
    return QuantizedTensor.from_parts(*parts, format=array.format, columns=array.columns, dtype=dtype)  # pyright: ignore[reportArgumentType]
