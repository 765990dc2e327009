"""Sums the ranks' terms of a product whose contracted axis is sharded over a tensor-parallel group.

    y = sum of the ranks' terms [rows, columns]
        all_reduce       every rank gets the whole sum
        reduce_scatter   every rank gets its rows of each sequence

Sums are asynchronous, like the gathers of `sharded`. Optionally a reduce-scatter sends quantized terms: each rank sends every
other its rows as codes and scales, which are dequantized and added in fp32, in rank order. Since that rounds each term once to
the format, it only happens on request (`reduce_format`).
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.definition import layout
from blockfp.formats import Format

from ...ops import dequantize_plans
from ...sharded.rank_plan import TensorParallelShard
from ...torch_internals import functional_collectives as collectives


class PendingSum(NamedTuple):
    """A sum over ranks in progress.

    Attributes:
        received: memory that the collective writes; don't read it before `finish`.
        rows: rows of the result.
        chunk: rows of one sequence that every rank gets, including padding.
    """

    received: Tensor
    rows: int
    chunk: int


def all_reduce(y: Tensor, group: str) -> Tensor:
    """Returns the sum of y over the group's ranks, in its dtype; y is unchanged."""
    return collectives.wait_tensor(collectives.all_reduce(y.contiguous(), "sum", group))


def begin(y: Tensor, to: TensorParallelShard | str, format: Format | None = None) -> PendingSum:
    """Starts a reduce-scatter of y's rows [rows of all sequences, columns], or an all-reduce if `to` is a group's name.

    `format` is the format of a reduce-scatter's terms, see `reducing.check_reduce_format`.
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
    # Rows ordered by destination rank.
    terms = (
        terms.view(shard.runs, shard.ranks, chunk, columns).transpose(0, 1).reshape(shard.ranks * shard.runs * chunk, columns)
    )
    if format is None or not rows:
        sums = collectives.reduce_scatter_tensor(terms, "sum", shard.ranks, shard.group)
        return PendingSum(sums, shard.runs * own, chunk)
    # Codes saturate Inf; NaN survives, so that a loss scaler detects it.
    terms = torch.where(terms.isinf(), torch.full_like(terms, torch.nan), terms)
    codes, scales = dequantize_plans.quantize(terms, format.name)
    sent = torch.cat([part.view(shard.ranks, -1).view(torch.uint8) for part in (codes, scales)], 1)
    sizes = [1] * shard.ranks
    return PendingSum(collectives.all_to_all_single(sent, sizes, sizes, shard.group), shard.runs * own, chunk)


def finish(
    pending: PendingSum, to: TensorParallelShard | str, columns: int, dtype: torch.dtype, format: Format | None = None
) -> Tensor:
    """Waits and returns the sum, or this rank's rows of it, [rows, columns] in `dtype`."""
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
        terms = dequantize_plans.dequantize(codes, scales, None, format.name, torch.float32, columns, [0, 0]).view(
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
