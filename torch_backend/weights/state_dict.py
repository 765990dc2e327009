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
from blockfp.sharding.placement import Region

from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.sharding import placed, reduced, replicated
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import pytree
from .requantize import note_written


def stored(param: Tensor) -> dict[str, Tensor]:
    """The parts of a quantized parameter by the suffix of their names in a state dict; see the head of this module.

    Collective where a part is to be whole.
    """
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
    """The names of `stored` in a state dict, for a parameter of this name; none where it isn't quantized."""
    if not isinstance(sharding.local_of(param), QuantizedTensor):
        return []
    suffixes = [SUFFIXES[part.name] for part in stored_parts(param)]
    return [name + suffix for suffix in ("", *suffixes, f"{FORMAT}{_quantized(param).format}")]


def empty_entry(q: QuantizedTensor, shape: Sequence[int]) -> Tensor:
    """The empty tensor under a parameter's own name, or under that of its format.

    Its storage is of no bytes too, but has an address of its own: savers that look for tied tensors (accelerate's, without
    FSDP) take all that have none for one, and keep the first alone.
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
    """Gathers the whole of a part on every rank; collective over the mesh axes that cut the parameter."""
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
    """Takes the parts of a parameter out of a state dict, by the suffix of their names.

    Raises:
        ValueError: one is missing; nothing is taken out then.
    """
    suffixes = [*(SUFFIXES[part.name] for part in stored_parts(param)), f"{FORMAT}{_quantized(param).format}"]
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
    copies = [(_own(q, part), _part_of(param, q, part, values[SUFFIXES[part.name]], key)) for part in stored_parts(param)]
    for own, value in copies:
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
    q.initial = q.geometry.copied = None
    q.geometry.loaded = "codes"
    note_written([q])


def _part_of(param: Tensor, q: QuantizedTensor, part: Part, value: Tensor, key: str) -> Tensor:
    """This rank's piece of a part."""
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
    """The piece of a whole part that belongs to a region."""
    width = format.element.bits
    if part.name == "codes" and width < 8:
        codes = layout.unpack(whole[region.slices[:-1]], width, whole.shape[-1] * 8 // width)
        return layout.pack(codes[..., region.slices[-1]], width)
    return whole[part.span(region)]


# ---- what stands under a weight's own name


COMPUTES = {
    *("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv", "sum", "mean", "stack"),
    # As they come in inference mode.
    *("subtract", "multiply", "divide", "true_divide"),
}
"""The operations that averages are made of."""


class EmptyEntry(Tensor):
    """An empty tensor that takes part in copies, casts and files, and in no arithmetic, nor does a DTensor of it.

    Averages over state dicts (timm's ModelEmaV3, Ultralytics' ModelEMA, ..) go through all that a state dict holds. An average
    without elements is easily made, and they would go on to the codes beside it as if these were numbers: some mix them, some
    leave them at those of the first step. Files hold a plain tensor.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_").removeprefix("foreach_")
        if name in COMPUTES:
            leaves = pytree.tree_leaves((args, kwargs))
            shape = next(tuple(one.shape[1:]) for one in leaves if isinstance(one, EmptyEntry))
            raise NotImplementedError(
                f"{name} is not defined for what stands under a quantized weight's name in a state dict (the weight's "
                f"shape is {shape}): beside it are codes and scales, and averages of those are none of the weight. For "
                'averages of weights (EMA, soups) convert with weights="high_precision", or average what '
                "blockfp.torch.high_precision_state_dict(model) gives"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs or {})  # pyright: ignore
        # A parameter that it is copied into stays what it is, and so does a shape. `as_subclass` takes an alias.
        kept = type(result) is Tensor and result.shape[:1] == (0,) and func is not torch.ops.aten.alias.default
        return result.as_subclass(EmptyEntry) if kept else result

    # Which torch refuses of all classes that have a `__torch_dispatch__`.
    def numpy(self, *, force: bool = False) -> Any:
        return self.as_subclass(Tensor).numpy(force=force)

    def tolist(self) -> Any:
        return self.as_subclass(Tensor).tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
