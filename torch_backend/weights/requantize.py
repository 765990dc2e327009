"""Quantizes shards in place so that they equal the shards of the quantized whole, after an optimizer step or on loading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockfp.definition import checks
from blockfp.definition.numerics import Quantized
from blockfp.definition.rounding import Key

from ..ops.library import name_of
from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.tensor import QuantizedTensor
from ..sharded.quantize import WeightShard, quantize_weights
from ..sharded.rank_plan import Quantization, weight_quantization
from .cast_weight import CastWeight


def requantize_(params: Sequence[Tensor], values: Sequence[Tensor], *, keys: Sequence[Key | None] | None = None) -> None:
    """Writes the quantization of new values into quantized parameters, as if each were unsharded; collective.

    Each of `values` (float32, float16 or bfloat16) is this rank's shard, local or as a DTensor placed alike. A key rounds
    float32 values stochastically for a weight without a master, whose new scales depend on its current ones
    (`definition.kept_scales`). Codes and scales keep their memory, which the next gather reads; `initial` is dropped. All ranks
    that hold a shard must pass the parameters in the same order, even if their shard is empty.

    Raises TypeError if a parameter is not quantized, and ValueError if values don't fit or it is FSDP's gathered copy.
    """
    keys = [None] * len(params) if keys is None else keys
    shards = [_shard(param, value, key) for param, value, key in zip(params, values, keys, strict=True)]
    with torch.no_grad():
        quantize_weights([shard for _, shard in shards])
    for q, _ in shards:
        q.initial = None
    note_written([q for q, _ in shards])


def quantized_as_used(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns high-precision parameters (`CastWeight`) as their codes in the forward, placed alike; collective.

    Each rank quantizes its shard with the scales of the whole, as FSDP2's gather does. All ranks that hold a shard must pass
    the parameters in the same order, even if their shard is empty.
    """
    locals = [sharding.local_of(param) for param in params]
    shards = []
    for param, local in zip(params, locals, strict=True):
        assert isinstance(local, CastWeight)
        step, groups = quantization_of(param, local)
        shards.append(WeightShard(local.values.detach(), step, groups, name_of(local.dtype)))
    with torch.no_grad():
        made = [
            QuantizedTensor.from_parts(
                *parts, format=shard.step.format, columns=local.shape[-1], dtype=local.dtype, origin=shard.step.origins[0]
            )
            for local, shard, parts in zip(locals, shards, quantize_weights(shards), strict=True)
        ]
    return [sharding.placed(param, q) for param, q in zip(params, made, strict=True)]


def note_written(tensors: Iterable[Tensor]) -> None:
    """Increments versions of tensors written without autograd, so that backwards of earlier forwards raise as torch's do."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _shard(param: Tensor, values: Tensor, key: Key | None) -> tuple[QuantizedTensor, WeightShard]:
    """Returns a parameter's local tensor and the values to quantize into it."""
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
    """Raises ValueError if a write into a local tensor would be lost, or would discard pending copied values."""
    if local.geometry.gathered:
        raise ValueError(
            "params: this is FSDP's gathered copy of a sharded weight, which the next reshard throws away: call reshard() on "
            "its FSDPModule, then take the parameter"
        )
    if local.geometry.copied is not None:
        raise ValueError(f"params: {COPIED}")


def quantization_of(
    param: Tensor, local: QuantizedTensor | CastWeight, stochastic: bool = False
) -> tuple[Quantization, dict[str, str]]:
    """Returns how this rank's shard is quantized, and the process group of each mesh axis that it reduces over.

    Raises ValueError if the local tensor's origin contradicts the parameter's sharding.
    """
    lies = sharding.sharding_of(param)
    region = sharding.region_of(param, lies)
    # A plain tensor may be a part of a whole that only its geometry records.
    own = local.origin if isinstance(local, QuantizedTensor) else region.origin
    origin = own if sharding.mesh_of(param) is None else region.origin
    if own != origin and not region.empty:
        raise ValueError(f"a parameter placed as {lies} begins at {region.origin} on this rank, but its local tensor at {own}")
    step = weight_quantization(local.format, lies, sharding.rank_in(param, lies), stochastic)
    if origin != step.origins[0]:
        step = step._replace(origins=(origin,))
    axes = (*step.amax_axes, *(axis for shared in step.shared for axis in shared.axes))
    return step, {axis: sharding.group_name(param, axis) for axis in axes}
