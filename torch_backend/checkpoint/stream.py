"""`stream_weights`: gathers a model's weights as codes, in the layout that an inference server loads.

Names, shapes and buckets follow from the model alone (`files.layouts`), so all ranks issue the same collectives in the same
order. Each part is gathered once, with its bucket; evenly sharded rows of a bucket share one collective.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockfp.definition.bits import dtype_name
from blockfp.definition.layout import dtype_of
from blockfp.files import saving
from blockfp.files.contents import Contents, Weight, quantized_entries
from blockfp.files.layouts.known import LAYOUTS
from blockfp.files.layouts.layout import Layout, joined_by_servers, not_released
from blockfp.files.modelfile import Tensor as Entry
from blockfp.files.names import SUFFIXES
from blockfp.formats import Format
from blockfp.sharding.parts import Part

from ..conversion.kinds import input_formats, quantized_names
from ..modules import model_names
from ..modules.experts import Experts
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.module_state import InParts, state_names
from ..weights.state_dict import gathered, stored_parts
from . import ranks
from .conversion import Apart, split, split_weight, turned
from .for_servers import KVScales, codes_of_values, kv_entries
from .ranks import Key, Rows, gather_rows, rows_of
from .training_state import full_tensor

_HASHING = 8
"""Hashing threads. One hashes 1 to 2 GB/s."""


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's tensors, whole, as a server loads them. Iterates over (name, tensor).

    Attributes:
        tensors: by name, on the model's device; empty on ranks that don't keep them.
        sha256: hexadecimal digest of each tensor's row-major bytes.
        nbytes: bytes of all tensors together, the same on every rank.
    """

    tensors: dict[str, Tensor]
    sha256: dict[str, str]
    nbytes: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class WeightStream(Iterator[WeightBucket]):
    """Iterator over the buckets of `stream_weights`, gathered one at a time.

    Attributes:
        shapes: (dtype, shape) of every tensor by name, in order; the same on every rank.
        configs: entries for the server's JSON files, by file name ("quantization_config" in config.json).
        tied: other names of tied tensors, mapped to the name under which they come.
    """

    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    configs: dict[str, dict[str, Any]]
    tied: dict[str, str]

    def __init__(self, found: _Found, known: Layout, bucket_bytes: int, keeps: bool, sha256: bool):
        laid = {name: known.laid_out(weight) for name, weight in found.weights.items()}
        laid |= {name: [entry] for name, entry in found.others.items()}
        contents = Contents(Path(), found.weights, found.others, inputs=found.inputs, kv_scales=found.kv_scales)
        units = {name: [entry for own in found.names[name] for entry in laid[own]] for name in found.names}
        # One unit, as the scales are small.
        units |= {"kv_scales": known.kv_laid_out(contents)} if found.kv_scales else {}
        self.shapes = {e.name: (getattr(torch, e.dtype.name), e.shape) for entries in units.values() for e in entries}
        self.configs = known.configs(contents)
        self.tied = found.tied
        self._buckets = _gather(units, found, bucket_bytes, keeps, sha256)

    def __next__(self) -> WeightBucket:
        with torch.no_grad():
            return next(self._buckets)


