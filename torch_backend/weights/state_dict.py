"""Quantized weights in state dicts: codes and scales as ordinary tensors, beside the format's name.

A quantized parameter NAME of a module, sharded or not, becomes

    NAME                    nothing in memory: its shape is (0, *shape of the weight), its dtype the nominal one. A plain model
                            refuses it, with strict=False too, and nothing that casts makes values of it
    NAME_codes              uint8
    NAME_scale              uint8 or float32, one for each block
    NAME_tensor_scale       float32 of shape (), for NVFP4 only
    NAME_format_FORMAT      as NAME: it says what the codes are

Under FSDP2 and tensor parallelism they are DTensors with the parameter's mesh and placements, which share its memory: torch's
checkpoints (DCP) save them, reshard them, and load into the weights themselves. What can't be cut as the weight is cut
(`sharding.parts`: blocks that straddle ranks) is a replicated whole, gathered here and copied into place by `load_state_dict`.

The format is in a key so that it is known before anything is read: DCP itself refuses, while it plans, to load a checkpoint
that lacks the key. No class of blockfp's is pickled, so `torch.load(weights_only=True)` reads all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import layout
from blockfp.files.names import FORMAT, SUFFIXES, no_values
from blockfp.formats import Format
from blockfp.sharding import parts
from blockfp.sharding.parts import Part
from blockfp.sharding.placement import Region, Sharding

from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.tensor import QuantizedTensor


def stored(param: Tensor) -> dict[str, Tensor]:
    """The parts of a quantized parameter by what follows its name in a state dict; see the head of this module.

    Collective where a part is to be whole.
    """
    q = _quantized(param)
    if q.geometry.copied is not None:
        raise RuntimeError(COPIED)
    shown = {SUFFIXES[part.name]: _shown(param, q, part) for part in lying(param)}
    empty = nothing(q, param.shape)
    empty = empty if sharding.mesh_of(param) is None else replicated(param, empty)
    return {"": empty, **shown, f"{FORMAT}{q.format}": empty}


def stored_names(name: str, param: Tensor) -> list[str]:
    """The names of `stored` in a state dict, for a parameter of this name; none where it isn't quantized."""
    if not isinstance(sharding.local_of(param), QuantizedTensor):
        return []
    suffixes = [SUFFIXES[part.name] for part in lying(param)]
    return [name + suffix for suffix in ("", *suffixes, f"{FORMAT}{_quantized(param).format}")]


def nothing(q: QuantizedTensor, shape: Sequence[int]) -> Tensor:
    """What stands under a parameter's own name, and under that of its format."""
    return torch.empty(no_values(shape), dtype=q.dtype, device=q.device)


def _shown(param: Tensor, q: QuantizedTensor, part: Part) -> Tensor:
    own = _own(q, part)
    if sharding.mesh_of(param) is None:
        return own
    if part.sharded:
        return placed(param, own, part.shape)
    return replicated(param, gathered(param, q, part))


def placed(param: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A local tensor as a DTensor that lies as a parameter does; itself where that is no DTensor."""
    mesh = sharding.mesh_of(param)
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    whole = torch.empty(tuple(param.shape) if shape is None else shape, dtype=local.dtype, device="meta")
    if local.device.type not in (mesh.device_type, "meta"):
        return offloaded(param, local, whole)
    placements = param.placements  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def offloaded(param: Tensor, local: Tensor, whole: Tensor) -> Tensor:
    """A DTensor that lies as a parameter does, with memory that is not on the mesh's device; `from_local` would copy it there.

    FSDP2 makes such DTensors of parameters that it keeps on the CPU, in this way, which torch has no public name for.
    """
    from torch.distributed.tensor import DTensor

    spec: Any = param._spec  # pyright: ignore[reportAttributeAccessIssue]
    meta = type(spec.tensor_meta)(whole.shape, whole.stride(), whole.dtype)
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)  # pyright: ignore


def replicated(param: Tensor, whole: Tensor) -> Tensor:
    """A tensor that every rank of a parameter's mesh has, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = sharding.mesh_of(param)
    assert mesh is not None
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def gathered(param: Tensor, q: QuantizedTensor, part: Part) -> Tensor:
    """The whole of a part, alike on every rank; collective over the mesh axes that cut the parameter."""
    own = _own(q, part)
    if part.unit is None:
        # torch's copies for asynchronous saves leave DTensors of shape () out: this one mustn't change while it is written.
        return own.clone() if own.ndim == 0 else own
    if own.is_meta:
        return own.new_empty(part.shape)
    lies, region = sharding.sharding_of(param), sharding.region_of(param)
    if part.name == "scales":
        # Ranks that share a block have the same scale, and scales have no sign: the largest is the one that is there.
        bits = own.new_zeros(part.shape).view(_integer(own.dtype))
        bits[part.span(region)] = own.view(bits.dtype)
        return reduced(param, lies, bits, "max").view(own.dtype)
    width = q.format.element.bits
    codes = own.new_zeros(lies.shape)
    codes[region.slices] = layout.unpack(own, width, region.shape[-1])
    return layout.pack(reduced(param, lies, codes, "sum"), width)


def reduced(param: Tensor, lies: Sharding, tensor: Tensor, op: str) -> Tensor:
    """The reduction ("max" or "sum") of a tensor over the mesh axes that cut a parameter, on the tensor's own device."""
    mesh, device = sharding.mesh_of(param), tensor.device
    assert mesh is not None
    # Parameters that FSDP2 keeps on the CPU belong to groups that may speak to GPUs only.
    tensor = tensor.to(mesh.device_type)
    for axis in dict.fromkeys(name for dim in range(len(lies.shape)) for name in lies.order(dim)):
        group = sharding.group_name(param, axis)
        sent = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), op, group)
        tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return tensor.to(device)


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else dtype


