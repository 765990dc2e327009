"""Converts weights whose format differs between checkpoint and model.

A converted weight is made from the optimizer's fp32 master if the checkpoint has one. If the model keeps masters and the
checkpoint has none, the checkpoint's values become the master.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.definition.layout import scales_shape
from blockfp.errors import BadCheckpoint
from blockfp.files.contents import Weight, quantized_entries
from blockfp.files.modelfile import Tensor as Entry
from blockfp.files.names import FORMAT, STATE, SUFFIXES, master_of, no_values
from blockfp.formats import Format
from blockfp.sharding import parts

from ..modules import model_names
from ..optimizer.osci_reset import PATHS
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed, replicated
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.requantize import requantize_
from ..weights.state_dict import cut, format_of


@dataclass(frozen=True)
class Conversion:
    """A parameter and the checkpoint entries to convert it from.

    Attributes:
        name: the parameter's name.
        param: the model's parameter.
        theirs: the checkpoint's format; None for high precision.
        dtype: the checkpoint's dtype, nominal if it has a format.
        nominal: only the nominal dtype differs, so the codes are loaded unchanged.
        keep_init: whether the model keeps this parameter's original values.
        read: tensors to read by name, instead of the parameter's own entries.
    """

    name: str
    param: Tensor
    theirs: Format | None
    dtype: torch.dtype
    nominal: bool
    keep_init: bool
    read: dict[str, Tensor]


def conversions(model: nn.Module, there: Mapping[str, Any], requantize: bool) -> list[Conversion]:
    """Returns the parameters whose format or dtype differs from the checkpoint's index `there`.

    Raises BadCheckpoint if any differ and `requantize` is False.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found, different = [], []
    holders = model_names.modules(model)
    for name, param in model_names.parameters(model).items():
        what = there.get(name)
        if not isinstance(what, TensorStorageMetadata):
            continue
        local, theirs = sharding.local_of(param), format_of(name, there)
        ours = local.format if isinstance(local, QuantizedTensor) else None
        dtype = what.properties.dtype if theirs is None else there[f"{name}{FORMAT}{theirs}"].properties.dtype
        if ours is theirs and dtype == param.dtype:
            continue
        nominal = ours is theirs and ours is not None
        kinds = (f"{ours} of {param.dtype}", f"{theirs} of {dtype}") if nominal else (ours or param.dtype, theirs or dtype)
        different.append(f"{name} is {kinds[0]} in the model and {kinds[1]} in the checkpoint")
        keep = getattr(holders.get(name.rpartition(".")[0]), "keep_init", True)
        read = _format_entries(name, param, theirs, dtype) if nominal else _to_read(name, param, theirs, dtype)
        found.append(Conversion(name, param, theirs, dtype, nominal, keep, read))
    if different and not requantize:
        more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
        raise BadCheckpoint(f"{'; '.join(different[:4])}{more}: load_checkpoint(.., requantize=True) converts")
    return found


def replace(converted: Sequence[Conversion], state: dict[str, Any]) -> None:
    """Replaces the parameters' own entries in a state dict by the entries to read."""
    for one in converted:
        local = sharding.local_of(one.param)
        if isinstance(local, QuantizedTensor) and not one.nominal:
            for suffix in ("", *SUFFIXES.values(), f"{FORMAT}{local.format}"):
                state.pop(one.name + suffix, None)
        state.update(one.read)


def replace_masters(
    converted: Sequence[Conversion], states: dict[str, Any], there: dict[str, Any], *, may_ignore: bool
) -> list[Conversion]:
    """Makes optimizer state dict and checkpoint index `there` agree about masters; returns the parameters that lack one.

    A master missing in the checkpoint is removed from `states`. A master only in the checkpoint is read if its parameter is
    converted, and otherwise dropped from the index, provided that `may_ignore` allows it.
    """
    by_name, wanted = {one.name: one for one in converted if not one.nominal}, []
    for name, entries in states.items():
        one, there_too = by_name.get(name), master_of(name) in there
        if there_too == ("master" in entries):
            continue
        if not there_too:
            del entries["master"]
            if one is not None:
                wanted.append(one)
        elif one is not None:
            local = sharding.local_of(one.param)
            entries["master"] = placed(one.param, torch.empty(local.shape, dtype=torch.float32, device=local.device))
        elif may_ignore:
            del there[master_of(name)]
    return wanted


def leave_paths(states: dict[str, Any], there: dict[str, Any], *, may_ignore: bool) -> None:
    """Drops OsciReset's paths from whichever of state dict and index has them alone, since a resumed run may turn it on or off.

    A path that isn't read starts at 0.
    """
    for name, entries in states.items():
        for path in PATHS:
            entry = f"{STATE}.{name}.{path}"
            if entry not in there:
                entries.pop(path, None)
            elif path not in entries and may_ignore:
                del there[entry]