def stream_weights(
    model: nn.Module,
    *,
    layout: str,
    quantize: bool = False,
    kv_scales: KVScales | None = None,
    bucket_bytes: int = 1 << 28,
    keep_on: Collection[int] | None = (0,),
    sha256: bool = True,
) -> WeightStream:
    """Gathers a model's weights bucket by bucket in a server's layout, with the trainer's exact codes and scales.

    All ranks must pass the same arguments, take every bucket, and change no weight before the last one. Unsharded weights are
    not copied: their buckets share the model's memory.

    Args:
        model: any module, whole or sharded (FSDP2, tensor or expert parallel). Names are those of its unsharded state dict.
        layout: "compressed-tensors", "fine-grained-fp8" (DeepSeek's), "modelopt" or "mxfp4", as in `blockfp convert`.
        quantize: send weights of layers with weights="high_precision" as the codes that the forward multiplies, instead of
            values. Each rank holds the codes of its shards until the stream ends.
        kv_scales: scales of cached keys and values by the path of an attention, in the last bucket
            (`blockfp.integrations.transformers.observe_kv`).
        bucket_bytes: largest bucket in bytes; exceeded only by a single weight with its scales.
        keep_on: ranks whose buckets hold the tensors; None for all.
        sha256: whether to compute digests, which copies GPU tensors to the host.

    Raises:
        TypeError, ValueError: an argument is invalid or differs among ranks; the layout can't hold a weight's format, shape,
            name or scales; or `quantize` is set and no layer has a format. Nothing is sent then.

    Example:
        >>> for bucket in bfp.stream_weights(model, layout="compressed-tensors"):
        ...     server.load_weights(bucket)
    """
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "keep_on": keep_on, "sha256": sha256}
    return stream_apart(model, None, layout=layout, quantize=quantize, kv_scales=kv_scales, **options)


def stream_apart(
    model: nn.Module,
    apart: Apart | None,
    *,
    layout: str,
    quantize: bool = False,
    kv_scales: KVScales | None = None,
    bucket_bytes: int = 1 << 28,
    keep_on: Collection[int] | None = (0,),
    sha256: bool = True,
) -> WeightStream:
    """Like `stream_weights`, with each tensor split by `apart` into the server's tensors, which share a bucket.

    Experts stored as [experts, in, out] are transposed to the servers' [experts, out, in]; with apart=None they raise
    ValueError.
    """

    instead = codes_of_values("stream_weights", model, quantize)

    def checked() -> tuple[tuple[_Found, Layout], dict[str, Any], dict[str, str]]:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be an integer of 1 or more, got {bucket_bytes!r}")
        world = ranks.rank_and_world(None)[1]
        if keep_on is not None and not set(keep_on) <= set(range(world)):
            raise ValueError(f"keep_on must be ranks of 0..{world - 1}, got {sorted(set(keep_on))}")
        found, known = _found(model, apart, instead), LAYOUTS[layout]
        found.kv_scales.update(kv_entries(kv_scales, model, found.names))
        known.kv_laid_out(Contents(Path(), {}, {}, kv_scales=found.kv_scales))
        _check(found, known)
        settings = {"layout": layout, "quantize": quantize, "bucket_bytes": bucket_bytes}
        settings |= {"the number of tensors in model": len(found.names)}
        settings |= {"kv_scales": sorted((name, *(x.tolist() for x in pair)) for name, pair in (kv_scales or {}).items())}
        described = {f"tensor {i} of model": f"{name}, {found.describe(name)}" for i, name in enumerate(found.names)}
        return (found, known), settings, described

    found, known = ranks.check_alike("stream_weights", checked, None)
    if joined := joined_by_servers(found.local):
        warnings.warn(joined, stacklevel=3)
    keeps = keep_on is None or ranks.rank_and_world(None)[0] in keep_on
    return WeightStream(found, known, bucket_bytes, keeps, sha256)


@dataclass(frozen=True)
class _Found:
    """A model's tensors and how to read them.

    Attributes:
        names: the server's names for each tensor of the model, in state dict order.
        weights, others: quantized weights and plain tensors by the server's name.
        local: quantized weights by the model's name; they read this rank's shard.
        tied: other names of tied tensors, with the first.
        rows: tensors gathered a bucket at a time, by the model's name and part.
        gathered: gathered tensors of the current bucket, removed when read.
        kv_scales: scales of cached keys and values by the server's name of the attention.
        inputs: formats of the inputs of weights by the server's name.
        device: device for tensors that are NumPy arrays so far.
    """

    names: dict[str, list[str]]
    weights: dict[str, Weight]
    local: dict[str, Weight]
    others: dict[str, Entry]
    tied: dict[str, str]
    rows: dict[str, dict[str, Rows]]
    gathered: dict[Key, Tensor]
    kv_scales: dict[str, tuple[Entry, Entry]]
    inputs: dict[str, Format]
    device: torch.device

    def describe(self, name: str) -> str:
        if name in self.local:
            return f"{self.local[name].format} {self.local[name].shape}"
        return " and ".join(f"{self.others[own].dtype} {self.others[own].shape}" for own in self.names[name])


