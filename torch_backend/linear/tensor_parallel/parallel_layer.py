"""A layer whose products a tensor-parallel group shares, or whose groups are multiplied one after another.

    forward   y  = x w^T     x rowwise      weight rowwise
    dgrad     dx = g w       g rowwise      weight columnwise: derived from the rowwise codes inside the product
    wgrad     dw = g^T x     g columnwise   x columnwise: made in the forward, from the same read as rowwise, and saved

It runs over the custom ops of operand_ops.py and products.py, so that eager and compiled code carry out the same ones. What it
saves for the backward is the codes and scales of x columnwise, and the weight. A group (`Parallel`) shares the products:

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

from blockfp.recipes import HIGH_PRECISION, Product, Recipe

from ...ops.collectives import max_reduce_together
from ...ops.product.products import Matrix, multiply
from ...sharded.rank_plan import TensorParallelShard
from ...sharded.reduce_scatter import tree_reduce
from ..call import Call, Layer, Made, bias_gradient, groups_of, keys_of_gradient
from ..delayed import multiplier
from ..operands import (
    Scaling,
    columnwise_weight,
    gathered_gradient,
    gathered_input,
    kept_inputs,
    quantized,
    regathered_input,
    weight_operand,
)
from . import outputs, pieces
from .parallel import Parallel


class ParallelLayer(Layer):
    cuts = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        extra: Sequence[int] | None,
        scale: Tensor | None,
        history: Tensor | None,
    ) -> Made:
        recipe, parallel, counts = call.recipe, call.parallel, extra
        if parallel is not None and parallel.splits is not None:
            pieces.check_eager()
        given = multiplier(x, scale, call, "input", counts=counts, group=None if parallel is None else parallel.group)
        scaling = Scaling(call.eps, given, history, ctx.observed)
        columnwise = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        shard = None if parallel is None else parallel.cut_input
        gathers = parallel is not None and parallel.gathers_input
        # What terms add up to gets its bias once.
        added = None if parallel is not None and parallel.style == "row" else bias
        size = (weight.shape[-2], weight.shape[-1])
        w = weight_operand(weight, call.stored, recipe.weight, parallel)
        kept: list[Tensor] = []
        terms = []
        for index, group in groups_of(x, counts):
            if parallel is not None and gathers:
                row, columns = gathered_input(group, recipe.input, columnwise, scaling, parallel.tokens)
                kept = columns if call.needs[1] else kept
            else:
                row, columns = quantized(group, "input", recipe.input, columnwise, scaling, shard)
                if columns is not None:
                    ctx.x_origin = columns.origin
                    kept += columns.parts
            own = added if added is None or index is None else added[index]
            fast, exact = "forward" in recipe.fast_accum, recipe.exactness
            terms.append(_multiplied("forward", row, w, size, own, x.dtype, parallel, index, fast_accum=fast, exact=exact))
            del row, columns
        if call.needs[1] and columnwise.format is None and not gathers:
            kept = [x]
        y = _joined(terms) if terms else x.new_empty((0, weight.shape[-2]))
        del terms
        if parallel is not None and parallel.style == "row":
            y = _summed_output(y, bias, counts, parallel, x.dtype)
        parts = w.parts if call.needs[0] else []
        ctx.counts, ctx.format, ctx.origin, ctx.x_shape = counts, w.format, w.origin, (x.shape[0], x.shape[1])
        made = len(parts) > 0 and call.stored is None and w.format is not None
        return y, kept, parts, [weight] if made and parallel is None and not call.traced else []

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, kept: list[Tensor], parts: list[Any], points: list[Any], compiled: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        call: Call = ctx.call
        recipe, parallel, (needs_x, needs_weight, needs_bias) = call.recipe, call.parallel, call.needs
        w = Matrix(parts, ctx.format, ctx.origin)
        rowwise = recipe.gradient if needs_x else HIGH_PRECISION
        columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
        keys = keys_of_gradient(ctx, gradient) if rowwise.stochastic or columnwise.stochastic else None
        group = None if parallel is None else parallel.group
        given = multiplier(gradient, ctx.scale, call, "gradient", counts=ctx.counts, group=group)
        scaling = Scaling(call.eps, given, ctx.history, ctx.observed)
        pending, cast = None, recipe.input_columnwise
        inputs: list[Matrix] = []
        if parallel is not None and parallel.gathers_input and needs_weight:
            pending = regathered_input(kept, ctx.x_shape, cast, parallel.tokens, gradient)
        else:
            inputs = kept_inputs(kept, cast.format, ctx.counts, ctx.x_origin)
        kept.clear()
        d_bias = _shared_bias_gradient(gradient, ctx, parallel) if needs_bias and parallel is not None else None
        shard = None if parallel is None else parallel.cut_gradient
        gathers = parallel is not None and parallel.gathers_gradient
        # One rank frees x first. A group's sum is under way while the weight's gradient is made.
        order: tuple[Product, ...] = ("wgrad", "dgrad") if parallel is None else ("dgrad", "wgrad")
        d_weight = gradient.new_empty(ctx.shape, dtype=ctx.dtype) if needs_weight and call.grouped else None
        d_inputs: list[Tensor] = []
        pending_sum = None
        groups = groups_of(gradient, ctx.counts) if needs_x or needs_weight else []
        overflows = [None] * len(groups) if parallel is None else _overflows([group for _, group in groups], parallel)
        for (index, group), overflow in zip(groups, overflows, strict=True):
            key = None if keys is None else keys[index or 0]
            if parallel is not None and gathers:
                wanted = (rowwise if needs_x else None, columnwise if needs_weight else None)
                row, column = gathered_gradient(group, *wanted, scaling, parallel.scattered(ctx.x_shape[0]), key)
            else:
                row, column = quantized(group, "gradient", rowwise, columnwise, scaling, shard, key)
            for name in order:
                if name == "wgrad" and needs_weight:
                    column = Matrix([group.mT], None) if column is None else column
                    x = inputs.pop(0) if pending is None else pending.finish(scaling)
                    size = (ctx.shape[-1], ctx.x_shape[0] if gathers else group.shape[0])
                    fast, exact = "wgrad" in recipe.fast_accum, recipe.exactness
                    each = _multiplied(name, column, x, size, None, ctx.dtype, parallel, fast_accum=fast, exact=exact)
                    del column, x
                    each = each if overflow is None else _passing_overflow(each, overflow)
                    if d_weight is None:
                        d_weight = each
                    else:
                        d_weight[index].copy_(each)
                    del each
                if name == "dgrad" and needs_x:
                    each = _dgrad(row, w, ctx, recipe, group.dtype, index)
                    d_inputs.append(each if overflow is None else _passing_overflow(each, overflow))
                    del row, each
                    if parallel is not None and parallel.style == "column" and ctx.counts is None and not parallel.splits:
                        pending_sum = outputs.begin(d_inputs.pop(), _summed_by(parallel), parallel.reduce_format)
        d_x = None
        if parallel is not None and pending_sum is not None:
            to = _summed_by(parallel)
            d_x = outputs.finish(pending_sum, to, ctx.shape[-1], gradient.dtype, parallel.reduce_format)
        elif needs_x:
            d_x = _joined(d_inputs) if d_inputs else gradient.new_empty(ctx.x_shape)
            if parallel is not None and parallel.style == "column":
                d_x = _summed(d_x, parallel, gradient.dtype)
        if needs_bias and parallel is None:
            d_bias = bias_gradient(gradient, ctx.counts, ctx.bias_dtype)
        return d_x, d_weight, d_bias


def _joined(groups: list[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _dgrad(row: Matrix, w: Matrix, ctx: Any, recipe: Recipe, dtype: torch.dtype, index: int | None) -> Tensor:
    columnwise = recipe.weight_columnwise
    if w.format is None and columnwise.format is not None:
        # A weight whose rowwise operand is in high precision has no codes yet.
        weight = w.parts[0] if index is None else w.parts[0][index]
        w, index = columnwise_weight(weight, columnwise, ctx.call.parallel), None
    else:
        w = w._replace(transposed=True)
    size = (ctx.shape[-1], ctx.shape[-2])
    fast = "dgrad" in recipe.fast_accum
    exact = recipe.exactness
    return _multiplied("dgrad", row, w, size, None, dtype, ctx.call.parallel, index, fast_accum=fast, exact=exact)


def _multiplied(
    name: Product,
    a: Matrix,
    b: Matrix,
    size: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    parallel: Parallel | None,
    index: int | None = None,
    **options: Any,
) -> Tensor:
    """One of a layer's products; of a layer with pieces, what ranks have terms of comes in float32."""
    if parallel is None or parallel.splits is None:
        return multiply(a, b, size, bias, dtype, index=index, **options)
    return pieces.multiply_pieces(name, a, b, size, bias, dtype, parallel, **options)


