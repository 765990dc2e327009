"""Quantizes operands of products in both directions: whole matrices, or shards of a tensor-parallel group's.

The kernels that quantize a whole operand in one read (`operand_ops`) also serve shards if only the tensor's amax depends on the
other ranks. Otherwise `quantize_operand_shard` quantizes each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels.operand_cast import NEITHER, OperandCast, Pair, operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast
from blockfp.sharding.plans import Operand

from ..ops.collectives import following, max_reduce
from ..ops.product.products import Matrix, in_order
from ..ops.quantize import part_ops
from ..ops.quantize.operand_ops import Directions, part_count, quantize_operand, tensor_amax
from ..sharded.gather import gather, join, padded, start
from ..sharded.quantize import Direction, quantize_operand_shard
from ..sharded.rank_plan import ROWS, RankPlan, TensorParallelShard
from .call import groups_of
from .delayed import record
from .observe import observe_operand, observe_parts
from .tensor_parallel.operand_plans import operand_plan
from .tensor_parallel.parallel import Parallel


class Scaling(NamedTuple):
    """How amaxes become scales, and where they are recorded.

    Attributes:
        eps: lower bound of amaxes, see `numerics.quantize`.
        multiplier: delayed scaling's float32 (), used instead of an amax.
        history: float32 [steps], records the amax; None records nothing.
        observed: float64 [operands, figures] of `observe`, or None.
    """

    eps: float
    multiplier: Tensor | None = None
    history: Tensor | None = None
    observed: Tensor | None = None


def quantized(
    x: Tensor,
    operand: Operand,
    rowwise: Cast,
    columnwise: Cast,
    scaling: Scaling,
    shard: TensorParallelShard | None = None,
    keys: Tensor | None = None,
    laid: Pair = NEITHER,
) -> tuple[Matrix, Matrix | None]:
    """Quantizes x [rows, columns], the shard at `shard` or, if that is None, the whole operand, in both directions.

    Rowwise without a format returns the values, columnwise None. `columnwise` is the cast of the transposed matrix. `keys` are
    stochastic rounding's, int32 [2, 2]: rowwise, columnwise. `laid` says which directions of a whole x to lay out for their
    products (`products.comes_laid`); neither if x is observed.
    """
    if shard is not None:
        return _quantized_part(x, operand, rowwise, columnwise, scaling, shard, keys)
    cast = operand_cast(rowwise, columnwise, scaling.eps, keyed=keys is not None, laid=laid)
    row, column = cast.row, cast.column
    if row is None and column is None:
        return Matrix([x], None), None
    plain = not (any(cast.random) or columnwise.rotate)
    amax = amax_where_compiled(x, row, column, plain, scaling.multiplier)
    if operand == "input" and column is not None and torch.compiler.is_compiling():
        found = _in_two_reads(x, cast, amax, scaling.multiplier)
    else:
        found = quantize_operand(x, cast, amax=amax, multiplier=scaling.multiplier, keys=keys if any(cast.random) else None)
    if found.amax is not None and scaling.history is not None:
        record(scaling.history, found.amax)
    if scaling.observed is not None:
        observe_operand(scaling.observed, operand, x, found, rowwise, columnwise)
    by_row = Matrix([x], None) if row is None else Matrix(found.row, row, laid=laid[0])
    return by_row, None if column is None else Matrix(found.column, column, laid=laid[1])


def begins_with_a_block(weight: Matrix) -> bool:
    """Returns whether a weight, in parts or as one tensor, begins at a block boundary."""
    whole: Any = weight.parts[0]
    start = whole.origin if weight.is_one_tensor else weight.origin
    return start == (0, 0) or in_order(weight.format, start, False)


def may_keep_laid(format: Format, traced: bool) -> bool:
    """Returns whether the columnwise input that a layer keeps for its backward may be laid out for its product.

    Scales in another order may: gradients of gradients, which read them as they are stored, put them back. Aligned codes, which
    lose what was shifted out, only in compiled layers, which have none; and a byte for each only where they had one.
    """
    return not format.scale.e8m0 or (traced and format.element.bits == 8)


def amax_where_compiled(
    x: Tensor, row: Format | None, column: Format | None, plain: bool, multiplier: Tensor | None
) -> Tensor | None:
    """Returns an operand's amax, int32 [1], if a compiler can fuse it with the computation of x and the kernels can use it.

    `plain` says that x is neither rotated, which changes its amax, nor rounded stochastically: the kernel that takes an amax
    rounds to nearest. With a `multiplier` no amax is needed.
    """
    if not (torch.compiler.is_compiling() and x.is_cuda and x.numel()):
        return None
    per_tensor = {format.per_tensor for format in (row, column) if format is not None}
    return tensor_amax(x) if per_tensor == {True} and plain and multiplier is None else None


def _in_two_reads(x: Tensor, cast: OperandCast, amax: Tensor | None, multiplier: Tensor | None) -> Directions:
    """Quantizes an input in each direction separately, so that a compiler can save the columnwise codes or recompute them."""
    by_row, by_column = cast.directions
    found = None if cast.row is None else quantize_operand(x, by_row, amax=amax, multiplier=multiplier)
    made = quantize_operand(apart(x), by_column, amax=amax, multiplier=multiplier)
    return made if found is None else found._replace(column=made.column)


def apart(x: Tensor) -> Tensor:
    """Returns x through an operation that a compiler fuses but can't simplify.

    The compiler can then recompute in the backward, from x's sources, what only the backward reads. It wouldn't if that
    depended on x itself, since it recomputes no tensor that is stored anyway.
    """
    return (x.view(torch.int32 if x.dtype is torch.float32 else torch.int16) | 0).view(x.dtype)


def _quantized_part(
    x: Tensor,
    operand: Operand,
    rowwise: Cast,
    columnwise: Cast,
    scaling: Scaling,
    shard: TensorParallelShard,
    keys: Tensor | None,
) -> tuple[Matrix, Matrix | None]:
    directions = []
    for i, cast in enumerate((rowwise, columnwise)):
        if cast.format is not None:
            plan = operand_plan(x.shape, cast, shard, columnwise=i == 1, operand=operand, gathers=False)
            directions.append(_direction(i, cast, plan, keys))
    parts = _parts(x, operand, directions, scaling, shard)
    made = [Matrix(own, d.cast.format, d.step.origins[0]) for own, d in zip(parts, directions, strict=True)]
    return Matrix([x], None) if rowwise.format is None else made[0], None if columnwise.format is None else made[-1]


def kept_inputs(
    kept: list[Tensor], format: Format | None, counts: Sequence[int] | None, origin: tuple[int, int]
) -> list[Matrix]:
    """Returns each group's columnwise input from the parts or values that the forward saved."""
    if not kept:
        return []
    if format is None:
        return [Matrix([group.mT], None) for _, group in groups_of(kept[0], counts)]
    each = part_count(format)
    return [Matrix(kept[first : first + each], format, origin) for first in range(0, len(kept), each)]


