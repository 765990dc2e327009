"""Weights as products take them: quantized tensors as they are, values as codes of the part of the whole that they are."""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.recipes import HIGH_PRECISION, Cast

from ..custom_ops.operand_ops import quantize_operand
from ..custom_ops.products import Matrix
from ..sharded.rank_plan import ROWS, TensorParallelShard
from .operands import Scaling, quantized
from .parallel import Parallel


def weight_operand(weight: Tensor, stored: Format | None, cast: Cast, parallel: Parallel | None) -> Matrix:
    """The weight as the forward multiplies it: itself, or quantized here as a part of the whole."""
    if stored is not None or cast.format is None:
        # A quantized tensor knows its own origin.
        return Matrix([weight], stored)
    if parallel is None:
        return Matrix(quantize_operand(weight, cast.format, None, eps=0.0).row, cast.format)
    if weight.ndim > 2:
        return _grouped_weight(weight, cast, parallel)
    return quantized(weight, "weight", cast, HIGH_PRECISION, Scaling(0.0), parallel.cut_weight)[0]


def columnwise_weight(weight: Tensor, cast: Cast, parallel: Parallel | None) -> Matrix:
    """Quantizes the values of a weight [out, in] columnwise, as a part of the whole."""
    if parallel is None or parallel.style == "experts":
        return Matrix(quantize_operand(weight, None, cast.format, eps=0.0).column, cast.format)
    column = quantized(weight, "weight", HIGH_PRECISION, cast, Scaling(0.0), parallel.cut_weight)[1]
    assert column is not None
    return column


def _grouped_weight(weight: Tensor, cast: Cast, parallel: Parallel) -> Matrix:
    """Quantizes weights [groups, out, in], as one tensor where they share a scale, otherwise each by itself.

    Raises:
        ValueError: they share one, and their blocks or the ranks' parts of them don't lie one behind the other.
    """
    assert cast.format is not None
    format, (count, rows, _) = cast.format, weight.shape
    if not (format.has_tensor_scale):
        if parallel.style == "experts":
            return Matrix(quantize_operand(weight, format, None, eps=0.0).row, format)
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
