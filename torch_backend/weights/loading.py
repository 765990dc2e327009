"""`load_high_precision_`: loads high-precision values into weights, with the same scales on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.sharding.placement import StridedShard

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from .cast_weight import CastWeight
from .requantize import note_written, requantize_


def load_high_precision_(param: Tensor, tensor: Tensor, *, keep_init: bool = True) -> None:
    """Quantizes high-precision values into a quantized parameter, in place, as if it were unsharded.

    Every rank that holds a shard of the parameter must call it. A `CastWeight` takes the values unchanged. `AdamW` recreates
    its master from these values in the next step.

    Args:
        param: a `QuantizedTensor`, a `CastWeight`, or a DTensor of one; the whole parameter, with all of its experts.
        tensor: float32, float16 or bfloat16: the whole weight, equal on every rank (or a replicated DTensor), or a DTensor
            placed like `param`. It may be on another device.
        keep_init: keep this rank's original values, on the CPU, as `initial`; a frozen parameter keeps none.

    Raises:
        TypeError: param or tensor has the wrong type or dtype.
        ValueError: the shape or placements don't fit, param is on the meta device, or it is FSDP's gathered copy or a view of a
            part of a parameter.

    Example:
        >>> for name, weight in checkpoint.items():
        ...     bfp.load_high_precision_(model.get_parameter(name), weight)
    """
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor | CastWeight):
        raise TypeError(
            f"param must be a QuantizedTensor, a CastWeight or a DTensor of one, got {type(local).__name__} of {local.dtype}"
        )
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or isinstance(sharding.local_of(tensor), QuantizedTensor):
        raise TypeError(f"tensor must hold values in one of {', '.join(map(str, DTYPES))}, got {_kind(tensor)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense, got layout {tensor.layout}: pass tensor.to_dense()")
    if local.is_meta:
        raise ValueError("param is on the meta device and has no memory: call to_empty(device=...) of its module first")
    if isinstance(local, QuantizedTensor) and _is_view(param, local):
        raise ValueError(
            f"param, of shape {tuple(param.shape)}, is a view of a larger tensor, whose optimizer would restore the old "
            "values in its next step: load the whole parameter, all experts in one [experts, out, in]"
        )
    if tensor.shape != param.shape:
        raise ValueError(f"tensor must have the whole parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}")
    values = _part_of(tensor, param).detach()
    if isinstance(values, CastWeight):
        values = values.values
    if isinstance(local, CastWeight):
        local.values.copy_(values)
        note_written([local])
        return
    local.geometry.copied = None
    requantize_([param], [values.to(local.device)])
    if keep_init and (param.requires_grad or not isinstance(param, nn.Parameter)):
        local.initial = values.to("cpu", copy=True)
    local.geometry.loaded = "values"


def _is_view(param: Tensor, local: QuantizedTensor) -> bool:
    """Returns whether param is a view of a part of another tensor; FSDP2's shards, which are DTensors, don't count."""
    if isinstance(param, nn.Parameter) or sharding.mesh_of(param) is not None:
        return False
    return local._is_view() or local.codes.untyped_storage().nbytes() > local.codes.numel()


def _kind(tensor: Any) -> str:
    return str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__


def _part_of(tensor: Tensor, param: Tensor) -> Tensor:
    """Returns this rank's shard of a high-precision tensor."""
    if all(placement.is_replicate() for placement in getattr(tensor, "placements", ())):
        return sharding.own_part(sharding.local_of(tensor), param)
    lies, region = sharding.sharding_of(param), sharding.region_of(param)
    if not sharding.placed_alike(tensor, param):
        raise ValueError(
            f"tensor must be placed like the parameter, {lies}, got {sharding.sharding_of(tensor)}: redistribute it, or pass "
            "full_tensor()"
        )
    # torch gives ranks other rows of an unevenly divided strided DTensor than FSDP2 does.
    strided = any(isinstance(placement, StridedShard) for placement in lies.placements)
    local = sharding.local_of(tensor)
    if tuple(local.shape) != region.shape or (strided and len({r.shape for r in lies.regions}) > 1):
        raise ValueError(f"tensor, {lies}, may hold other rows than the parameter on this rank: pass full_tensor()")
    return local


# ---- initializers


@torch.no_grad()
def init_(param: Tensor, function: Callable[..., Any], *, keep_init: bool = True) -> Tensor:
    """Initializes a parameter with a function that fills a tensor, such as those of `torch.nn.init`.

    For a quantized weight the function fills a plain tensor of the whole weight's shape and dtype, which is then quantized. If
    the weight is sharded every rank must call `init_`: each draws the whole weight and keeps its rows, so equally seeded ranks
    get the weight of a single rank. Any other parameter is passed to the function itself.

    Args:
        param: a parameter, quantized or not, sharded or not; one on the meta device is left alone.
        function: called with one tensor, which it fills; its result is ignored.
        keep_init: keep the original values, on the CPU, until an optimizer takes them as its masters.

    Returns:
        The parameter.

    Raises:
        TypeError: param is not a tensor, or function is not callable.

    Example:
        >>> init_(layer.weight, partial(torch.nn.init.trunc_normal_, std=0.02))
    """
    if not isinstance(param, Tensor):
        raise TypeError(f"param must be a torch.Tensor, got {type(param).__name__}")
    if not callable(function):
        raise TypeError(f"function must be one that takes a tensor, such as torch.nn.init.normal_, got {function!r}")
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor | CastWeight):
        function(param)
    elif not local.is_meta:
        values = torch.empty(param.shape, dtype=param.dtype, device=local.device)
        function(values)
        load_high_precision_(param, values, keep_init=keep_init)
    return param
