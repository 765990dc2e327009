"""`high_precision_state_dict`: a model's state dict as if it weren't quantized, for libraries that read plain weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockfp.files.names import SUFFIXES

from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.module_state import InParts, state_names
from ..weights.state_dict import gathered, stored_names, stored_parts
from . import ranks
from .uneven import full_tensor


@torch.no_grad()
def high_precision_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, cpu_offload: bool = False
) -> dict[str, Tensor]:
    """Returns a model's state dict with values under the names of the model before `convert`, and nothing else.

    `convert`'s buffers are left out. Sharded weights are gathered as codes and scales, and dequantized: every rank calls it.
    The values are those of the codes: a master in fp32 is the optimizer's, which `save_checkpoint` saves.

    Args:
        model: any module, sharded or not.
        dtype: float32, float16 or bfloat16, of weights of quantized layers; None for each one's own.
        cpu_offload: move each tensor to the CPU as soon as it is whole, on rank 0 alone; the others get an empty dictionary, as
            from torch's `get_model_state_dict`.

    Raises:
        TypeError: model is no module, or dtype is none of these.

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
        # Tied weights are one tensor, as readers of tied models expect.
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
    """Returns a state dict's entry as a whole; collective where it is sharded."""
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
