"""Named tensors in .safetensors files, the same that NumPy and JAX read (`files.saving`)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from blockfp.array import QuantizedArray
from blockfp.errors import BadFile
from blockfp.files import saving

from ..check import to_numpy, to_torch
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight


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
            Weights of layers with weights="high_precision" are saved in high precision.
        file_bytes, metadata: as for `blockfp.save`.

    Raises:
        TypeError, ValueError: as `blockfp.save`, and of an array of another library; BadFile names a tensor that is a shard,
            sparse or on the meta device, or of a dtype that can't be stored.
    """
    if isinstance(tensors, Mapping):
        tensors = {name: _whole(Path(path), name, tensor) for name, tensor in tensors.items()}
    saving.write(Path(path), tensors, _to_numpy, file_bytes, metadata or {})


def load(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Reads what `save` of any framework wrote.

    Args:
        path: as for `blockfp.load`.
        device: where to put the tensors.

    Returns:
        Tensors and quantized tensors by name.

    Raises:
        blockfp.errors.BadFile: see `blockfp.load`.
    """
    return {name: _to_torch(array).to(device) for name, array in saving.read(Path(path))}


def _whole(path: Path, name: str, tensor: Any) -> Any:
    """Returns the tensor to save; raises BadFile where it isn't whole, or its values can't be read."""
    if isinstance(tensor, np.ndarray | QuantizedArray) or type(tensor).__module__.startswith("jax"):
        raise TypeError(
            f"tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}: blockfp.save and blockfp.jax.save take the "
            "arrays of their libraries"
        )
    if isinstance(tensor, DTensor) or (isinstance(tensor, CastWeight) and (tensor.cut or tensor.shape != tensor.whole)):
        raise BadFile(path, "it is a shard, not a whole tensor: save_checkpoint saves sharded models", name)
    if isinstance(tensor, Tensor) and tensor.is_meta:
        raise BadFile(path, "it is on the meta device, where it has no values", name)
    if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
        raise BadFile(path, f"it must be dense, got layout {tensor.layout}: pass .to_dense()", name)
    return tensor.values if isinstance(tensor, CastWeight) else tensor


def _to_numpy(part: Tensor):
    part = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
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
