"""Pads tensors before an all-gather and joins the ranks' chunks after it.

Operands of products are gathered here, all tensors in one asynchronous collective. FSDP2 gathers weights itself, between
`lengthened` and `index_of` (`quantized_tensor.fsdp`).
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
    """Pads codes, scales and tensor scale (or values) to the chunk length that every rank sends."""
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
    """Starts one all-gather for all tensors from `padded`; `join` takes the result."""
    return collectives.all_gather_into_tensor_coalesced(list(tensors), shard.ranks, shard.group)


def join(plan: RankPlan, shard: TensorParallelShard, received: Sequence[Tensor]) -> list[Tensor]:
    """Waits for all ranks' chunks and joins them. Equal row shards are contiguous already and not copied."""
    waited = [collectives.wait_tensor(tensor) for tensor in received]
    return [_joined(chunk, shard.ranks, tensor) for chunk, tensor in zip(plan.chunks, waited, strict=True)]


def gather(plan: RankPlan, shard: TensorParallelShard, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pads, gathers and joins without overlapping work."""
    return join(plan, shard, start(shard, padded(plan, tensors)))


def _joined(chunk: Chunk, ranks: int, tensor: Tensor) -> Tensor:
    dim, total = chunk.dim, ranks * chunk.runs * chunk.length
    if chunk.as_bytes:
        # An empty tensor's strides may not allow a view as float32.
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
    """Returns the tensor at the chunk's length: extended into the memory after it if there is enough, else zero-padded."""
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
    """Returns the index of each result entry in the concatenated chunks, int32 [size]; None if the result is their head."""
    if not chunk.take or chunk.take == ((0, 0, chunk.size),):
        return None
    return torch.from_numpy(Join(chunk.length, *np.array(chunk.take).T).index).to(device)
