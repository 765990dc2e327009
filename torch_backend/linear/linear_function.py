"""The autograd function behind `linear`.

    forward   y  = x w^T     x rowwise      weight rowwise
    dgrad     dx = g w       g rowwise      weight columnwise: derived from the rowwise codes inside the product
    wgrad     dw = g^T x     g columnwise   x columnwise: made in the forward, from the same read as rowwise, and saved

It runs over the custom ops of operand_ops.py and products.py, so that eager and compiled code carry out the same ones. What it
saves for the backward is the codes and scales of x columnwise, and the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.recipes import HIGH_PRECISION, Cast, Product, Recipe

from ..custom_ops.key_ops import gradient_keys
from ..custom_ops.operand_ops import part_count, quantize_operand, tensor_amax
from ..custom_ops.overflow import scales_tell
from ..custom_ops.products import Matrix, multiply
from .delayed import record
from .observe import observe_operand
from .parallel import Parallel
from .second_order import OfInput, StraightThrough, columnwise_values, taken, values_of


@dataclass(frozen=True)
class Call:
    """What a call knows before it sees a value; equal calls compile to one graph.

    Attributes:
        recipe: from `recipes.for_linear`.
        stored: format of the weight, or None for values.
        grouped: whether there is a weight for each of several groups.
        needs: whether x, weight and bias want gradients.
        training: whether amaxes are recorded.
        rank: folded into the key of the gradients; None for a key that was given for this call.
        parallel: how a tensor-parallel group shares the call, or None.
    """

    recipe: Recipe
    stored: Format | None
    grouped: bool
    needs: tuple[bool, ...]
    training: bool
    rank: int | None
    parallel: Parallel | None = None


class LinearFunction(torch.autograd.Function):
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
    ) -> Tensor | tuple[Tensor, Tensor]:
        recipe = call.recipe
        format, parts = _weight_parts(weight, call)
        scaling = Scaling(recipe.eps, input_scale, input_amax_history if call.training else None, observed)
        columnwise = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        columns: list[Tensor] = []
        outputs = []
        for index, group in groups_of(x, counts):
            row, column = quantized_whole(group, "input", recipe.input, columnwise, scaling)
            columns += column
            added = bias if bias is None or index is None else bias[index]
            operands = (row, recipe.input.format, parts, format)
            outputs.append(_product("forward", operands, weight.shape[-2:], recipe, x.dtype, bias=added, index=index))
            del row, column, operands
        if call.needs[1] and columnwise.format is None:
            columns = [x]
        kept = parts if call.needs[0] else []
        ctx.call, ctx.counts, ctx.format, ctx.columns, ctx.parts = call, counts, format, len(columns), len(kept)
        y = outputs[0] if counts is None else torch.cat(outputs)
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        # Not saved: another microbatch's backward may write into them before this one's.
        ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = gradient_amax_history, gradient_scale, key, step, observed
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*columns, *kept)
            return y
        # What gradients of gradients go to: a weight of which `kept` are the codes alone, and x.
        ctx.weight_beside = bool(kept) and call.stored is None and format is not None
        own = [weight] if ctx.weight_beside else []
        if not (call.needs[0] and call.needs[1]):
            ctx.save_for_backward(*columns, *kept, *own)
            return y
        anchor = x.new_empty(0)
        ctx.waiting = []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*columns, *kept, *own, anchor)
        return y, anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, carried: Tensor | None = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
        if gradient is None:
            return taken(ctx.waiting, ctx.saved_tensors[-1].dtype), *([None] * 11)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _with_graph(ctx, gradient)
        saved = list(ctx.saved_tensors)
        inputs = _columns(saved[: ctx.columns], recipe.input_columnwise.format, ctx.counts)
        parts = saved[ctx.columns : ctx.columns + ctx.parts]
        del saved
        if not torch.compiler.is_compiling():
            # From here on each copy lives until its product is done.
            ctx.maybe_clear_saved_tensors()
        rowwise = recipe.gradient if needs_x else HIGH_PRECISION
        columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
        keys = keys_of_gradient(ctx, gradient) if rowwise.stochastic or columnwise.stochastic else None
        scaling = Scaling(recipe.eps, ctx.scale, ctx.history, ctx.observed)
        d_weight = gradient.new_empty(ctx.shape, dtype=ctx.dtype) if needs_weight and call.grouped else None
        d_inputs = []
        for index, group in groups_of(gradient, ctx.counts):
            key = None if keys is None else keys[index or 0]
            row, column = quantized_whole(group, "gradient", rowwise, columnwise, scaling, key)
            if needs_weight:
                across = column if columnwise.format is not None else [group.mT]
                operands = (across, columnwise.format, inputs.pop(0), recipe.input_columnwise.format)
                size = (ctx.shape[-1], group.shape[0])
                each = _product("wgrad", operands, size, recipe, ctx.dtype)
                del operands, across
                if d_weight is None:
                    d_weight = each
                else:
                    d_weight[index].copy_(each)
                del each
            del column
            if needs_x:
                d_inputs.append(_dgrad(row, group, parts, index, ctx, recipe))
            del row
        d_x = None
        if needs_x:
            d_x = d_inputs[0] if ctx.counts is None else torch.cat(d_inputs)
            if carried is not None:
                d_x = _plus(d_x, taken(ctx.waiting, d_x.dtype))
        d_bias = bias_gradient(gradient, ctx.counts, ctx.bias_dtype) if needs_bias else None
        return d_x, d_weight, d_bias, *([None] * 9)


def _plus(d_x: Tensor, carried: Tensor | None) -> Tensor:
    return d_x if carried is None else d_x + carried


def _with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The backward where it is to be differentiated (`second_order`)."""
    call: Call = ctx.call
    recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
    saved, lengths = list(ctx.saved_tensors), ctx.counts or [gradient.shape[0]]
    columns, parts = saved[: ctx.columns], saved[ctx.columns : ctx.columns + ctx.parts]
    with torch.no_grad():
        rows, across = _gradient_values(ctx, gradient.detach())
        x = [
            columnwise_values(one, recipe.input_columnwise, length)
            for one, length in zip(_columns(columns, recipe.input_columnwise.format, ctx.counts), lengths, strict=needs_weight)
        ]
        w = _weight_values(parts, ctx, recipe) if needs_x else None
    d_x = d_weight = None
    # Products choose their dtypes themselves.
    with torch.autocast(gradient.device.type, enabled=False):
        if w is not None:
            w = StraightThrough.apply(saved[ctx.columns + ctx.parts] if ctx.weight_beside else parts[0], w)
            weights = [w] if ctx.counts is None else w.unbind()
            g = StraightThrough.apply(gradient, torch.cat(rows)).split(lengths)
            d_x = torch.cat([one @ weight for one, weight in zip(g, weights, strict=True)]).to(gradient.dtype)
        if needs_weight:
            whole = torch.cat(x)
            x = (OfInput.apply(saved[-1], whole, ctx.waiting) if needs_x else whole).split(lengths)
            g = StraightThrough.apply(gradient, torch.cat(across)).split(lengths)
            each = [one.mT @ other for one, other in zip(g, x, strict=True)]
            d_weight = (each[0] if ctx.counts is None else torch.stack(each)).to(ctx.dtype)
    if d_x is not None and needs_weight:
        d_x = _plus(d_x, taken(ctx.waiting, d_x.dtype))
    d_bias = bias_gradient(gradient, ctx.counts, ctx.bias_dtype) if needs_bias else None
    return d_x, d_weight, d_bias, *([None] * 9)


