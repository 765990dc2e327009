"""The autograd function behind `linear` where a tensor-parallel group shares its products.

                  weight [out, in]   input              output              gradient of the output
    column        rows cut           whole              columns cut         columns cut
      + sequence                     rows cut: gathered
    row           columns cut        columns cut        terms: all-reduced  whole
      + sequence                                        reduce-scattered    rows cut: gathered
    experts       groups cut         each rank has the tokens of its own experts

Operands are quantized as parts of the whole (operands.py), so every rank multiplies codes and scales that one process would.
What is gathered travels as codes: rowwise in the forward, columnwise (for the weight's gradient) in the backward, begun before
the products that don't need it and freed after the last that does. Sums of terms over the ranks are begun as soon as their
product is done, and waited for last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION, Cast, Product, Recipe

from ..custom_ops.collectives import max_reduce_together
from ..custom_ops.operand_ops import part_count, quantize_operand
from ..custom_ops.products import Matrix, multiply
from ..sharded.shard import ROWS, TensorParallelShard
from . import outputs
from .linear_function import Call, Scaling, bias_gradient, groups_of, keys_of_gradient
from .operands import gathered_gradient, gathered_input, quantized, regathered_input
from .parallel import Parallel
from .second_order import once_differentiable


class ParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        counts: Sequence[int] | None,
        input_amax_history: Tensor | None,
        input_scale: Tensor | None,
        gradient_amax_history: Tensor | None,
        gradient_scale: Tensor | None,
        key: Tensor | None,
        step: Tensor | None,
        observed: Tensor | None,
    ) -> Tensor:
        recipe, parallel = call.recipe, _parallel(call)
        scaling = Scaling(recipe.eps, input_scale, input_amax_history if call.training else None, observed)
        columnwise = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        w = _weight(weight, call)
        kept: list[Tensor] = []
        terms = []
        for index, group in groups_of(x, counts):
            if parallel.gathers_input:
                row, columns = gathered_input(group, recipe.input, columnwise, scaling, parallel.tokens)
            else:
                row, column = quantized(group, "input", recipe.input, columnwise, scaling, parallel.cut_input)
                columns, ctx.x_origin = [group] if columnwise.format is None else column.parts, column.origin
            if call.needs[1]:
                kept += columns
            # What terms add up to gets its bias once, below.
            added = None if parallel.style == "row" else bias
            added = added if added is None or index is None else added[index]
            terms.append(_times("forward", row, w, weight.shape[-2:], recipe, x.dtype, bias=added, index=index))
            del row, columns
        # A rank may have no expert.
        y = _joined(terms) if terms else x.new_empty((0, weight.shape[-2]))
        del terms
        if parallel.style == "row":
            y = _summed(y, parallel)
            if torch.compiler.is_compiling():
                # Of what a collective gives, torch 2.11 compiles no gradient; inductor leaves the copy out.
                y = y.clone()
            if bias is not None:
                y = y + (bias if counts is None else torch.cat([b.expand(n, -1) for b, n in zip(bias, counts, strict=True)]))
        ctx.save_for_backward(*kept, *(w.parts if call.needs[0] else ()))
        ctx.kept, ctx.call, ctx.counts, ctx.format, ctx.origin = len(kept), call, counts, w.format, w.origin
        ctx.x_shape, ctx.shape = (x.shape[0], x.shape[1]), weight.shape
        ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        # Not saved: another microbatch's backward may write into them before this one's.
        ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = gradient_amax_history, gradient_scale, key, step, observed
        return y

    @staticmethod
    @once_differentiable(
        "a tensor-parallel layer has no gradient of its gradient: take it of a layer that is not cut, or leave out create_graph"
    )
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        recipe, parallel, (needs_x, needs_weight, needs_bias) = call.recipe, _parallel(call), call.needs
        saved = list(ctx.saved_tensors)
        kept, w = saved[: ctx.kept], Matrix(saved[ctx.kept :], ctx.format, ctx.origin)
        del saved
        if not torch.compiler.is_compiling():
            # From here on each copy lives until its product is done.
            ctx.maybe_clear_saved_tensors()
        coming = None
        if needs_weight and parallel.gathers_input:
            coming = regathered_input(kept, ctx.x_shape, recipe.input_columnwise, parallel.tokens, gradient)
        inputs = [] if coming is not None else _inputs(kept, recipe, ctx)
        del kept
        rowwise = recipe.gradient if needs_x else None
        columnwise = recipe.gradient_columnwise if needs_weight else None
        stochastic = any(cast is not None and cast.stochastic for cast in (rowwise, columnwise))
        keys = keys_of_gradient(ctx, gradient) if stochastic else None
        scaling = Scaling(recipe.eps, ctx.scale, ctx.history, ctx.observed)
        d_bias = _bias_gradient(gradient, ctx, parallel) if needs_bias else None
        d_inputs: list[Tensor] = []
        d_weight = gradient.new_empty(ctx.shape, dtype=ctx.dtype) if needs_weight and call.grouped else None
        summing = None
        groups = groups_of(gradient, ctx.counts) if needs_x or needs_weight else []
        overflows = _overflows([group for _, group in groups], parallel)
        for (index, group), overflow in zip(groups, overflows, strict=True):
            key = None if keys is None else keys[index or 0]
            if parallel.gathers_gradient:
                place = parallel.scattered(ctx.x_shape[0])
                row, column = gathered_gradient(group, rowwise, columnwise, scaling, place, key)
            else:
                casts = (rowwise or HIGH_PRECISION, columnwise or HIGH_PRECISION)
                row, column = quantized(group, "gradient", *casts, scaling, parallel.cut_gradient, key)
            if needs_x:
                each = _dgrad(row, w, ctx, recipe, group.dtype, index)
                d_inputs.append(_passing_overflow(each, overflow))
                del each
            del row
            if needs_x and parallel.style == "column" and ctx.counts is None:
                # Under way while the weight's gradient is made.
                summing = outputs.begin(d_inputs.pop(), _summed_by(parallel), parallel.reduce_format)
            if needs_weight:
                b = inputs.pop(0) if coming is None else coming.finish(scaling)
                tokens = ctx.x_shape[0] if parallel.gathers_gradient else group.shape[0]
                each = _times("wgrad", column, b, (ctx.shape[-1], tokens), recipe, ctx.dtype)
                each = _passing_overflow(each, overflow)
                if d_weight is None:
                    d_weight = each
                else:
                    d_weight[index].copy_(each)
                del b, each
            del column
        d_x = None
        if summing is not None:
            d_x = outputs.finish(summing, _summed_by(parallel), ctx.shape[-1], gradient.dtype, parallel.reduce_format)
        elif needs_x:
            d_x = _joined(d_inputs) if d_inputs else gradient.new_empty(ctx.x_shape)
            d_x = _summed(d_x, parallel) if parallel.style == "column" else d_x
        return d_x, d_weight, d_bias, *([None] * 9)


def _parallel(call: Call) -> Parallel:
    assert call.parallel is not None
    return call.parallel


def _joined(groups: list[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _summed_by(parallel: Parallel) -> TensorParallelShard | str:
    """Over what terms are summed, as `outputs.begin` takes it."""
    return parallel.tokens if parallel.sequence else parallel.group


def _summed(terms: Tensor, parallel: Parallel) -> Tensor:
    """The sum of the ranks' terms: all of it, or this rank's tokens."""
    to = _summed_by(parallel)
    pending = outputs.begin(terms, to, parallel.reduce_format)
    return outputs.finish(pending, to, terms.shape[1], terms.dtype, parallel.reduce_format)


def _weight(weight: Tensor, call: Call) -> Matrix:
    """The weight as an operand: itself, or what it is quantized to here, as a part of the whole."""
    cast = call.recipe.weight
    if call.stored is not None or cast.format is None:
        # A quantized tensor knows its own origin.
        return Matrix([weight], call.stored)
    if weight.ndim > 2:
        return _groups(weight, cast, _parallel(call))
    return quantized(weight, "weight", cast, HIGH_PRECISION, Scaling(0.0), _parallel(call).cut_weight)[0]


def _groups(weight: Tensor, cast: Cast, parallel: Parallel) -> Matrix:
    """Weights [groups, out, in] quantized: as one tensor where they share a scale, otherwise each by itself.

    Raises:
        ValueError: they share one, and their blocks or the ranks' parts of them don't lie one behind the other.
    """
    assert cast.format is not None
    format, (count, rows, _) = cast.format, weight.shape
    if not format.has_tensor_scale:
        if parallel.style == "experts":
            return Matrix(quantize_operand(weight, format, None).row, format)
        each = [quantized(one, "weight", cast, HIGH_PRECISION, Scaling(0.0), parallel.cut_weight)[0] for one in weight]
        parts = [torch.stack(fields) for fields in zip(*(one.parts for one in each), strict=True)]
        return each[0]._replace(parts=parts)
    height = 1 if format.block is None else format.block[0]
    lies = {"row": parallel.cut_weight, "column": parallel.cut_weight._replace(runs=count)}.get(parallel.style)
    if lies is None:
        lies = TensorParallelShard(parallel.group, parallel.ranks, parallel.rank, ROWS, parallel.features * rows)
    if rows % height or (parallel.style == "experts" and parallel.features % parallel.ranks):
        raise ValueError(
            f"weights {tuple(weight.shape)} in high precision on {parallel.ranks} ranks share the scale of {format}, which at "
            f"use needs rows that are a multiple of {height} and experts that the ranks divide: keep them quantized "
            "(weights='quantized'), or let fully_shard gather them"
        )
    matrix = quantized(weight.reshape(count * rows, -1), "weight", cast, HIGH_PRECISION, Scaling(0.0), lies)[0]
    codes, scales, *tensor_scale = matrix.parts
    scales = scales if format.per_tensor else scales.view(count, rows // height, -1)
    return matrix._replace(parts=[codes.view(count, rows, -1), scales, *tensor_scale])


def _times(
    name: Product,
    a: Matrix,
    b: Matrix,
    size: Sequence[int],
    recipe: Recipe,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    index: int | None = None,
) -> Tensor:
    """a @ b^T, for size (rows of b, contracted length)."""
    return multiply(a, b, *size, bias, dtype, fast_accum=name in recipe.fast_accum, index=index)


def _dgrad(row: Matrix, w: Matrix, ctx: Any, recipe: Recipe, dtype: torch.dtype, index: int | None) -> Tensor:
    size = (ctx.shape[-1], ctx.shape[-2])
    columnwise = recipe.weight_columnwise
    if w.format is None and columnwise.format is not None:
        # A weight whose rowwise operand is in high precision has no codes yet.
        parallel = _parallel(ctx.call)
        place = None if parallel.style == "experts" else parallel.cut_weight
        weight = w.parts[0] if index is None else w.parts[0][index]
        _, across = quantized(weight, "weight", HIGH_PRECISION, columnwise, Scaling(0.0), place)
        return _times("dgrad", row, across, size, recipe, dtype)
    return _times("dgrad", row, w._replace(transposed=True), size, recipe, dtype, index=index)


def _inputs(kept: list[Tensor], recipe: Recipe, ctx: Any) -> list[Matrix]:
    """x columnwise of each group, from what the forward kept."""
    format = recipe.input_columnwise.format
    if format is None:
        return [Matrix([group.mT], None) for group in kept]
    each = part_count(format)
    return [Matrix(kept[first : first + each], format, ctx.x_origin) for first in range(0, len(kept), each)]


def _overflows(groups: list[Tensor], parallel: Parallel) -> list[Tensor | None]:
    """Whether each group's whole float16 gradient holds an Inf, bool (): each rank's loss scaler looks at its own part.

    None where every rank sees it in the scales (`overflow.mark`), and for dtypes that need no loss scale.
    """
    if not groups or groups[0].dtype is not torch.float16 or not (parallel.gathers_gradient or parallel.cut_gradient):
        return [None] * len(groups)
    own = [group.isinf().any().int() for group in groups]
    return [overflow > 0 for overflow in max_reduce_together(own, (parallel.group,))]


def _passing_overflow(product: Tensor, overflow: Tensor | None) -> Tensor:
    return product if overflow is None else torch.where(overflow, torch.full_like(product, torch.nan), product)


def _bias_gradient(gradient: Tensor, ctx: Any, parallel: Parallel) -> Tensor:
    if not parallel.gathers_gradient:
        return bias_gradient(gradient, ctx.counts, ctx.bias_dtype)
    # The bias is added to this rank's tokens alone.
    return outputs.all_reduce(gradient.sum(0, dtype=torch.float32), parallel.group).to(ctx.bias_dtype)
