"""Quantizing shards so that they are the shards of the quantized whole, in place: after an optimizer step, or on loading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockfp.definition import checks
from blockfp.definition.numerics import Quantized
from blockfp.definition.rounding import Key

from ..custom_ops.dtypes import name_of
from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.tensor import QuantizedTensor
from ..sharded.quantize import WeightShard, quantize_weights
from ..sharded.rank_plan import Quantization, weight_quantization


def requantize_(params: Sequence[Tensor], values: Sequence[Tensor], *, keys: Sequence[Key | None] | None = None) -> None:
    """Writes the quantization of new values into quantized parameters, as if each whole parameter were quantized at once.

    Codes and scales are written in place, into the memory that the next gather reads. A parameter's `initial` is dropped, since
    it no longer belongs to its codes. Every rank that holds a part of a parameter must call it, with parameters in the same
    order, also where its part is empty.

    Args:
        params: quantized tensors, or DTensors of them.
        values: float32, float16 or bfloat16; for each parameter what this rank holds of it, as a local tensor or as a DTensor
            placed alike.
        keys: for each parameter None, or a key for stochastic rounding: of one without a master, whose scales then go on from
            those that it has (`definition.kept_scales`). Its values are float32.

    Raises:
        TypeError: a parameter is not quantized.
        ValueError: values don't fit their parameter; or it is FSDP's gathered copy (call `reshard()` of its FSDPModule first).
    """
    keys = [None] * len(params) if keys is None else keys
    shards = [_shard(param, value, key) for param, value, key in zip(params, values, keys, strict=True)]
    with torch.no_grad():
        quantize_weights([shard for _, shard in shards])
    for q, _ in shards:
        q.initial = None
    note_written([q for q, _ in shards])


def note_written(tensors: Iterable[Tensor]) -> None:
    """Tells autograd that memory of these was written past it: backwards of forwards before that raise, as torch's own do."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _shard(param: Tensor, values: Tensor, key: Key | None) -> tuple[QuantizedTensor, WeightShard]:
    """The local tensor of a parameter, and the values that are quantized into it."""
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"params must hold quantized tensors, got {type(local).__name__} of {local.dtype}")
    check_writable(local)
    if sharding.mesh_of(values) is not None and not sharding.placed_alike(values, param):
        raise ValueError(
            f"values must be placed like their parameter, {sharding.sharding_of(param)}, got {sharding.sharding_of(values)}: "
            "redistribute them first"
        )
    values = sharding.local_of(values)
    step, groups = quantization_of(param, local, key is not None)
    if values.shape != local.shape or values.device != local.device:
        raise ValueError(
            f"values must be of shape {tuple(local.shape)} on {local.device}, as this rank's part of the parameter, got "
            f"{tuple(values.shape)} on {values.device}"
        )
    checks.check_input(values)
    out = Quantized(local.codes, local.scales, local.tensor_scale)
    return local, WeightShard(values.detach().resolve_neg(), step, groups, name_of(local.dtype), key, out)


def check_writable(local: QuantizedTensor) -> None:
    """Raises ValueError where what is written into a local tensor would be lost, or would lose what it was given."""
    if local.geometry.gathered:
        raise ValueError(
            "params: this is FSDP's gathered copy of a sharded weight, which the next reshard throws away: call reshard() on "
            "its FSDPModule, then take the parameter"
        )
    if local.geometry.copied is not None:
        raise ValueError(f"params: {COPIED}")


def quantization_of(param: Tensor, local: QuantizedTensor, stochastic: bool = False) -> tuple[Quantization, dict[str, str]]:
    """Returns how this rank's part of a parameter is quantized, and the process group of each mesh axis that it reduces over.

    Raises:
        ValueError: the local tensor doesn't lie where the parameter says.
    """
    lies = sharding.sharding_of(param)
    region = sharding.region_of(param, lies)
    # A plain tensor may be a part of something that it alone knows.
    origin = local.origin if sharding.mesh_of(param) is None else region.origin
    if local.origin != origin and not region.empty:
        raise ValueError(
            f"a parameter that lies {lies} begins at {region.origin} on this rank, but its local tensor says {local.origin}"
        )
    step = weight_quantization(local.format, lies, sharding.rank_in(param, lies), stochastic)
    if origin != step.origins[0]:
        step = step._replace(origins=(origin,))
    axes = (*step.amax_axes, *(axis for shared in step.shared for axis in shared.axes))
    return step, {axis: sharding.group_name(param, axis) for axis in axes}