def masters_of(converted: Sequence[Conversion], states: Mapping[str, Any]) -> list[Tensor | None]:
    """Returns this rank's shard of each master that was read, or None; names of a tied parameter share one."""
    by_name = {one.name: states.get(one.name, {}).get("master") for one in converted}
    found = {id(one.param): by_name[one.name] for one in converted if by_name[one.name] is not None}
    return [sharding.local_of(found[id(one.param)]) if id(one.param) in found else None for one in converted]


@torch.no_grad()
def convert(converted: Sequence[Conversion], masters: Sequence[Tensor | None]) -> None:
    """Writes the loaded values, or the fp32 `masters` where given, into the parameters; collective if they are sharded."""
    pairs = [(one, master) for one, master in zip(converted, masters, strict=True) if not one.nominal]
    quantized: list[tuple[Tensor, Tensor]] = []
    for one, master in pairs:
        local = sharding.local_of(one.param)
        values = values_of(one) if master is None else master
        if not isinstance(local, QuantizedTensor):
            local.copy_(values)
            continue
        quantized.append((one.param, values))
    requantize_([param for param, _ in quantized], [values for _, values in quantized])
    for one, master in pairs:
        local = sharding.local_of(one.param)
        if isinstance(local, QuantizedTensor) and one.theirs is None and master is None:
            if one.keep_init:
                local.initial = sharding.local_of(one.read[one.name]).to("cpu", copy=True)
            local.geometry.loaded = "values"


def _format_entries(name: str, param: Tensor, theirs: Format | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: torch.empty(no_values(param.shape), dtype=dtype, device="cpu") for key in (name, f"{name}{FORMAT}{theirs}")}


def _to_read(name: str, param: Tensor, theirs: Format | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns empty tensors for the checkpoint's entries, sharded as the parameter."""
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
    return read | _format_entries(name, param, theirs, dtype)


def values_of(one: Conversion) -> Tensor:
    """Returns this rank's shard of the checkpoint's values, dequantized to fp32 if quantized."""
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


# ---- fused tensors


Apart = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Splits a named tensor of the model, possibly on the meta device, into the server's tensors by name."""


def split(entry: Entry, apart: Apart) -> dict[str, Entry]:
    """Returns the entries that `apart` makes of one; each can be read once."""
    meta = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name), device="meta")
    shapes = {name: tuple(part.shape) for name, part in apart(entry.name, meta).items()}
    values: Any = entry.read
    read = _at_once(lambda: apart(entry.name, values()))
    return {name: Entry(name, entry.dtype, shape, read(name)) for name, shape in shapes.items()}


def split_weight(weight: Weight, apart: Apart) -> dict[str, Weight]:
    """Splits a quantized weight's codes and scales; raises ValueError if a cut falls inside a block."""
    format, made = weight.format, {}
    codes = split(weight.codes, apart)
    scales = {} if format.block is None else split(weight.scales, apart)
    for name, own in codes.items():
        shape = (*own.shape[:-1], weight.shape[-1])
        one = (1,) * len(shape)
        grid = scales.get(name, Entry(name, weight.scales.dtype, one, lambda one=one: weight.scales.read().reshape(one)))
        cut = len(codes) > 1 and format.block is not None and shape[-2] != weight.shape[-2] and shape[-2] % format.block[0]
        if cut or grid.shape != scales_shape(shape, format):
            raise ValueError(
                f"{weight.name} {list(weight.shape)} in {format} can't be taken apart into {name} {list(shape)} and others: "
                "blocks reach over their ends"
            )
        made[name] = dataclasses.replace(weight, name=name, shape=shape, codes=own, scales=grid)
    return made


def turned(weight: Weight) -> Weight:
    """Transposes the last two axes of a weight with square blocks; each part of the result can be read once."""
    format, factor = weight.format, weight.tensor_scale

    def whole() -> dict[str, Tensor]:
        codes, scales = (torch.as_tensor(part.read(), device="cpu") for part in (weight.codes, weight.scales))
        scale = None if factor is None else torch.as_tensor(factor.read(), device="cpu")
        q: Any = QuantizedTensor.from_parts(
            codes, scales, scale, format=format, columns=weight.shape[-1], dtype=torch.float32
        ).mT
        return {"codes": q.codes, "scales": q.scales}

    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])
    _, codes, scales, *_ = quantized_entries(weight.name, shape, weight.dtype, format)
    read = _at_once(whole)
    return dataclasses.replace(
        weight,
        shape=shape,
        codes=Entry(weight.name, codes.dtype, codes.shape, read("codes")),
        scales=Entry(weight.name, scales.dtype, scales.shape, read("scales")),
    )


def _at_once(read: Callable[[], Mapping[str, Tensor]]) -> Callable[[str], Callable[[], Any]]:
    """Returns a reader for each tensor that one call of `read` produces; the others are held until they are read."""
    held: dict[str, Tensor] = {}

    def of(name: str) -> Callable[[], Tensor]:
        def one() -> Tensor:
            if name not in held:
                held.update(read())
            return held.pop(name)

        return one

    return of
