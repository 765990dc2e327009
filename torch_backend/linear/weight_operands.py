"""Weights as operands: quantized tensors are used directly, other weights are quantized as shards of the full matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels.calls import operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast

from ..ops.product.products import Matrix
from ..ops.quantize.operand_ops import quantize_operand
from ..sharded.rank_plan import ROWS, TensorParallelShard
from .operands import Scaling, quantized
from .tensor_parallel.parallel import Parallel


def weight_operand(weight: Tensor, stored: Format | None, cast: Cast, parallel: Parallel | None) -> Matrix:
    """Returns the weight for the forward's product: itself if stored quantized, or quantized as a shard of the full matrix."""
    if stored is not None or cast.format is None:
        # A quantized tensor has its own origin.
        return Matrix([weight], stored)
    if parallel is None:
        return Matrix(quantize_operand(weight, operand_cast(cast, None, 0.0)).row, cast.format)
    if weight.ndim > 2:
        return _grouped_weight(weight, cast, parallel)
    return quantized(weight, "weight", cast, HIGH_PRECISION, Scaling(0.0), parallel.cut_weight)[0]


def columnwise_weight(weight: Tensor, cast: Cast, parallel: Parallel | None) -> Matrix:
    """Quantizes a weight [out, in] in high precision columnwise, as a shard of the full matrix."""
    if parallel is None or parallel.style == "experts":
        return Matrix(quantize_operand(weight, operand_cast(None, cast, 0.0)).column, cast.format)
    column = quantized(weight, "weight", HIGH_PRECISION, cast, Scaling(0.0), parallel.cut_weight)[1]
    assert column is not None
    return column


def _grouped_weight(weight: Tensor, cast: Cast, parallel: Parallel) -> Matrix:
    """Quantizes weights [groups, out, in]: as one tensor if they share a scale, else one by one.

    Raises ValueError if they share one and a weight doesn't end at a block boundary or the ranks don't divide the experts.
    """
    assert cast.format is not None
    format, (count, rows, _) = cast.format, weight.shape
    if not (format.has_tensor_scale):
        if parallel.style == "experts":
            return Matrix(quantize_operand(weight, operand_cast(cast, None, 0.0)).row, format)
        each = [quantized(one, "weight", cast, HIGH_PRECISION, Scaling(0.0), parallel.cut_weight)[0] for one in weight]
        parts = [torch.stack(fields) for fields in zip(*(one.parts for one in each), strict=True)]
        return each[0]._replace(parts=parts)
    height = 1 if format.block is None else format.block[0]
    shard = {"row": parallel.cut_weight, "column": parallel.cut_weight._replace(runs=count)}.get(parallel.style)
    if shard is None:
        shard = TensorParallelShard(parallel.group, parallel.ranks, parallel.rank, ROWS, parallel.features * rows)
    if rows % height or (parallel.style == "experts" and parallel.features % parallel.ranks):
        raise ValueError(
            f"weights {tuple(weight.shape)} in high precision on {parallel.ranks} ranks share the scale of {format}, which at "
            f"use needs rows that are a multiple of {height} and experts that the ranks divide: keep them quantized "
            "(weights='quantized'), or let fully_shard gather them"
        )
    matrix = quantized(weight.reshape(count * rows, -1), "weight", cast, HIGH_PRECISION, Scaling(0.0), shard)[0]
    codes, scales, *tensor_scale = matrix.parts
    scales = scales if format.per_tensor else scales.view(count, rows // height, -1)
    return matrix._replace(parts=[codes.view(count, rows, -1), scales, *tensor_scale])