def _gradient_values(ctx: Any, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The values of each group's gradient, rowwise and columnwise, [tokens, out]; those that are not wanted are of no use."""
    recipe, (needs_x, needs_weight, _) = ctx.call.recipe, ctx.call.needs
    rowwise = recipe.gradient if needs_x else HIGH_PRECISION
    columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
    keys = keys_of_gradient(ctx, gradient) if rowwise.stochastic or columnwise.stochastic else None
    scaling = Scaling(recipe.eps, ctx.scale, ctx.history, ctx.observed)
    rows, across = [], []
    for index, group in groups_of(gradient, ctx.counts):
        key = None if keys is None else keys[index or 0]
        row, column = quantized_whole(group, "gradient", rowwise, columnwise, scaling, key)
        rows.append(values_of(row, rowwise.format, group.shape[1]))
        across.append(columnwise_values(column if columnwise.format else [group.mT], columnwise, group.shape[0]))
    return rows, across


def _weight_values(parts: list[Tensor], ctx: Any, recipe: Recipe) -> Tensor:
    """The weight as the input's gradient is multiplied with it, [.., out, in] in float32."""
    columnwise = recipe.weight_columnwise.format
    if ctx.format is not None or columnwise is None:
        return values_of(parts, ctx.format, ctx.shape[-1])
    matrices = parts[0].unbind() if parts[0].ndim > 2 else (parts[0],)
    each = [values_of(quantize_operand(one, None, columnwise).column, columnwise, ctx.shape[-2]).mT for one in matrices]
    return torch.stack(each) if parts[0].ndim > 2 else each[0]


class Scaling(NamedTuple):
    """How amaxes become scales: eps, or with delayed scaling the multiplier, and the history to record in (None: don't)."""

    eps: float
    multiplier: Tensor | None = None
    history: Tensor | None = None
    observed: Tensor | None = None


def groups_of(x: Tensor, counts: Sequence[int] | None) -> list[tuple[int | None, Tensor]]:
    """(index, rows) of each group; one group without index where there are no counts."""
    return [(None, x)] if counts is None else list(enumerate(x.split(list(counts))))


def _weight_parts(weight: Tensor, call: Call) -> tuple[Format | None, list[Tensor]]:
    """The weight as an operand: itself, or what it is quantized to here."""
    format = call.recipe.weight.format
    if call.stored is not None or format is None:
        return call.stored, [weight]
    return format, quantize_operand(weight, format, None).row


def quantized_whole(
    x: Tensor, operand: str, rowwise: Cast, columnwise: Cast, scaling: Scaling, key: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Parts of x [tokens, size] rowwise and columnwise, from one read. Without a format: the values, and nothing columnwise."""
    row, column = rowwise.format, columnwise.format
    if row is None and column is None:
        return [x], []
    per_tensor = {format.per_tensor for format in (row, column) if format is not None}
    row_key = key[0] if key is not None and rowwise.stochastic else None
    column_key = key[1] if key is not None and columnwise.stochastic else None
    amax = None
    # The kernel that takes an amax rounds to nearest, and rotated values have another one.
    plain = row_key is column_key is None and not columnwise.rotate
    if x.is_cuda and torch.compiler.is_compiling() and x.numel():
        # There the compiler finds it while it makes x.
        scaled_by_it = per_tensor == {True} and plain and scaling.multiplier is None
        if scaled_by_it or (per_tensor == {False} and not (scales_tell(row) and scales_tell(column))):
            amax = tensor_amax(x)
    found = quantize_operand(
        x,
        row,
        column,
        amax=amax,
        multiplier=scaling.multiplier,
        row_key=row_key,
        column_key=column_key,
        rotate=columnwise.rotate,
        eps=scaling.eps,
    )
    if found.amax is not None and scaling.history is not None:
        record(scaling.history, found.amax)
    if scaling.observed is not None:
        observe_operand(scaling.observed, operand, x, found, rowwise, columnwise)
    return (found.row if row is not None else [x]), found.column


def _product(
    name: Product,
    operands: tuple[list[Tensor], Format | None, list[Tensor], Format | None],
    size: Sequence[int],
    recipe: Recipe,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    columnwise: bool = False,
    index: int | None = None,
) -> Tensor:
    """a @ b^T for (a, its format, b, its format) and size (rows of b, contracted length)."""
    a, a_format, b, b_format = operands
    left, right = Matrix(a, a_format), Matrix(b, b_format, transposed=columnwise)
    return multiply(left, right, *size, bias, dtype, fast_accum=name in recipe.fast_accum, index=index)


def _dgrad(row: list[Tensor], group: Tensor, parts: list[Tensor], index: int | None, ctx: Any, recipe: Recipe) -> Tensor:
    n, k = ctx.shape[-1], ctx.shape[-2]
    columnwise = recipe.weight_columnwise.format
    if ctx.format is None and columnwise is not None:
        # A weight whose rowwise operand is in high precision has no codes yet.
        weight = parts[0] if index is None else parts[0][index]
        operands = (row, recipe.gradient.format, quantize_operand(weight, None, columnwise).column, columnwise)
        return _product("dgrad", operands, (n, k), recipe, group.dtype)
    operands = (row, recipe.gradient.format, parts, ctx.format)
    return _product("dgrad", operands, (n, k), recipe, group.dtype, columnwise=True, index=index)


def _columns(saved: list[Tensor], format: Format | None, counts: Sequence[int] | None) -> list[list[Tensor]]:
    """x columnwise of each group, from what the forward saved."""
    if not saved:
        return []
    if format is None:
        return [[group.mT] for _, group in groups_of(saved[0], counts)]
    each = part_count(format)
    return [saved[first : first + each] for first in range(0, len(saved), each)]


def keys_of_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    """The keys of this backward, which moves the step on."""
    call: Call = ctx.call
    groups = len(ctx.counts) if call.grouped else None
    own = slice(None)
    if groups is not None and call.parallel is not None and call.parallel.style == "experts":
        # Experts are numbered over all ranks.
        own = slice(call.parallel.first, call.parallel.first + groups)
        groups = call.parallel.features
    if call.rank is None:
        return gradient_keys(ctx.key, groups=groups)[own]
    keys = gradient_keys(ctx.key, step=ctx.step, folds=(call.rank,), groups=groups)
    ctx.step.add_(1)
    return keys[own]


def bias_gradient(gradient: Tensor, counts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    if counts is None:
        return gradient.sum(0).to(dtype)
    if not counts:
        return gradient.new_empty((0, gradient.shape[1]), dtype=dtype)
    return torch.stack([group.sum(0) for _, group in groups_of(gradient, counts)]).to(dtype)
