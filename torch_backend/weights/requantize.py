"""Quantizing shards so that they are the shards of the quantized whole, in place: after an optimizer step, or on loading.

`plans.quantize_shards` says which amaxes to reduce over which mesh axes; here that is carried out for many parameters at once,
with one collective for all that go over the same axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockfp.definition import numerics
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rounding import Key
from blockfp.sharding import plans
from blockfp.sharding.placement import Region
from blockfp.sharding.steps import Quantize, Straddle, grid_span

from ..custom_ops import cuda
from ..custom_ops.collectives import max_reduce_together
from ..custom_ops.ops import kernels_for, name_of
from ..quantized_tensor import sharding
from ..quantized_tensor.geometry import COPIED
from ..quantized_tensor.tensor import QuantizedTensor


def requantize_(params: Sequence[Tensor], values: Sequence[Tensor], *, keys: Sequence[Key | None] | None = None) -> None:
    """Writes the quantization of new values into quantized parameters, as if each whole parameter were quantized at once.

    Codes and scales are written in place, into the memory that the next gather reads. A parameter's `initial` is dropped, since
    it no longer belongs to its codes. Every rank that holds a part of a parameter must call it, with parameters in the same
    order, also where its part is empty.

    Args:
        params: quantized tensors, or DTensors of them.
        values: float32, float16 or bfloat16; for each parameter what this rank holds of it, as a local tensor or as a DTensor
            placed alike.
        keys: for each parameter None, or a key for stochastic rounding.

    Raises:
        TypeError: a parameter is not quantized.
        ValueError: values don't fit their parameter; or it is FSDP's gathered copy (call `reshard()` of its FSDPModule first).
    """
    keys = [None] * len(params) if keys is None else keys
    todo = [_parameter(param, value, key) for param, value, key in zip(params, values, keys, strict=True)]
    with torch.no_grad():
        for one, amax in zip(todo, reduced_amaxes(todo), strict=True):
            q, region = one.local, one.region
            ours = Quantized(q.codes, q.scales, q.tensor_scale)
            kernels = kernels_for(one.values)
            options = {
                "key": one.key,
                "nominal": name_of(q.dtype),
                "origin": region.origin,
                "shape": one.step.sharding.shape[-2:],
                "amax": amax,
            }
            if kernels is cuda and all(part is None or part.is_contiguous() for part in ours):
                cuda.quantize(one.values, q.format, **options, out=ours)
            else:
                for part, new in zip(ours, kernels.quantize(one.values, q.format, **options), strict=True):
                    if part is not None:
                        part.copy_(new)
            q.initial = None


def amaxes(params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Amax]:
    """The amaxes of this rank's blocks (and of the whole tensor), reduced over all ranks that share them.

    The first half of `requantize_`, whose arguments and errors these are.
    """
    with torch.no_grad():
        return reduced_amaxes([_parameter(param, value, None) for param, value in zip(params, values, strict=True)])


@dataclass(frozen=True)
class Work:
    """Values to be quantized on this rank.

    Attributes:
        values: what this rank holds.
        step: the plan's step.
        region: where the values lie in the whole array.
        group: from a mesh axis to the name of its process group.
    """

    values: Tensor
    step: Quantize
    region: Region
    group: Callable[[str], str]


@dataclass(frozen=True)
class _Parameter(Work):
    local: QuantizedTensor
    key: Key | None


def _parameter(param: Tensor, values: Tensor, key: Key | None) -> _Parameter:
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"params must hold quantized tensors, got {type(local).__name__} of {local.dtype}")
    if local.geometry.gathered:
        raise ValueError(
            "params: this is FSDP's gathered copy of a sharded weight, which the next reshard throws away: call reshard() on "
            "its FSDPModule, then take the parameter"
        )
    if local.geometry.copied is not None:
        raise ValueError(f"params: {COPIED}")
    if sharding.mesh_of(values) is not None and not sharding.placed_alike(values, param):
        raise ValueError(
            f"values must be placed like their parameter, {sharding.sharding_of(param)}, got {sharding.sharding_of(values)}: "
            "redistribute them first"
        )
    lies = sharding.sharding_of(param)
    values, region = sharding.local_of(values), sharding.region_of(param, lies)
    if sharding.mesh_of(param) is None:
        region = Region((*region.start[:-2], *local.origin), region.shape)
    if local.origin != region.origin and not region.empty:
        raise ValueError(
            f"a parameter that lies {lies} begins at {region.origin} on this rank, but its local tensor says {local.origin}"
        )
    if tuple(values.shape) != region.shape or values.device != local.device:
        raise ValueError(
            f"values must be of shape {region.shape} on {local.device}, as this rank's part of the parameter, got "
            f"{tuple(values.shape)} on {values.device}"
        )
    numerics.check_input(values)
    (step,) = plans.quantize_shards(local.format, lies, stochastic=key is not None).steps
    assert isinstance(step, Quantize)
    return _Parameter(values.detach(), step, region, lambda axis: sharding.group_name(param, axis), local, key)


def reduced_amaxes(todo: Sequence[Work]) -> list[Amax]:
    """The amaxes of each array, reduced as its step says: one collective for all that go over the same groups.

    Rows come first, then columns, because a block may straddle both ways. An amax of a whole tensor is reduced with the rows.
    """
    partial = [kernels_for(one.values).amax(one.values, one.step.format, origin=one.region.origin) for one in todo]
    found = [Amax(amax.blocks, amax.nan, amax.tensor) for amax in partial]
    rounds = max((len(one.step.straddles) for one in todo), default=0)
    for turn in range(max(rounds, 1)):
        exchange = _Exchange()
        for i, one in enumerate(todo):
            if turn < len(one.step.straddles):
                _put_straddling(exchange, found, i, one, one.step.straddles[turn])
            if turn == 0 and one.step.amax_axes:
                field = "tensor" if one.step.format.scale.two_level else "blocks"
                _put_whole(exchange, found, i, one, field)
        exchange.run()
    return found


class _Exchange:
    """Tensors to be max-reduced, collected by the groups they go over, and what to do with what comes back."""

    def __init__(self):
        self.waiting: dict[tuple[str, ...], list[tuple[Tensor, Callable[[Tensor], None]]]] = {}

    def add(self, tensor: Tensor, groups: tuple[str, ...], store: Callable[[Tensor], None]) -> None:
        self.waiting.setdefault(groups, []).append((tensor, store))

    def run(self) -> None:
        for groups, entries in self.waiting.items():
            reduced = max_reduce_together([tensor for tensor, _ in entries], groups)
            for (_, store), tensor in zip(entries, reduced, strict=True):
                store(tensor)


def _put_whole(exchange: _Exchange, found: list[Amax], i: int, one: Work, field: str) -> None:
    def store(tensor: Tensor) -> None:
        found[i] = found[i]._replace(**{field: tensor})

    exchange.add(getattr(found[i], field), tuple(map(one.group, one.step.amax_axes)), store)


def _put_straddling(exchange: _Exchange, found: list[Amax], i: int, one: Work, straddle: Straddle) -> None:
    dim = straddle.dim
    first, count = grid_span(one.step.format, one.region, dim)
    held = [(entry, block - first) for entry, block in enumerate(straddle.blocks) if first <= block < first + count]
    for field in ("blocks", "nan"):
        own: Tensor | None = getattr(found[i], field)
        if own is None:
            continue
        shape = list(own.shape)
        shape[dim] = len(straddle.blocks)
        buffer = own.new_zeros(shape)
        for entry, place in held:
            buffer.select(dim, entry).copy_(own.select(dim, place))

        def store(tensor: Tensor, own: Tensor = own) -> None:
            for entry, place in held:
                own.select(dim, place).copy_(tensor.select(dim, entry))

        exchange.add(buffer, tuple(map(one.group, straddle.axes)), store)