def gathered_input(
    x: Tensor, rowwise: Cast, columnwise: Cast, scaling: Scaling, shard: TensorParallelShard
) -> tuple[Matrix, list[Tensor]]:
    """Gathers the whole input rowwise; also returns the parts of this rank that the backward gathers columnwise.

    These are columnwise codes of x, or rowwise ones if the columnwise follow from them; x itself if codes can't be sent or
    `columnwise` has no format.
    """
    row_plan, column_plan = operand_plan(x.shape, rowwise, shard), operand_plan(x.shape, columnwise, shard, columnwise=True)
    shares = column_plan.transposes and row_plan.by_codes and rowwise.format is columnwise.format
    directions = []
    if row_plan.by_codes:
        directions.append(_direction(0, rowwise, row_plan, None, shares))
    if column_plan.by_codes and not shares:
        directions.append(_direction(1, columnwise, column_plan, None))
    made = _parts(x, "input", directions, scaling, shard)
    kept = made[-1] if column_plan.by_codes else [x]
    whole = gather(row_plan, shard, made[0] if row_plan.by_codes else [x])
    if not row_plan.by_codes:
        return quantized(whole[0], "input", rowwise, HIGH_PRECISION, scaling)[0], kept
    return Matrix(whole, rowwise.format), kept


class PendingInput(NamedTuple):
    """The whole columnwise input, while it is gathered."""

    received: list[Tensor]
    plan: RankPlan
    cast: Cast
    shard: TensorParallelShard

    def finish(self, scaling: Scaling) -> Matrix:
        """Waits for the gather and returns the input."""
        parts = join(self.plan, self.shard, self.received)
        if self.plan.by_codes:
            return Matrix(parts, self.cast.format, transposed=self.plan.transposes)
        if self.cast.format is None:
            return Matrix([parts[0].mT], None)
        column = quantized(parts[0], "input", HIGH_PRECISION, self.cast, scaling)[1]
        assert column is not None
        return column


def regathered_input(
    kept: list[Tensor], shape: Sequence[int], cast: Cast, shard: TensorParallelShard, gradient: Tensor
) -> PendingInput:
    """Starts to gather the whole columnwise input from the parts that `gathered_input` returned for an x of this shape."""
    plan = operand_plan(shape, cast, shard, columnwise=True)
    sent = padded(plan, kept)
    if torch.compiler.is_compiling():
        # Without this dependency the compiler gathers in the forward and saves the whole input for the backward.
        sent[-1] = following(sent[-1], gradient)
    return PendingInput(start(shard, sent), plan, cast, shard)


