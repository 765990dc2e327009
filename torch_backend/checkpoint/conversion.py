"""Weights that a checkpoint holds in another format than the model: found, read as they are there, and converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockfp import parts
from blockfp.formats import Format
from blockfp.manifest import BadCheckpoint
from blockfp.parts import FORMAT, SUFFIXES

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.requantize import requantize_
from ..weights.state_dict import cut, format_of, placed, replicated


@dataclass(frozen=True)
class Conversion:
    """A parameter, and what the checkpoint has for it.

    Attributes:
        name: of the parameter.
        param: the model's.
        theirs: the format in the checkpoint; None for high precision.
        dtype: the dtype there, nominal where there is a format.
        keep_init: whether the model keeps originals of this parameter.
        read: by name, what is read from the checkpoint in the place of the parameter's own entries.
    """

    name: str
    param: Tensor
    theirs: Format | None
    dtype: torch.dtype
    keep_init: bool
    read: dict[str, Tensor]


def conversions(model: nn.Module, there: Mapping[str, Any], requantize: bool) -> list[Conversion]:
    """The parameters whose format or dtype is another in a checkpoint.

    Args:
        model: the model.
        there: what the checkpoint's index says of each name.
        requantize: whether they may be converted.

    Raises:
        BadCheckpoint: there are some, and they may not.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found, different = [], []
    for name, param in model.named_parameters(remove_duplicate=False):
        what = there.get(name)
        if not isinstance(what, TensorStorageMetadata):
            continue
        local, theirs = sharding.local_of(param), format_of(name, there)
        ours = local.format if isinstance(local, QuantizedTensor) else None
        dtype = what.properties.dtype if theirs is None else there[f"{name}{FORMAT}{theirs}"].properties.dtype
        if ours is theirs and (ours is not None or dtype == param.dtype):
            continue
        different.append(f"{name} is {ours or param.dtype} in the model and {theirs or dtype} in the checkpoint")
        holder = model.get_submodule(name.rpartition(".")[0])
        keep = getattr(holder, "keep_init", True)
        found.append(Conversion(name, param, theirs, dtype, keep, _to_read(name, param, theirs, dtype)))
    if different and not requantize:
        more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
        raise BadCheckpoint(f"{'; '.join(different[:4])}{more}: load_checkpoint(.., requantize=True) converts")
    return found


def replace(converted: Sequence[Conversion], state: dict[str, Any]) -> None:
    """Puts what is to be read in the place of the parameters' own entries in a state dict."""
    for one in converted:
        local = sharding.local_of(one.param)
        del state[one.name]
        if isinstance(local, QuantizedTensor):
            for suffix in (*SUFFIXES.values(), f"{FORMAT}{local.format}"):
                state.pop(one.name + suffix, None)
        state.update(one.read)


@torch.no_grad()
def convert(converted: Sequence[Conversion], masters: Sequence[Tensor | None]) -> None:
    """Writes what was read into the parameters; collective where they are sharded.

    Args:
        converted: the parameters.
        masters: the optimizer's fp32 weights where they have been loaded: they are what the codes are made from then.
    """
    quantized: list[tuple[Tensor, Tensor]] = []
    for one, master in zip(converted, masters, strict=True):
        local = sharding.local_of(one.param)
        values = _values(one) if master is None else master
        if not isinstance(local, QuantizedTensor):
            local.copy_(values)
            continue
        quantized.append((one.param, values))
    requantize_([param for param, _ in quantized], [values for _, values in quantized])
    for one, master in zip(converted, masters, strict=True):
        local = sharding.local_of(one.param)
        if isinstance(local, QuantizedTensor) and one.theirs is None and master is None and one.keep_init:
            local.initial = sharding.local_of(one.read[one.name]).to("cpu", copy=True)


def _to_read(name: str, param: Tensor, theirs: Format | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Memory for what the checkpoint has, which lies as the parameter does."""
    local = sharding.local_of(param)
    if theirs is None:
        return {name: placed(param, torch.empty(local.shape, dtype=dtype, device=local.device))}
    lies = sharding.sharding_of(param)
    region = lies.region(sharding.rank_in(param))
    read = {}
    for part in parts.parts(theirs, lies):
        whole = torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=local.device)
        if sharding.mesh_of(param) is None:
            value = whole
        elif part.sharded:
            value = placed(param, torch.empty_like(whole[part.span(region)]), part.shape)
        else:
            value = replicated(param, whole)
        read[name + SUFFIXES[part.name]] = value
    read[f"{name}{FORMAT}{theirs}"] = torch.empty((0, *param.shape), dtype=dtype)
    return read


def _values(one: Conversion) -> Tensor:
    """What this rank's part of the parameter is in the checkpoint."""
    if one.theirs is None:
        return sharding.local_of(one.read[one.name])
    lies = sharding.sharding_of(one.param)
    region = lies.region(sharding.rank_in(one.param))
    own = []
    for part in parts.parts(one.theirs, lies):
        value = sharding.local_of(one.read[one.name + SUFFIXES[part.name]])
        own.append(value if part.sharded else cut(one.theirs, part, value, region))
    q = QuantizedTensor.from_parts(*own, format=one.theirs, columns=region.shape[-1], dtype=one.dtype, origin=region.origin)
    return q.dequantize(torch.float32)
