"""The hooks of FSDP2's gather: the parts of a quantized weight that are sent, and the whole that is put together.

    shard (DTensor of QuantizedTensor)        codes [rows of this rank, ..], scales of the blocks that these rows touch
      | send                                  both padded to the length that the plan gives every rank; no copy, where the
      v                                       padding lies behind the short shard already
    FSDP2's all-gather                        uint8 and float32 together, beside the other parameters of the group
      | receive
      v
    whole weight (QuantizedTensor)            codes: the head of what came. Scales too, or one index_select where shards share
                                              blocks, into memory that FSDP2 frees and refills together with the rest

The hooks know nothing of sharding: `plans.gather_weight` says how long the chunks are, and what to take of them.
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
"""The mesh axis over which FSDP2 shards, in the core's plans."""


@dataclass(frozen=True, eq=False)
class WeightGather:
    """One rank's role in the gather of a weight, looked up at every gather in one go.

    Attributes:
        format: of the codes.
        sharding: how the base lies on the shard mesh.
        rank: this rank's position in the shard mesh.
        base: what the shard mesh divides.
        row: where this rank's rows begin in the base.
        rows: how many they are.
        chunks: of codes, scales and maybe tensor scale.
    """

    format: Format
    sharding: Sharding
    rank: int
    base: Base
    row: int
    rows: int
    chunks: tuple[Chunk, ...]


class GatherMetadata(NamedTuple):
    """Data that the hook before the gather passes to the one after it.

    Attributes:
        gather: this rank's role.
        scales: this rank's own. On a shard mesh of one rank FSDP2 passes on the codes alone.
        tensor_scale: likewise.
    """

    gather: WeightGather
    scales: Tensor
    tensor_scale: Tensor | None


class Received(NamedTuple):
    """A whole weight after its first gather.

    Attributes:
        arguments: of `QuantizedTensor`.
        derived: the tensors that FSDP2 is to free and allocate with it.
    """

    arguments: tuple[Any, ...]
    derived: tuple[Tensor, ...]


class GatherHook:
    """A method that FSDP2 calls before a gather, and at every gather asks `inspect.signature` for: it is worked out once."""

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
    """Makes codes, scales and tensor scale of this rank's shard as long as every other rank's.

    Args:
        gather: this rank's role.
        codes: of this rank's rows.
        scales: likewise.
        tensor_scale: of the whole weight, or None.
    """
    parts = (lengthened(gather.chunks[0], codes), lengthened(gather.chunks[1], scales))
    if tensor_scale is not None:
        parts = (*parts, tensor_scale.view(1))
    return parts, GatherMetadata(gather, scales, tensor_scale)


def receive(gathered: tuple[Tensor, ...], metadata: GatherMetadata, dtype: torch.dtype, out: Tensor | None) -> Received | None:
    """Puts the whole weight together from the chunks of every rank.

    Args:
        gathered: the chunks of all ranks one after another, for each tensor that `send` gave.
        metadata: from `send`.
        dtype: the nominal dtype of the result.
        out: the weight made the first time, whose memory FSDP2 has refilled; None the first time.

    Returns:
        The weight the first time, then None.
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
    """Scales and tensor scale if FSDP2 doesn't refill them, since they are no heads of gathered memory; else None."""
    if len(gathered) == 1:
        return metadata.scales, metadata.tensor_scale
    index = _scales_index(metadata.gather, gathered[1].device)
    return (None if index is None else gathered[1].index_select(0, index)), None


@lru_cache(maxsize=4096)
def _scales_index(gather: WeightGather, device: torch.device) -> Tensor | None:
    return index_of(gather.chunks[1], device)


def _refill(out: Tensor, own: tuple[Tensor | None, Tensor | None]) -> None:
    """Writes scales and tensor scale into those of the whole weight."""
    for name, values in zip(("scales", "tensor_scale"), own, strict=True):
        if values is not None:
            into = getattr(local_of(out), name)
            # Autograd may have saved it. To it this is memory that FSDP2 refills, which counts no version either.
            with keeping_version(into):
                into.copy_(values)


def weight_gather(format: Format, shape: torch.Size, geometry: Geometry, world: int, rank: int) -> WeightGather:
    """A shard's role in the gather over the one-dimensional mesh over which FSDP shards.

    Args:
        format: of its codes.
        shape: of the shard.
        geometry: where it lies.
        world, rank: the mesh's length, and this rank's number in it (`sharding.place_on`).

    Raises:
        ValueError: it isn't what `fully_shard` puts on this rank.
    """
    base = geometry.base
    if base is None:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} doesn't know what it is a shard of: use fully_shard, which divides the whole "
            "weight, instead of building a DTensor of shards"
        )
    found = _weight_gather(format, base.shape, base.origin, world, rank)
    row = base.origin[0] + (found.row if len(shape) == 2 else 0)
    if shape[0] != found.rows or (found.rows and geometry.origin not in (None, (row, base.origin[1]))):
        raise ValueError(
            f"rank {rank} of {world} must hold {found.rows} rows from row {row} of a weight of shape {base.shape}, got "
            f"{shape[0]} rows at {geometry.start}: shards must be those of fully_shard, on dim 0"
        )
    return found


# Of tuples, which hash and compare without entering Python.
@lru_cache(maxsize=4096)
def _weight_gather(format: Format, shape: tuple[int, ...], origin: Origin, world: int, rank: int) -> WeightGather:
    sharding = Sharding(shape, Mesh((world,), (AXIS,)), (Shard(0),))
    chunks = rank_plan(plans.gather_weight(format, sharding, (AXIS,), origin=origin), rank).chunks
    assert not chunks[0].take, "shards by torch's chunk rule lie one after another"
    return WeightGather(format, sharding, rank, Base(shape, origin), *sharding.span(0, rank), chunks)