def gathered_gradient(
    gradient: Tensor,
    rowwise: Cast | None,
    columnwise: Cast | None,
    scaling: Scaling,
    shard: TensorParallelShard,
    keys: Tensor | None,
) -> tuple[Matrix, Matrix]:
    """Gathers the whole gradient in both directions with one collective; a cast of None skips its direction."""
    casts = (rowwise, columnwise)
    plans = [
        None if cast is None else operand_plan(gradient.shape, cast, shard, columnwise=i == 1, operand="gradient")
        for i, cast in enumerate(casts)
    ]
    if not all(plan is None or plan.by_codes for plan in plans):
        values = operand_plan(gradient.shape, HIGH_PRECISION, shard)
        (whole,) = gather(values, shard, [gradient])
        row, column = quantized(whole, "gradient", rowwise or HIGH_PRECISION, columnwise or HIGH_PRECISION, scaling, None, keys)
        return row, Matrix([whole.mT], None) if column is None else column
    transposes = plans[1] is not None and plans[1].transposes
    shares = transposes and rowwise is not None and columnwise is not None and rowwise.format is columnwise.format
    wanted = [
        (i, cast, plan)
        for i, (cast, plan) in enumerate(zip(casts, plans, strict=True))
        if cast is not None and plan is not None and not (shares and i == 1)
    ]
    directions = [_direction(i, cast, plan, keys, shares) for i, cast, plan in wanted]
    made = _parts(gradient, "gradient", directions, scaling, shard)
    sent = [padded(plan, parts) for (_, _, plan), parts in zip(wanted, made, strict=True)]
    received = iter(start(shard, [part for parts in sent for part in parts]))
    found = [
        Matrix(join(plan, shard, [next(received) for _ in parts]), cast.format)
        for (_, cast, plan), parts in zip(wanted, sent, strict=True)
    ]
    row, column = found[0], found[-1]
    if transposes:
        assert column.format is not None
        transposed = part_ops.turned(column.parts[0], column.parts[1], column.format.name, gradient.shape[1])
        column = Matrix([*transposed, *column.parts[2:]], column.format)
    return row, column


def _direction(i: int, cast: Cast, plan: RankPlan, keys: Tensor | None, both: bool = False) -> Direction:
    key = keys[i] if keys is not None and cast.stochastic else None
    names = ("rowwise", "columnwise")
    assert plan.quantize is not None
    return Direction(cast, plan.quantize, key, names if both else (names[i],))


def _parts(
    x: Tensor, operand: Operand, directions: Sequence[Direction], scaling: Scaling, shard: TensorParallelShard
) -> list[list[Tensor]]:
    """Quantizes this rank's shard in each direction."""
    columnwise = [direction.step.columnwise for direction in directions]
    if not directions:
        return []
    if all(map(_depends_on_amax_alone, directions)) and len(set(columnwise)) == len(columnwise) and _alike(directions):
        row, column = (
            next((d for d, other in zip(directions, columnwise, strict=True) if other is wanted), None)
            for wanted in (False, True)
        )
        found = _by_amax(x, operand, row, column, scaling, shard)
        parts = [found.column if each else found.row for each in columnwise]
        if found.amax is not None and scaling.history is not None:
            record(scaling.history, found.amax)
    else:
        parts = quantize_operand_shard(x, directions, shard, eps=scaling.eps)
    if scaling.observed is not None:
        for direction, made in zip(directions, parts, strict=True):
            for name in direction.names:
                values = x.mT if direction.step.columnwise else x
                observe_parts(scaling.observed, f"{operand} {name}", values, made, direction.cast, direction.step.origins[0])
    return parts


def _depends_on_amax_alone(direction: Direction) -> bool:
    """Returns whether codes and scales depend on other ranks, and on the shard's offset, only through the tensor's amax."""
    format = direction.cast.format
    assert format is not None
    # Rotated values have another tensor amax.
    rotated = direction.cast.rotate and format.per_tensor
    return direction.key is None and not direction.step.shared and not format.scale.two_level and not rotated


def _alike(directions: Sequence[Direction]) -> bool:
    """Returns whether all formats or none have one scale per tensor."""
    return len({direction.cast.format is not None and direction.cast.format.per_tensor for direction in directions}) == 1


def _by_amax(
    x: Tensor, operand: Operand, row: Direction | None, column: Direction | None, scaling: Scaling, shard: TensorParallelShard
) -> Directions:
    row_cast, column_cast = (None if direction is None else direction.cast for direction in (row, column))
    cast, one = operand_cast(row_cast, column_cast, scaling.eps), row or column
    assert one is not None
    amax = None
    if one.step.amax_axes and scaling.multiplier is None:
        if x.is_cuda and torch.compiler.is_compiling() and x.numel():
            # The compiler fuses it with the computation of x.
            amax = tensor_amax(x)
        else:
            amax = part_ops.part_amaxes(x, one.step.format, False, False, (0, 0))[0].view(1)
        amax = max_reduce(amax, (shard.group,))
    if operand == "input" and cast.column is not None and torch.compiler.is_compiling():
        return _in_two_reads(x, cast, amax, scaling.multiplier)
    return quantize_operand(x, cast, amax=amax, multiplier=scaling.multiplier)


# ---- weights: quantized tensors are used directly, other weights are quantized as shards of the full matrix


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
