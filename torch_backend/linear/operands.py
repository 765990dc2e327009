"""Operands of products that a tensor-parallel group shares: quantized as parts of the whole, in both directions, and gathered.

The kernels that quantize a whole operand in one read (`operand_ops`) serve parts too, wherever nothing depends on the place of
a part but the amax of the tensor. Otherwise `quantize_operand_shard` quantizes each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION, Cast
from blockfp.sharding.plans import Operand

from ..custom_ops import part_ops
from ..custom_ops.collectives import following, max_reduce
from ..custom_ops.operand_ops import Directions, quantize_operand, tensor_amax
from ..custom_ops.products import Matrix
from ..sharded.gather import gather, join, padded, start
from ..sharded.quantize import Direction, quantize_operand_shard
from ..sharded.rank_plan import RankPlan
from ..sharded.shard import TensorParallelShard
from .delayed import record
from .linear_function import Scaling, quantized_whole
from .observe import observe_parts
from .operand_plans import operand_plan


def quantized(
    x: Tensor,
    operand: Operand,
    rowwise: Cast,
    columnwise: Cast,
    scaling: Scaling,
    shard: TensorParallelShard | None,
    keys: Tensor | None = None,
) -> tuple[Matrix, Matrix]:
    """x [rows, columns] rowwise and columnwise as it lies: a part of the whole at `shard`, or the whole where that is None.

    A direction without a format keeps the values.
    """
    if shard is None:
        row, column = quantized_whole(x, operand, rowwise, columnwise, scaling, keys)
        return Matrix(row, rowwise.format), Matrix(column if columnwise.format else [x.mT], columnwise.format)
    directions = []
    for i, cast in enumerate((rowwise, columnwise)):
        if cast.format is not None:
            plan = operand_plan(x.shape, cast, shard, columnwise=i == 1, operand=operand, gathers=False)
            directions.append(_direction(i, cast, plan, keys))
    made = iter(zip(_parts(x, operand, directions, scaling, shard), directions, strict=True))
    found = []
    for cast, values in ((rowwise, x), (columnwise, x.mT)):
        if cast.format is None:
            found.append(Matrix([values], None))
        else:
            parts, direction = next(made)
            found.append(Matrix(parts, cast.format, direction.step.origins[0]))
    return found[0], found[1]


def gathered_input(
    x: Tensor, rowwise: Cast, columnwise: Cast, scaling: Scaling, shard: TensorParallelShard
) -> tuple[Matrix, list[Tensor]]:
    """The whole input rowwise, gathered, and what this rank is to keep until the columnwise codes are gathered.

    That are the columnwise codes of x (or the rowwise ones, where the others follow from them); x itself, where they can't
    travel or `columnwise` has no format.
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
        whole = quantized_whole(whole[0], "input", rowwise, HIGH_PRECISION, scaling)[0]
    return Matrix(whole, rowwise.format), kept


class PendingInput(NamedTuple):
    """The whole input columnwise, on its way."""

    received: list[Tensor]
    plan: RankPlan
    cast: Cast
    shard: TensorParallelShard

    def finish(self, scaling: Scaling) -> Matrix:
        """Waits for it."""
        parts = join(self.plan, self.shard, self.received)
        if self.plan.by_codes:
            return Matrix(parts, self.cast.format, transposed=self.plan.transposes)
        if self.cast.format is None:
            return Matrix([parts[0].mT], None)
        return Matrix(quantized_whole(parts[0], "input", HIGH_PRECISION, self.cast, scaling)[1], self.cast.format)


