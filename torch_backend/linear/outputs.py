"""Outputs of products whose contracted axis is cut over a tensor-parallel group: terms, to be summed over its ranks.

    y = sum of the ranks' terms [rows, columns]
    all_reduce       the whole sum on every rank
    reduce_scatter   of each sequence, every rank gets its rows of the sum

Sums are begun early and waited for late, like the gathers of `sharded`. As an option the terms of a reduce-scatter travel
quantized: each rank sends every other its rows as codes and scales, which are dequantized and added in fp32, in the order of
the ranks. That rounds each term once to the format, so it is asked for by name (`reduce_format`) and never chosen.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.definition import layout
from blockfp.formats import Format

from ..custom_ops import ops
from ..sharded.rank_plan import TensorParallelShard
from ..torch_internals import functional_collectives as collectives


class PendingSum(NamedTuple):
    """A sum over ranks, while it is made.

    Attributes:
        received: memory that the collective writes; not to be read before `finish`.
        rows: of the result.
        chunk: rows of one sequence that every rank gets, padding included.
    """

    received: Tensor
    rows: int
    chunk: int


def all_reduce(y: Tensor, group: str) -> Tensor:
    """Sums y over the group's ranks, in its dtype; y is left as it is."""
    return collectives.wait_tensor(collectives.all_reduce(y.contiguous(), "sum", group))


def begin(y: Tensor, to: TensorParallelShard | str, format: Format | None = None) -> PendingSum:
    """Begins a reduce-scatter of y's rows, or an all-reduce.

    Args:
        y: this rank's terms [rows of all sequences, columns].
        to: where the rows of the result lie, cut along rows; or the name of the group every rank of which gets all.
        format: in which the terms of a reduce-scatter travel, see `reducing.check_reduce_format`.
    """
    if isinstance(to, str):
        return PendingSum(collectives.all_reduce(y.contiguous(), "sum", to), y.shape[0], y.shape[0])
    shard, rows, columns = to, operator.index(y.shape[0]), operator.index(y.shape[1])
    length = rows // shard.runs
    chunk = -(-length // shard.ranks)
    own = max(0, min(chunk, length - shard.rank * chunk))
    terms = y.reshape(shard.runs, length, columns)
    if chunk * shard.ranks != length:
        terms = F.pad(terms, (0, 0, 0, chunk * shard.ranks - length))
    # Rows in the order of the ranks that they go to.
    terms = (
        terms.view(shard.runs, shard.ranks, chunk, columns).transpose(0, 1).reshape(shard.ranks * shard.runs * chunk, columns)
    )
    if format is None or not rows:
        sums = collectives.reduce_scatter_tensor(terms, "sum", shard.ranks, shard.group)
        return PendingSum(sums, shard.runs * own, chunk)
    # Codes saturate an Inf, which a loss scaler is to see.
    terms = torch.where(terms.isinf(), torch.full_like(terms, torch.nan), terms)
    codes, scales = ops.quantize(terms, format.name)
    sent = torch.cat([part.view(shard.ranks, -1).view(torch.uint8) for part in (codes, scales)], 1)
    sizes = [1] * shard.ranks
    return PendingSum(collectives.all_to_all_single(sent, sizes, sizes, shard.group), shard.runs * own, chunk)


def finish(
    pending: PendingSum, to: TensorParallelShard | str, columns: int, dtype: torch.dtype, format: Format | None = None
) -> Tensor:
    """Waits for the sum, or for this rank's rows of it, and returns it, [rows, columns] in `dtype`."""
    received = collectives.wait_tensor(pending.received)
    if isinstance(to, str):
        return received.to(dtype)
    shard = to
    rows = shard.runs * pending.chunk
    if format is not None and rows:
        codes_size = rows * layout.packed_columns(columns, format.element.bits)
        codes = received[:, :codes_size].reshape(shard.ranks * rows, -1)
        scale_dtype = getattr(torch, format.scale.dtype)
        scales = received[:, codes_size:].contiguous().view(scale_dtype).view(shard.ranks * rows, -1)
        terms = ops.dequantize(codes, scales, None, format.name, torch.float32, columns, [0, 0]).view(
            shard.ranks, rows, columns
        )
        received = terms[0]
        for rank in range(1, shard.ranks):
            received = received + terms[rank]
    received = received.to(dtype)
    if pending.rows == rows:
        return received
    own = pending.rows // shard.runs
    return received.view(shard.runs, pending.chunk, columns)[:, :own].reshape(pending.rows, columns)
