"""Stores quantized weights in state dicts as ordinary tensors: codes, scales, and the format in a key.

A quantized parameter NAME of a module, sharded or not, becomes

    NAME                    no data: shape (0, *shape of the weight) and the nominal dtype. A plain model rejects it, even with
                            strict=False, and casts can't turn it into values
    NAME_codes              uint8
    NAME_scale              uint8 or float32, one for each block
    NAME_tensor_scale       float32 of shape (), for NVFP4 only
    NAME_format_FORMAT      like NAME; identifies the format

Under FSDP2 and tensor parallelism the parts are DTensors with the parameter's mesh and placements that share its memory, so
torch's DCP saves, reshards and loads them in place. Parts that can't be sharded like the weight (`sharding.parts`: blocks cross
ranks) are gathered into replicated tensors, and `load_state_dict` copies them back.

The format is in a key so that it is known before data is read: DCP's planner rejects a checkpoint without the key. No class of
blockfp's is pickled, so `torch.load(weights_only=True)` works.
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
from blockfp.sharding.placement import Region

from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.sharding import placed, reduced, replicated
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import pytree
from .requantize import note_written


def stored(param: Tensor) -> dict[str, Tensor]:
    """Returns a quantized parameter's parts by name suffix, as described above; collective if a part must be gathered."""
    q = _quantized(param)
    if q.geometry.copied is not None:
        raise RuntimeError(COPIED)
    shown = {SUFFIXES[part.name]: _shown(param, q, part) for part in stored_parts(param)}
    own, format = (empty_entry(q, param.shape) for _ in range(2))
    if type(own) is Tensor:
        own = own.as_subclass(EmptyEntry)
    if sharding.mesh_of(param) is not None:
        own, format = replicated(param, own), replicated(param, format)
    return {"": own, **shown, f"{FORMAT}{q.format}": format}


def stored_names(name: str, param: Tensor) -> list[str]:
    """Returns the state dict names of a quantized parameter's parts; [] if it isn't quantized."""
    if not isinstance(sharding.local_of(param), QuantizedTensor):
        return []
    suffixes = [SUFFIXES[part.name] for part in stored_parts(param)]
    return [name + suffix for suffix in ("", *suffixes, f"{FORMAT}{_quantized(param).format}")]


def empty_entry(q: QuantizedTensor, shape: Sequence[int]) -> Tensor:
    """Returns the empty tensor stored under a parameter's own name or its format's.

    Its empty storage has a unique address: savers that look for tied tensors (accelerate's, without FSDP) treat all tensors
    without an address as one and keep only the first.
    """
    entry = torch.empty(no_values(shape), dtype=q.dtype, device=q.device)
    place = torch.empty(1, dtype=torch.uint8, device=q.device)
    if entry.is_meta or type(place) is not Tensor:
        return entry
    return entry.set_(place.untyped_storage()[:0], 0, entry.shape, entry.stride())


def _shown(param: Tensor, q: QuantizedTensor, part: Part) -> Tensor:
    own = _own(q, part)
    if sharding.mesh_of(param) is None:
        return own
    if part.sharded:
        return placed(param, own, part.shape)
    return replicated(param, gathered(param, q, part))


def gathered(param: Tensor, q: QuantizedTensor, part: Part) -> Tensor:
    """Returns a whole part on every rank; collective over the mesh axes that shard the parameter."""
    own = _own(q, part)
    if part.unit is None:
        # torch's asynchronous saves don't copy DTensors of shape (), and this one must not change while it is written.
        return own.clone() if own.ndim == 0 else own
    if own.is_meta:
        return own.new_empty(part.shape)
    lies, region = sharding.sharding_of(param), sharding.region_of(param)
    if part.name == "scales":
        # Ranks that share a block have equal scales, and scales are not negative, so the maximum with zeros restores them.
        bits = own.new_zeros(part.shape).view(_integer(own.dtype))
        bits[part.span(region)] = own.view(bits.dtype)
        return reduced(param, lies, bits, "max").view(own.dtype)
    width = q.format.element.bits
    codes = own.new_zeros(lies.shape)
    codes[region.slices] = layout.unpack(own, width, region.shape[-1])
    return layout.pack(reduced(param, lies, codes, "sum"), width)


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


def stored_parts(param: Tensor) -> tuple[Part, ...]:
    """Returns the parts of a quantized parameter on its mesh."""
    return parts.parts(_quantized(param).format, sharding.sharding_of(param))


# ---- loading


REMEDY = "load_checkpoint(.., requantize=True) converts; load_high_precision_(parameter, values) quantizes values"


def format_of(key: str, names: Mapping[str, Any]) -> Format | None:
    """Returns the format of a weight from the names in a state dict or checkpoint; None if it isn't quantized.

    Raises ValueError for an unknown format.
    """
    found = [name for name in names if name.startswith(key + FORMAT)]
    return Format.parse(found[0].removeprefix(key + FORMAT)) if found else None