def regathered_input(
    kept: list[Tensor], shape: Sequence[int], cast: Cast, shard: TensorParallelShard, gradient: Tensor
) -> PendingInput:
    """Begins to gather the whole input columnwise, from what `gathered_input` kept of a part of this shape."""
    plan = operand_plan(shape, cast, shard, columnwise=True)
    sent = padded(plan, kept)
    if torch.compiler.is_compiling():
        # Else it would be gathered as soon as it is known: in the forward, which would keep all of it for the backward.
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
    """The whole gradient in both directions, of which None is not wanted. What travels does so in one collective."""
    casts = (rowwise, columnwise)
    plans = [
        None if cast is None else operand_plan(gradient.shape, cast, shard, columnwise=i == 1, operand="gradient")
        for i, cast in enumerate(casts)
    ]
    if not all(plan is None or plan.by_codes for plan in plans):
        values = operand_plan(gradient.shape, HIGH_PRECISION, shard)
        (whole,) = gather(values, shard, [gradient])
        return quantized(whole, "gradient", rowwise or HIGH_PRECISION, columnwise or HIGH_PRECISION, scaling, None, keys)
    transposes = plans[1] is not None and plans[1].transposes
    shares = transposes and rowwise is not None and columnwise is not None and rowwise.format is columnwise.format
    directions = [
        _direction(i, cast, plan, keys, shares)
        for i, (cast, plan) in enumerate(zip(casts, plans, strict=True))
        if cast is not None and plan is not None and not (shares and i == 1)
    ]
    sent = [
        padded(direction.plan, parts)
        for direction, parts in zip(directions, _parts(gradient, "gradient", directions, scaling, shard), strict=True)
    ]
    received = iter(start(shard, [part for parts in sent for part in parts]))
    found: list[Matrix] = []
    for direction, parts in zip(directions, sent, strict=True):
        joined = join(direction.plan, shard, [next(received) for _ in parts])
        found.append(Matrix(joined, direction.cast.format))
    row, column = found[0], found[-1]
    if transposes:
        assert column.format is not None
        transposed = part_ops.turned(column.parts[0], column.parts[1], column.format.name, gradient.shape[1])
        column = Matrix([*transposed, *column.parts[2:]], column.format)
    return row, column


def _direction(i: int, cast: Cast, plan: RankPlan, keys: Tensor | None, both: bool = False) -> Direction:
    key = keys[i] if keys is not None and cast.stochastic else None
    names = ("rowwise", "columnwise")
    return Direction(cast, plan, key, names if both else (names[i],))


def _parts(
    x: Tensor, operand: Operand, directions: Sequence[Direction], scaling: Scaling, shard: TensorParallelShard
) -> list[list[Tensor]]:
    """This rank's part in each of the directions."""
    columnwise = [direction.step.columnwise for direction in directions]
    if not directions:
        return []
    if all(map(_depends_on_amax_alone, directions)) and len(set(columnwise)) == len(columnwise) and _alike(directions):
        row, column = (
            next((d for d, other in zip(directions, columnwise, strict=True) if other is wanted), None)
            for wanted in (False, True)
        )
        found = _in_one_read(x, row, column, scaling, shard)
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
    """Whether nothing but the amax of the whole tensor depends on the other ranks, and on where the part lies."""
    format = direction.cast.format
    assert format is not None
    # The amax of a tensor's rotated values is another one.
    rotated = direction.cast.rotate and format.per_tensor
    return direction.key is None and not direction.step.shared and not format.scale.two_level and not rotated


def _alike(directions: Sequence[Direction]) -> bool:
    """Whether all formats have one scale per tensor, or none has."""
    return len({direction.cast.format is not None and direction.cast.format.per_tensor for direction in directions}) == 1


def _in_one_read(
    x: Tensor, row: Direction | None, column: Direction | None, scaling: Scaling, shard: TensorParallelShard
) -> Directions:
    formats = [None if direction is None else direction.cast.format for direction in (row, column)]
    one = row or column
    assert one is not None
    amax = None
    if one.step.amax_axes and scaling.multiplier is None:
        if x.is_cuda and torch.compiler.is_compiling() and x.numel():
            # There the compiler finds it while it makes x.
            amax = tensor_amax(x)
        else:
            amax = part_ops.part_amaxes(x, one.step.format, False, False, (0, 0))[0].view(1)
        amax = max_reduce(amax, (shard.group,))
    rotate = column is not None and column.cast.rotate
    return quantize_operand(x, *formats, amax=amax, multiplier=scaling.multiplier, rotate=rotate, eps=scaling.eps)