def _summed_by(parallel: Parallel) -> TensorParallelShard | str:
    """The destination of a sum over the ranks, as `outputs.begin` takes it."""
    return parallel.tokens if parallel.sequence else parallel.group


def _summed(terms: Tensor, parallel: Parallel, dtype: torch.dtype) -> Tensor:
    """The sum of the ranks' terms: all of it, or this rank's tokens."""
    if parallel.splits is not None:
        return tree_reduce(terms, parallel.group, parallel.ranks, dtype)
    to = _summed_by(parallel)
    pending = outputs.begin(terms, to, parallel.reduce_format)
    return outputs.finish(pending, to, terms.shape[1], dtype, parallel.reduce_format)


def _summed_output(
    terms: Tensor, bias: Tensor | None, counts: Sequence[int] | None, parallel: Parallel, dtype: torch.dtype
) -> Tensor:
    y = _summed(terms, parallel, dtype if bias is None else torch.float32)
    if torch.compiler.is_compiling():
        # Of what a collective gives, torch 2.11 compiles no gradient; inductor leaves the copy out.
        y = y.clone()
    if bias is None:
        return y
    of_rows = bias if counts is None else torch.cat([b.expand(n, -1) for b, n in zip(bias, counts, strict=True)])
    return (y + of_rows).to(dtype)


def _overflows(groups: list[Tensor], parallel: Parallel) -> list[Tensor | None]:
    """For each group a bool () that says whether its whole float16 gradient holds an Inf.

    Each rank's loss scaler looks at its own part alone. None where every rank sees an Inf in the scales (`overflow.mark`), and
    for dtypes that need no loss scale.
    """
    if not groups or groups[0].dtype is not torch.float16 or not (parallel.gathers_gradient or parallel.cut_gradient):
        return [None] * len(groups)
    own = [group.isinf().any().int() for group in groups]
    return [overflow > 0 for overflow in max_reduce_together(own, (parallel.group,))]


def _passing_overflow(product: Tensor, overflow: Tensor) -> Tensor:
    return torch.where(overflow, torch.full_like(product, torch.nan), product)


def _shared_bias_gradient(gradient: Tensor, ctx: Any, parallel: Parallel) -> Tensor:
    if parallel.splits is not None:
        return pieces.sum_of_rows(gradient, parallel).to(ctx.bias_dtype)
    if not parallel.gathers_gradient:
        return bias_gradient(gradient, ctx.counts, ctx.bias_dtype)
    # The bias is added to this rank's tokens alone.
    return outputs.all_reduce(gradient.sum(0, dtype=torch.float32), parallel.group).to(ctx.bias_dtype)
