"""The two halves of a gather: chunks of one length are sent, and chunks of all ranks are joined.

Operands of products are sent and received here, all tensors in one collective that is begun early and waited for late. FSDP2
sends and receives weights itself, between `lengthened` and `index_of` (`quantized_tensor.fsdp`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.sharding.steps import Join

from ..torch_internals import functional_collectives as collectives
from .rank_plan import ROWS, Chunk, RankPlan, TensorParallelShard


def padded(plan: RankPlan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pads codes, scales and tensor scale (or the values) to the length that every rank sends."""
    sent = [_padded(chunk, tensor) for chunk, tensor in zip(plan.chunks, tensors, strict=True)]
    return [tensor.view(torch.uint8) if chunk.as_bytes else tensor for chunk, tensor in zip(plan.chunks, sent, strict=True)]


def _padded(chunk: Chunk, tensor: Tensor) -> Tensor:
    if tensor.ndim == 0:
        return tensor.view(1)
    missing = chunk.length - chunk.own
    if not missing:
        return tensor.contiguous()
    rows, columns = tensor.shape
    if chunk.dim == ROWS:
        runs = F.pad(tensor.reshape(chunk.runs, chunk.own, columns), (0, 0, 0, missing))
        return runs.view(chunk.runs * chunk.length, columns)
    return F.pad(tensor.reshape(rows, chunk.runs, chunk.own), (0, missing)).view(rows, chunk.runs * chunk.length)


def start(shard: TensorParallelShard, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Begins the all-gather of tensors from `padded`, all in one collective; `join` takes the result."""
    return collectives.all_gather_into_tensor_coalesced(list(tensors), shard.ranks, shard.group)


def join(plan: RankPlan, shard: TensorParallelShard, received: Sequence[Tensor]) -> list[Tensor]:
    """Waits for the chunks of all ranks and joins them. Equal parts of rows are together already, and not copied."""
    waited = [collectives.wait_tensor(tensor) for tensor in received]
    return [_joined(chunk, shard.ranks, tensor) for chunk, tensor in zip(plan.chunks, waited, strict=True)]


def gather(plan: RankPlan, shard: TensorParallelShard, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pads, gathers and joins at once, where there is nothing to do meanwhile."""
    return join(plan, shard, start(shard, padded(plan, tensors)))


def _joined(chunk: Chunk, ranks: int, tensor: Tensor) -> Tensor:
    dim, total = chunk.dim, ranks * chunk.runs * chunk.length
    if chunk.as_bytes:
        # A tensor without elements may have strides that don't allow a view as float32.
        tensor = tensor.view(torch.float32) if tensor.numel() else tensor[:, ::4].float()
    if tensor.ndim == 1:
        ((source, _, _),) = chunk.take
        return tensor[source]
    if dim == ROWS:
        columns = tensor.shape[1]
        tensor = tensor.view(ranks, chunk.runs, chunk.length, columns).transpose(0, 1).reshape(total, columns)
    else:
        rows = tensor.shape[0] // ranks
        tensor = tensor.view(ranks, rows, chunk.runs, chunk.length).permute(1, 2, 0, 3).reshape(rows, total)
    if chunk.take:
        pieces = [tensor.narrow(dim, source * chunk.length + first, last - first) for source, first, last in chunk.take]
        return torch.cat(pieces, dim)
    return tensor if chunk.size == total else tensor.narrow(dim, 0, chunk.size).contiguous()


def lengthened(chunk: Chunk, tensor: Tensor) -> Tensor:
    """Returns the tensor at the chunk's length: with the memory behind it where that is there, else with zeros."""
    length = chunk.length
    if tensor.shape[0] == length and tensor.is_contiguous():
        return tensor
    end = tensor.storage_offset() + length * tensor.stride(0)
    if tensor.is_contiguous() and end * tensor.itemsize <= tensor.untyped_storage().nbytes():
        return tensor.as_strided((length, *tensor.shape[1:]), tensor.stride())
    longer = tensor.new_zeros((length, *tensor.shape[1:]))
    longer[: tensor.shape[0]] = tensor
    return longer


def index_of(chunk: Chunk, device: torch.device) -> Tensor | None:
    """Index of each entry of the result in the chunks of all ranks laid end to end, int32 [size]; None for their head."""
    if not chunk.take or chunk.take == ((0, 0, chunk.size),):
        return None
    return torch.from_numpy(Join(chunk.length, *np.array(chunk.take).T).index).to(device)