def check_format(param: Tensor, key: str, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError if a state dict has codes in another format than the parameter's."""
    ours, theirs = _quantized(param).format, format_of(key, state_dict)
    if theirs is None and key + SUFFIXES["codes"] in state_dict:
        raise ValueError(
            f"{key} is {ours} in the model; the loaded state has codes but no {key}{FORMAT}.., which names their format"
        )
    if theirs is not None and theirs is not ours:
        raise ValueError(f"{key} is {ours} in the model and {theirs} in the loaded state: {REMEDY}")


def take_parts(param: Tensor, key: str, state_dict: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Removes a parameter's parts from a state dict and returns them by suffix; raises ValueError if one is missing."""
    suffixes = [*(SUFFIXES[part.name] for part in stored_parts(param)), f"{FORMAT}{_quantized(param).format}"]
    missing = [key + suffix for suffix in suffixes if key + suffix not in state_dict]
    if missing:
        format = _quantized(param).format
        raise ValueError(f"{key} in {format} needs {', '.join(missing)}, which the loaded state lacks")
    return {suffix: state_dict.pop(key + suffix) for suffix in suffixes}


@torch.no_grad()
def load_parts_(param: Tensor, values: Mapping[str, Tensor], key: str) -> None:
    """Writes the parts of `stored` into a quantized parameter in place, after checking all of them.

    Values may be whole tensors or DTensors with any placements. Raises ValueError if a part's shape or dtype differs, or the
    parameter is on the meta device or FSDP's gathered copy.
    """
    q = _quantized(param)
    if q.is_meta:
        raise ValueError(f"{key} is on the meta device and has no memory: call to_empty(device=...) of its module first")
    if q.geometry.gathered:
        raise ValueError(f"{key} is FSDP's gathered copy of a sharded weight: call reshard() on its FSDPModule first")
    copies = [(_own(q, part), _part_of(param, q, part, values[SUFFIXES[part.name]], key)) for part in stored_parts(param)]
    for own, value in copies:
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
    q.initial = q.geometry.copied = None
    q.geometry.loaded = "codes"
    note_written([q])


def _part_of(param: Tensor, q: QuantizedTensor, part: Part, value: Tensor, key: str) -> Tensor:
    """Returns this rank's shard of a part."""
    own = _own(q, part)
    region = sharding.region_of(param)
    if value.dtype != own.dtype:
        raise ValueError(f"{key}{SUFFIXES[part.name]} must be {own.dtype}, got {value.dtype}")
    dtensor = sharding.as_dtensor(value)
    if dtensor is not None:
        alike = part.sharded and sharding.placed_alike(value, param)
        if alike and sharding.local_of(value).shape == own.shape:
            return sharding.local_of(value)
        value = dtensor.full_tensor()
    if sharding.mesh_of(param) is None and value.shape == own.shape:
        return value
    if tuple(value.shape) != part.shape:
        raise ValueError(f"{key}{SUFFIXES[part.name]} must be of shape {part.shape}, got {tuple(value.shape)}")
    return cut(q.format, part, value, region)


def cut(format: Format, part: Part, whole: Tensor, region: Region) -> Tensor:
    """Returns the piece of a whole part that belongs to a region."""
    width = format.element.bits
    if part.name == "codes" and width < 8:
        codes = layout.unpack(whole[region.slices[:-1]], width, whole.shape[-1] * 8 // width)
        return layout.pack(codes[..., region.slices[-1]], width)
    return whole[part.span(region)]


# ---- the entry under a weight's own name


COMPUTES = {
    *("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv", "sum", "mean", "stack"),
    # Names in inference mode.
    *("subtract", "multiply", "divide", "true_divide"),
}
"""Operations that averages consist of."""


class EmptyEntry(Tensor):
    """An empty tensor that supports copies, casts and files, but no arithmetic; neither does a DTensor of it.

    Averages over state dicts (timm's ModelEmaV3, Ultralytics' ModelEMA) process every entry. An average of empty tensors would
    succeed, and they would go on to average or skip the codes as if these were values. In files it is a plain tensor.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_").removeprefix("foreach_")
        if name in COMPUTES:
            leaves = pytree.tree_leaves((args, kwargs))
            shape = next(tuple(one.shape[1:]) for one in leaves if isinstance(one, EmptyEntry))
            raise NotImplementedError(
                f"{name} is not defined for the empty entry under a quantized weight's name in a state dict (the "
                f"weight's shape is {shape}): codes and scales have separate entries, and their averages mean nothing. "
                'For averages of weights (EMA, soups) convert with weights="high_precision", or average '
                "blockfp.torch.high_precision_state_dict(model)"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs or {})  # pyright: ignore
        # Results copied into a parameter and shapes stay plain. `as_subclass` needs a plain alias.
        kept = type(result) is Tensor and result.shape[:1] == (0,) and func is not torch.ops.aten.alias.default
        return result.as_subclass(EmptyEntry) if kept else result

    # torch rejects these for all classes with `__torch_dispatch__`.
    def numpy(self, *, force: bool = False) -> Any:
        return self.as_subclass(Tensor).numpy(force=force)

    def tolist(self) -> Any:
        return self.as_subclass(Tensor).tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