def _found(model: nn.Module, apart: Apart | None, instead: Mapping[int, Tensor]) -> _Found:
    """Describes a model's tensors; `instead` has those to send in place of a parameter, by its id."""
    found = _Found({}, {}, {}, {}, {}, {}, {}, {}, {}, torch.device("cpu"))
    plain = model_names.plain_module(model)
    experts = [module for module in plain.modules() if isinstance(module, Experts) and module.transposed]
    lie_turned = {id(module.get_parameter(name)) for module in experts for name in quantized_names(module)}
    first: dict[int, str] = {}
    device = found.device
    for name, tensor in _tensors(plain):
        if id(tensor) in first:
            named = [name] if apart is None else list(apart(name, torch.empty(tensor.shape, device="meta")))
            found.tied.update(zip(named, found.names[first[id(tensor)]], strict=True))
            continue
        first[id(tensor)] = name
        is_turned, tensor = id(tensor) in lie_turned, instead.get(id(tensor), tensor)
        local = sharding.local_of(tensor)
        if local.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values")
        device = local.device
        if isinstance(local, QuantizedTensor):
            weight, found.local[name] = (_weight(name, tensor, local, one) for one in (found, None))
            if is_turned:
                if apart is None:
                    raise ValueError(
                        f"{name} {list(weight.shape)} is [experts, in, out], but servers read [experts, out, in]: use "
                        "blockfp.integrations.transformers.stream_in_layout"
                    )
                weight = turned(weight)
            made = {name: weight} if apart is None else split_weight(weight, apart)
            found.weights.update(made)
        else:
            entry = _plain(name, tensor, local, found)
            made = {name: entry} if apart is None else split(entry, apart)
            found.others.update(made)
        found.names[name] = list(made)
    formats = input_formats(plain)
    found.inputs.update({own: formats[name] for name, made in found.names.items() if name in formats for own in made})
    return replace(found, device=device)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers by clean name in state dict order, without recipe buffers."""
    clean = model_names.cleaner(model)
    left_out: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, InParts):
            left_out |= {prefix + name for name in state_names(module)}
        buffers = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None and prefix + name not in left_out:
                yield clean(prefix + name), tensor


def _weight(name: str, param: Tensor, local: QuantizedTensor, found: _Found | None) -> Weight:
    """Describes a quantized parameter. Reading a part gathers it; if `found` is None, it reads this rank's shard."""
    stored = {SUFFIXES[part.name]: part for part in stored_parts(param)}
    dtype = dtype_of(dtype_name(local))
    _, *entries = quantized_entries(name, tuple(param.shape), dtype, local.format)

    def reader(part: Part):
        def own() -> Tensor:
            return getattr(local, part.name).detach()

        key = name, part.name
        if found is not None and part.sharded:
            _note_rows(found, key, param, part.shape, own)

        def read() -> Any:
            if found is None:
                value = own()
            else:
                value = found.gathered.pop(key, None)
                value = _whole(param, local, part) if value is None else value
            return value.cpu().numpy() if part.name == "tensor_scale" else value

        return read

    tensors = [Entry(name, entry.dtype, entry.shape, reader(stored[entry.name.removeprefix(name)])) for entry in entries]
    codes, scales, *rest = tensors
    return Weight(name, local.format, tuple(param.shape), dtype, codes, scales, rest[0] if rest else None)


