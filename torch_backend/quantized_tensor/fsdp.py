"""What FSDP2 gathers of a quantized weight, and how the whole weight is put together from it.

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
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.steps import Gather

from .geometry import Base, Geometry
from .sharding import local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's share in the gather of a weight: what the plan says of it, looked up at every gather in one go.

    Attributes:
        gather: the plan's step.
        rank: this rank's position in the shard mesh.
        base: what the shard mesh divides.
        row, rows: where this rank's rows begin in the base, and how many they are.
        codes_chunk, scales_chunk: rows of codes and of scales that every rank sends.
        scales_size: rows of scales that the whole weight has.
        index: int32, where these lie in what all ranks sent; None where they come first, one after another.
        first: position of the rank whose tensor scale counts.
    """

    gather: Gather
    rank: int
    base: Base
    row: int
    rows: int
    codes_chunk: int
    scales_chunk: int
    scales_size: int
    index: np.ndarray | None
    first: int


class Sent(NamedTuple):
    """What the hook before the gather tells the one after it.

    Attributes:
        share: this rank's.
        scales, tensor_scale: this rank's own. On a shard mesh of one rank FSDP2 passes on the codes alone.
    """

    share: Share
    scales: Tensor
    tensor_scale: Tensor | None


def keeping_signature(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with its signature worked out: FSDP2 asks `inspect.signature` for it at every gather."""
    setattr(hook, "__signature__", inspect.signature(hook))  # noqa: B010
    return hook


def send(share: Share, codes: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> tuple[tuple[Tensor, ...], Sent]:
    """Codes, scales and tensor scale of this rank's shard, as long as every other rank's.

    Args:
        share: this rank's.
        codes, scales, tensor_scale: of this rank's rows.
    """
    parts = (_lengthened(codes, share.codes_chunk), _lengthened(scales, share.scales_chunk))
    if tensor_scale is not None:
        parts = (*parts, tensor_scale.view(1))
    return parts, Sent(share, scales, tensor_scale)


def receive(
    gathered: tuple[Tensor, ...], sent: Sent, dtype: torch.dtype, out: Tensor | None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """The whole weight of what every rank sent.

    Args:
        gathered: the chunks of all ranks one after another, for each tensor that `send` gave.
        sent: what `send` said.
        dtype: the nominal dtype of the result.
        out: the weight made the first time, whose memory FSDP2 has refilled; None the first time.

    Returns:
        The first time the weight, and the tensors that FSDP2 is to free and allocate with it; then None.

    Raises:
        ValueError: FSDP2 is to reshard the weight to a smaller mesh after the forward.
    """
    from .tensor import QuantizedTensor

    own = _own_memory(gathered, sent)
    if out is not None:
        _refill(out, own)
        return None
    _refuse_smaller_mesh()
    share = sent.share
    assert share.gather.format is not None
    codes = gathered[0][: share.base.shape[0]]
    scales, tensor_scale = (None if values is None else values.clone() for values in own)
    derived = tuple(values for values in (scales, tensor_scale) if values is not None)
    if scales is None:
        scales = gathered[1][: share.scales_size]
    if tensor_scale is None and len(gathered) > 2:
        tensor_scale = gathered[2][share.first]
    geometry = Geometry(share.base.origin, gathered=True)
    return QuantizedTensor(codes, scales, tensor_scale, share.gather.format, share.base.shape[-1], dtype, geometry), derived


def _own_memory(gathered: tuple[Tensor, ...], sent: Sent) -> tuple[Tensor | None, Tensor | None]:
    """Scales and tensor scale where they are no heads of what was gathered, and so aren't refilled with it; else None."""
    if len(gathered) == 1:
        return sent.scales, sent.tensor_scale
    if sent.share.index is None:
        return None, None
    return gathered[1].index_select(0, _index(sent.share, gathered[1].device)), None


def _refill(out: Tensor, own: tuple[Tensor | None, Tensor | None]) -> None:
    """Writes scales and tensor scale into those of the whole weight."""
    for name, values in zip(("scales", "tensor_scale"), own, strict=True):
        if values is not None:
            into = getattr(local_of(out), name)
            # Autograd may have saved it. To it this is memory that FSDP2 refills, which counts no version either.
            with torch.autograd._unsafe_preserve_version_counter(into):  # pyright: ignore[reportPrivateImportUsage]
                into.copy_(values)


def share(format: Format, shape: torch.Size, geometry: Geometry, mesh: DeviceMesh) -> Share:
    """A shard's share in the gather over the one-dimensional mesh over which FSDP shards.

    Raises:
        ValueError: it isn't what `fully_shard` puts on this rank.
    """
    world, rank, base = mesh.size(), mesh.get_local_rank(), geometry.base
    if base is None:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} doesn't know what it is a shard of: use fully_shard, which divides the whole "
            "weight, instead of building a DTensor of shards"
        )
    found = _share(format, base, world, rank)
    row = base.origin[0] + (found.row if len(shape) == 2 else 0)
    if shape[0] != found.rows or (found.rows and geometry.origin not in (None, (row, base.origin[1]))):
        raise ValueError(
            f"rank {rank} of {world} must hold {found.rows} rows from row {row} of a weight of shape {base.shape}, got "
            f"{shape[0]} rows at {geometry.start}: shards must be those of fully_shard, on dim 0"
        )
    return found


@lru_cache(maxsize=4096)
def _share(format: Format, base: Base, world: int, rank: int) -> Share:
    sharding = Sharding(base.shape, Mesh((world,), ("fsdp",)), (Shard(0),))
    (gather,) = plans.gather_weight(format, sharding, ("fsdp",), origin=base.origin).steps
    assert isinstance(gather, Gather)
    assert gather.elements(rank).head, "shards by torch's chunk rule lie one after another"
    scales = gather.scales(rank)
    chunks = (gather.stored(rank).chunk, scales.chunk)
    index = None if scales.head else scales.index
    return Share(gather, rank, base, *sharding.span(0, rank), *chunks, scales.size, index, gather.first(rank))


@lru_cache(maxsize=4096)
def _index(share: Share, device: torch.device) -> Tensor:
    return torch.from_numpy(share.index).to(device)


def _lengthened(part: Tensor, length: int) -> Tensor:
    """The tensor with anything behind it up to this length: what lies there in its memory, or zeros."""
    if part.shape[0] == length and part.is_contiguous():
        return part
    end = part.storage_offset() + length * part.stride(0)
    if part.is_contiguous() and end * part.itemsize <= part.untyped_storage().nbytes():
        return part.as_strided((length, *part.shape[1:]), part.stride())
    longer = part.new_zeros((length, *part.shape[1:]))
    longer[: part.shape[0]] = part
    return longer


def _refuse_smaller_mesh() -> None:
    """Raises ValueError where the parameter being gathered is to be resharded to a smaller mesh after the forward.

    FSDP2 keeps one plain tensor of such a parameter, and its hooks aren't told. So its own bookkeeping is looked up, where it
    can be found; elsewhere FSDP2 itself fails after the forward, and says "Expected 1 all_gather_output".
    """
    frame = sys._getframe(1)
    for _ in range(4):
        holder: Any = frame.f_locals.get("self")
        smaller, mesh = getattr(holder, "post_forward_mesh_info", None), getattr(holder, "mesh_info", None)
        if smaller is not None and mesh is not None:
            ranks = getattr(smaller, "shard_mesh_size", None)
            if ranks != getattr(mesh, "shard_mesh_size", None):
                raise ValueError(
                    f"reshard_after_forward={ranks}: FSDP2 can't reshard a quantized weight to a smaller mesh; use "
                    "reshard_after_forward=True or False"
                )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