def _own(q: QuantizedTensor, part: Part) -> Tensor:
    own = getattr(q, part.name)
    assert isinstance(own, Tensor)
    return own.detach()


def _quantized(param: Tensor) -> QuantizedTensor:
    q = sharding.local_of(param)
    assert isinstance(q, QuantizedTensor)
    return q


def lying(param: Tensor) -> tuple[Part, ...]:
    """The parts of a quantized parameter, as they lie on its mesh."""
    return parts.parts(_quantized(param).format, sharding.sharding_of(param))


# ---- loading


REMEDY = "load_checkpoint(.., requantize=True) converts; load_high_precision_(parameter, values) quantizes values"


def format_of(key: str, names: Mapping[str, Any]) -> Format | None:
    """The format of a weight of this name among the names of a state dict or checkpoint; None where it isn't quantized.

    Raises:
        ValueError: the format is none that this blockfp knows.
    """
    found = [name for name in names if name.startswith(key + FORMAT)]
    return Format.parse(found[0].removeprefix(key + FORMAT)) if found else None


def check_format(param: Tensor, key: str, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError where the codes in a state dict are not in a parameter's format."""
    ours, theirs = _quantized(param).format, format_of(key, state_dict)
    if theirs is None and key + SUFFIXES["codes"] in state_dict:
        raise ValueError(
            f"{key} is {ours} in the model; what is loaded has codes, and no {key}{FORMAT}.. that says what they are"
        )
    if theirs is not None and theirs is not ours:
        raise ValueError(f"{key} is {ours} in the model and {theirs} in what is loaded: {REMEDY}")


def take_parts(param: Tensor, key: str, state_dict: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Takes the parts of a parameter out of a state dict, by what follows its name.

    Raises:
        ValueError: one is missing; nothing is taken out then.
    """
    suffixes = [*(SUFFIXES[part.name] for part in lying(param)), f"{FORMAT}{_quantized(param).format}"]
    missing = [key + suffix for suffix in suffixes if key + suffix not in state_dict]
    if missing:
        format = _quantized(param).format
        raise ValueError(f"{key} in {format} needs {', '.join(missing)}, which what is loaded doesn't have")
    return {suffix: state_dict.pop(key + suffix) for suffix in suffixes}


@torch.no_grad()
def load_parts_(param: Tensor, values: Mapping[str, Tensor], key: str) -> None:
    """Writes the parts of `stored` into a quantized parameter, in place; nothing is written unless all fit.

    Args:
        param: a `QuantizedTensor`, or a DTensor of one.
        values: by suffix; DTensors that lie as `stored` lays them, or otherwise, or whole tensors.
        key: the parameter's name, for errors.

    Raises:
        ValueError: a part is of another shape or dtype; the parameter is on the meta device, or is FSDP's gathered copy.
    """
    q = _quantized(param)
    if q.is_meta:
        raise ValueError(f"{key} is on the meta device and has no memory: call to_empty(device=...) of its module first")
    if q.geometry.gathered:
        raise ValueError(f"{key} is FSDP's gathered copy of a sharded weight: call reshard() on its FSDPModule first")
    copies = [(_own(q, part), _part_of(param, q, part, values[SUFFIXES[part.name]], key)) for part in lying(param)]
    for own, value in copies:
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
    q.initial = q.geometry.copied = None


def _part_of(param: Tensor, q: QuantizedTensor, part: Part, value: Tensor, key: str) -> Tensor:
    """What this rank is to hold of a part."""
    own = _own(q, part)
    region = sharding.region_of(param)
    if value.dtype != own.dtype:
        raise ValueError(f"{key}{SUFFIXES[part.name]} must be {own.dtype}, got {value.dtype}")
    mesh = sharding.mesh_of(value)
    if mesh is not None:
        alike = part.sharded and sharding.placed_alike(value, param)
        if alike and sharding.local_of(value).shape == own.shape:
            return sharding.local_of(value)
        value = value.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    if sharding.mesh_of(param) is None and value.shape == own.shape:
        return value
    if tuple(value.shape) != part.shape:
        raise ValueError(f"{key}{SUFFIXES[part.name]} must be of shape {part.shape}, got {tuple(value.shape)}")
    return cut(q.format, part, value, region)


def cut(format: Format, part: Part, whole: Tensor, region: Region) -> Tensor:
    """What belongs to a region, of the whole of a part."""
    width = format.element.bits
    if part.name == "codes" and width < 8:
        codes = layout.unpack(whole[region.slices[:-1]], width, whole.shape[-1] * 8 // width)
        return layout.pack(codes[..., region.slices[-1]], width)
    return whole[part.span(region)]
