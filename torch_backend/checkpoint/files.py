"""Saves and loads named tensors as .safetensors, in the format NumPy and JAX read (`files.saving`)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockfp.array import QuantizedArray
from blockfp.definition import layout
from blockfp.errors import BadFile
from blockfp.files import saving
from blockfp.files.modelfile import F4
from blockfp.files.names import SUFFIXES

from ..check import to_numpy, to_torch
from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.module_state import InParts, state_names
from ..weights.state_dict import gathered, stored_names, stored_parts
from . import ranks
from .training_state import full_tensor


def save(
    path: str | PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes named tensors, quantized or not, to one or several .safetensors files; see `blockfp.save`.

    Args:
        path: name of the file, ending in .safetensors.
        tensors: whole tensors by name, such as `dict(model.named_parameters())`; use `save_checkpoint` for a sharded model.
            Weights of layers with weights="high_precision" are saved in high precision.
        file_bytes, metadata: as for `blockfp.save`.

    Raises:
        TypeError, ValueError: as `blockfp.save`; TypeError also for another library's array.
        blockfp.errors.BadFile: a tensor is a shard, sparse, on the meta device, or of a dtype that can't be stored.
    """
    if isinstance(tensors, Mapping):
        tensors = {name: _whole(Path(path), name, tensor) for name, tensor in tensors.items()}
    saving.write(Path(path), tensors, _to_numpy, file_bytes, metadata or {})


def load(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Reads a file that `save` of any framework wrote.

    Args:
        path: as for `blockfp.load`.
        device: device of the returned tensors.

    Returns:
        Tensors and quantized tensors by name.

    Raises:
        blockfp.errors.BadFile: see `blockfp.load`.
    """
    return {name: _to_torch(Path(path), name, array).to(device) for name, array in saving.read(Path(path))}


def _whole(path: Path, name: str, tensor: Any) -> Any:
    """Returns the tensor to save; raises BadFile if it is a shard, sparse or on the meta device."""
    if isinstance(tensor, np.ndarray | QuantizedArray) or type(tensor).__module__.startswith("jax"):
        raise TypeError(
            f"tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}: blockfp.save and blockfp.jax.save take the "
            "arrays of their libraries"
        )
    if sharding.mesh_of(tensor) is not None or (
        isinstance(tensor, CastWeight) and (tensor.cut or tensor.shape != tensor.whole)
    ):
        raise BadFile(path, "it is a shard, not a whole tensor: save_checkpoint saves sharded models", name)
    if isinstance(tensor, Tensor) and tensor.is_meta:
        raise BadFile(path, "it is on the meta device, where it has no values", name)
    if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
        raise BadFile(path, f"it must be dense, got layout {tensor.layout}: pass .to_dense()", name)
    if isinstance(tensor, Tensor) and tensor.dtype is torch.float4_e2m1fn_x2:
        # Two elements make one of torch's; NumPy and files count each.
        codes = tensor.detach().view(torch.uint8).cpu().numpy()
        codes = codes.reshape(codes.shape or (1,))
        return layout.unpack(codes, 4, 2 * codes.shape[-1]).view(F4)
    return tensor.values if isinstance(tensor, CastWeight) else tensor


def _to_numpy(part: Tensor | np.ndarray):
    if isinstance(part, np.ndarray):
        return part
    part = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # NumPy has no 8-bit floats; ml_dtypes names them as torch does.
    if part.dtype.is_floating_point and part.element_size() == 1:
        import ml_dtypes

        return part.view(torch.uint8).numpy().view(getattr(ml_dtypes, str(part.dtype).removeprefix("torch.")))
    return to_numpy(part)


def _to_torch(path: Path, name: str, array: Any) -> Tensor:
    if not isinstance(array, QuantizedArray):
        if array.dtype == F4:
            if not array.ndim or array.shape[-1] % 2:
                raise BadFile(path, f"is {array.dtype} {array.shape}; torch's float4_e2m1fn_x2 needs an even last axis", name)
            return torch.from_numpy(layout.pack(array.view("uint8"), 4)).view(torch.float4_e2m1fn_x2)
        if array.dtype.name.startswith("float8"):
            return torch.from_numpy(array.view("uint8")).view(getattr(torch, array.dtype.name))
        return to_torch(array)
    parts = (None if part is None else to_torch(part) for part in (array.codes, array.scales, array.tensor_scale))
    dtype = getattr(torch, array.dtype.name)
    return QuantizedTensor.from_parts(*parts, format=array.format, columns=array.columns, dtype=dtype)  # pyright: ignore[reportArgumentType]


# ---- a state dict of values


@torch.no_grad()
def high_precision_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, cpu_offload: bool = False
) -> dict[str, Tensor]:
    """Returns a model's state dict with dequantized weights, under the names from before `convert`.

    `convert`'s buffers are left out. Sharded weights are gathered as codes and scales, then dequantized; every rank must call
    it. Values come from the codes. The optimizer's fp32 masters are not used; `save_checkpoint` saves them.

    Args:
        model: any module, sharded or not.
        dtype: float32, float16 or bfloat16 for the weights of quantized layers; None keeps each weight's own dtype.
        cpu_offload: move each gathered tensor to the CPU, on rank 0 only; other ranks get an empty dictionary, as from torch's
            `get_model_state_dict`.

    Raises:
        TypeError: model is not a module, or dtype is not supported.

    Example:
        >>> llama.save_pretrained("folder", state_dict=bfp.high_precision_state_dict(llama, dtype=torch.bfloat16))
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    model = model_names.plain_module(model)
    params = model_names.parameters(model)
    left_out = {name for name, param in params.items() for name in stored_names(name, param)} - params.keys()
    for path, module in model_names.modules(model).items():
        if isinstance(module, InParts):
            left_out |= {f"{path}.{name}".removeprefix(".") for name in state_names(module)}
    keeps = not cpu_offload or ranks.rank_and_world(None)[0] == 0
    found: dict[str, Tensor] = {}
    whole: dict[int, Tensor] = {}
    for name, shown in get_model_state_dict(model).items():
        if name in left_out:
            continue
        # Tied weights stay one tensor; loaders of tied models expect that.
        key = id(params.get(name, shown))
        if key not in whole:
            value = _values(params.get(name), shown, dtype)
            whole[key] = value.cpu() if cpu_offload and isinstance(value, Tensor) and keeps else value
        if keeps:
            found[name] = whole[key]
        else:
            whole[key] = torch.empty(0)
    return found


def _values(param: Tensor | None, shown: Any, dtype: torch.dtype | None) -> Any:
    """Returns a state dict's entry as a whole tensor; collective if the entry is sharded."""
    local = None if param is None else sharding.local_of(param)
    if param is not None and isinstance(local, QuantizedTensor):
        parts = {
            part.name: gathered(param, local, part) if _is_cut(param) else getattr(local, part.name)
            for part in stored_parts(param)
        }
        codes, scales, tensor_scale = (parts.get(name) for name in SUFFIXES)
        assert codes is not None
        assert scales is not None
        origin = (0, 0) if _is_cut(param) else local.origin
        q = QuantizedTensor.from_parts(
            codes.detach(), scales.detach(), tensor_scale, format=local.format, columns=param.shape[-1], dtype=local.dtype,
            origin=origin,
        )  # fmt: skip
        return q.dequantize(dtype)
    shown = full_tensor(shown) if isinstance(shown, Tensor) else shown
    return shown.to(dtype) if isinstance(local, CastWeight) and dtype is not None else shown


def _is_cut(param: Tensor) -> bool:
    return sharding.mesh_of(param) is not None
