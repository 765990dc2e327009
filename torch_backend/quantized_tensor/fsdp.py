"""Hooks of FSDP2's all-gather: sends the parts of a quantized weight's shard and assembles the whole weight.

    shard (DTensor of QuantizedTensor)        codes [rows of this rank, ..], scales of the blocks that these rows touch
      | send                                  pads both to the common chunk length; no copy if the shard's memory already
      v                                       has the padding after it
    FSDP2's all-gather                        uint8 and float32 together with the group's other parameters
      | receive
      v
    whole weight (QuantizedTensor)            codes are the head of the gathered buffer. So are scales, or one index_select if
                                              shards share blocks, into memory that FSDP2 frees and refills with the rest

`plans.gather_weight` computes the chunk lengths and which elements to take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Shard, Sharding

from ..sharded.gather import index_of, lengthened
from ..sharded.rank_plan import Chunk, rank_plan
from ..torch_internals import keeping_version
from .geometry import Base, Geometry, Origin
from .sharding import local_of

AXIS = "fsdp"
"""Name of FSDP2's shard axis in the core's plans."""


@dataclass(frozen=True, eq=False)
class WeightGather:
    """One rank's role in the gather of a weight, cached as a whole because every gather needs it.

    Attributes:
        format: of the codes.
        sharding: sharding of the base on the shard mesh.
        rank: this rank's position in the shard mesh.
        base: the tensor that the shard mesh divides.
        row: first row of this rank in the base.
        rows: number of this rank's rows.
        chunks: of codes, scales and, if present, the tensor scale.
    """

    format: Format
    sharding: Sharding
    rank: int
    base: Base
    row: int
    rows: int
    chunks: tuple[Chunk, ...]


class GatherMetadata(NamedTuple):
    """Passed from the pre-gather to the post-gather hook.

    Attributes:
        gather: this rank's role.
        scales: this rank's scales; on a shard mesh of one rank FSDP2 passes on only the codes.
        tensor_scale: likewise.
    """

    gather: WeightGather
    scales: Tensor
    tensor_scale: Tensor | None


class Received(NamedTuple):
    """Constructor arguments of the whole weight after its first gather, and derived tensors that FSDP2 frees and allocates with
    it.
    """

    arguments: tuple[Any, ...]
    derived: tuple[Tensor, ...]


class GatherHook:
    """A hook method with a cached signature, since FSDP2 calls `inspect.signature` on it at every gather."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.signature = inspect.Signature(list(inspect.signature(function).parameters.values())[1:])
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        if instance is None:
            return self.function
        bound = partial(self.function, instance)
        setattr(bound, "__signature__", self.signature)  # noqa: B010
        return bound


def send(
    gather: WeightGather, codes: Tensor, scales: Tensor, tensor_scale: Tensor | None
) -> tuple[tuple[Tensor, ...], GatherMetadata]:
    """Pads this rank's codes and scales to the chunk length that all ranks share; the tensor scale becomes [1]."""
    parts = (lengthened(gather.chunks[0], codes), lengthened(gather.chunks[1], scales))
    if tensor_scale is not None:
        parts = (*parts, tensor_scale.view(1))
    return parts, GatherMetadata(gather, scales, tensor_scale)


def receive(gathered: tuple[Tensor, ...], metadata: GatherMetadata, dtype: torch.dtype, out: Tensor | None) -> Received | None:
    """Assembles the whole weight from all ranks' chunks.

    `gathered` has one concatenation for each tensor from `send`. The first call (out=None) returns the weight, of nominal dtype
    `dtype`; later calls refill `out`, whose memory FSDP2 has refilled, and return None.
    """
    own = _own_memory(gathered, metadata)
    if out is not None:
        _refill(out, own)
        return None
    gather = metadata.gather
    codes = gathered[0][: gather.base.shape[0]]
    scales, tensor_scale = (None if values is None else values.clone() for values in own)
    derived = tuple(values for values in (scales, tensor_scale) if values is not None)
    if scales is None:
        scales = gathered[1][: gather.chunks[1].size]
    if tensor_scale is None and len(gathered) > 2:
        ((source, _, _),) = gather.chunks[2].take
        tensor_scale = gathered[2][source]
    geometry = Geometry(gather.base.origin, gathered=True)
    return Received((codes, scales, tensor_scale, gather.format, gather.base.shape[-1], dtype, geometry), derived)


def _own_memory(gathered: tuple[Tensor, ...], metadata: GatherMetadata) -> tuple[Tensor | None, Tensor | None]:
    """Returns scales and tensor scale if FSDP2 doesn't refill them, since they aren't views of gathered memory; else None."""
    if len(gathered) == 1:
        return metadata.scales, metadata.tensor_scale
    index = _scales_index(metadata.gather, gathered[1].device)
    return (None if index is None else gathered[1].index_select(0, index)), None


@lru_cache(maxsize=4096)
def _scales_index(gather: WeightGather, device: torch.device) -> Tensor | None:
    return index_of(gather.chunks[1], device)


def _refill(out: Tensor, own: tuple[Tensor | None, Tensor | None]) -> None:
    """Copies scales and tensor scale into the whole weight's."""
    for name, values in zip(("scales", "tensor_scale"), own, strict=True):
        if values is not None:
            into = getattr(local_of(out), name)
            # Autograd may have saved it. FSDP2's own refills don't count versions either.
            with keeping_version(into):
                into.copy_(values)


def weight_gather(format: Format, shape: torch.Size, geometry: Geometry, world: int, rank: int) -> WeightGather:
    """Returns a shard's role in the gather over FSDP's one-dimensional mesh of `world` ranks.

    Raises ValueError unless the shard is the one that `fully_shard` puts on this rank.
    """
    base = geometry.base
    if base is None:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} doesn't know its position in the whole: use fully_shard, which divides "
            "the whole weight, instead of building a DTensor from shards"
        )
    found = _weight_gather(format, base.shape, base.origin, world, rank)
    row = base.origin[0] + (found.row if len(shape) == 2 else 0)
    if shape[0] != found.rows or (found.rows and geometry.origin not in (None, (row, base.origin[1]))):
        raise ValueError(
            f"rank {rank} of {world} must hold {found.rows} rows from row {row} of a weight of shape {base.shape}, got "
            f"{shape[0]} rows at {geometry.start}: shards must come from fully_shard, on dim 0"
        )
    return found


# Cached by tuples, which hash and compare without calling Python.
@lru_cache(maxsize=4096)
def _weight_gather(format: Format, shape: tuple[int, ...], origin: Origin, world: int, rank: int) -> WeightGather:
    sharding = Sharding(shape, Mesh((world,), (AXIS,)), (Shard(0),))
    chunks = rank_plan(plans.gather_weight(format, sharding, (AXIS,), origin=origin), rank).chunks
    assert not chunks[0].take, "shards by torch's chunk rule lie one after another"
    return WeightGather(format, sharding, rank, Base(shape, origin), *sharding.span(0, rank), chunks)