def _whole(param: Tensor, local: QuantizedTensor, part: Part) -> Tensor:
    """Returns a part's whole tensor; collective if the parameter is sharded."""
    own = getattr(local, part.name).detach()
    if sharding.mesh_of(param) is None or part.unit is None:
        return own
    # `gathered` handles parts that no DTensor can describe by a reduction over ranks, which sends more bytes.
    return full_tensor(placed(param, own, part.shape)) if part.sharded else gathered(param, local, part)


def _note_rows(found: _Found, key: Key, param: Tensor, shape: tuple[int, ...], own: Callable[[], Tensor]) -> None:
    rows = rows_of(param, shape, own)
    if rows is not None:
        found.rows.setdefault(key[0], {})[key[1]] = rows


def _plain(name: str, tensor: Tensor, local: Tensor, found: _Found) -> Entry:
    if local.layout is not torch.strided:
        raise ValueError(f"{name} must be dense, got layout {local.layout}")
    own = (local.values if isinstance(local, CastWeight) else local).detach().resolve_neg()
    shape, key = tuple(tensor.shape), (name, "values")
    _note_rows(found, key, tensor, shape, lambda: own)

    def read() -> Any:
        value = found.gathered.pop(key, None)
        return full_tensor(placed(tensor, own, shape)) if value is None else value

    return Entry(name, dtype_of(dtype_name(own)), shape, read)


def _check(found: _Found, known: Layout) -> None:
    """Raises ValueError if the layout can't hold a weight; checks this rank's scales only."""
    if no_release := not_released(found.names):
        raise ValueError(" ".join(no_release))
    for name, weight in found.weights.items():
        problem = known.problem(weight)
        if problem is not None:
            raise ValueError(
                f"{name}: {known.name} {problem}: send it in a layout that has one of {', '.join(LAYOUTS)}, or train it in a "
                f"format that this one has, such as {known.nearest(weight.format)}"
            )
    for name, weight in found.local.items():
        trouble = known.trouble(weight)
        if trouble is not None:
            raise ValueError(f"{name}: {trouble}")
    names = [e.name for weight in found.weights.values() for e in known.laid_out(weight)] + list(found.others)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"{twice[0]} is needed for the codes or scales of another tensor")


def _gather(
    units: Mapping[str, list[Entry]], found: _Found, bucket_bytes: int, keeps: bool, sha256: bool
) -> Iterator[WeightBucket]:
    digests = _Digests() if sha256 else None
    for names in saving.divided(units, bucket_bytes) if units else []:
        together = {(name, part): rows for name in names for part, rows in found.rows.get(name, {}).items()}
        found.gathered.update(gather_rows(together))
        tensors: dict[str, Tensor] = {}
        entries = [entry for name in names for entry in units[name]]
        for entry in entries:
            value: Any = entry.read()
            if keeps:
                if isinstance(value, np.ndarray | np.generic):
                    value = torch.from_numpy(np.asarray(value).reshape(entry.shape)).to(found.device)
                tensors[entry.name] = value.contiguous()
        # A layout may skip some parts; free them.
        found.gathered.clear()
        yield WeightBucket(tensors, digests.of(tensors) if digests else {}, sum(entry.nbytes for entry in entries))


class _Digests:
    """SHA-256 of each bucket's tensors. One host buffer is reused for copies of GPU tensors.

    Fresh memory is mapped page by page, which takes longer than copying and hashing together.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns the hexadecimal digest of each tensor's row-major bytes."""
        flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
        sizes = [0 if each.is_cpu else each.numel() for each in flat.values()]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        places = self._memory[: sum(sizes)].split(sizes)
        # hashlib releases the GIL. Copies stay on this thread, whose current stream produced the tensors.
        with ThreadPoolExecutor(max_workers=_HASHING) as pool:
            sums = [
                pool.submit(hashlib.sha256, (each if each.is_cpu else place.copy_(each)).numpy().data)
                for each, place in zip(flat.values(), places, strict=True)
            ]
            return {name: made.result().hexdigest() for name, made in zip(flat, sums, strict=True)}
