"""Second-order gradients of `linear`: derivatives of its straight-through backward.

    y  = cast(x) cast(w)^T      dx = cast(g) cast(w)      dw = cast(g)^T cast(x)

Every cast has the identity's derivative, so derivatives of dx and dw are products with the other operand, dequantized. With
`create_graph=True`, dx and dw are computed from dequantized operands, in float32 and by differentiable operations. Each operand
takes its value from its codes and passes its gradient to the tensor that was cast:

    g    the backward's incoming gradient, which has a graph
    w    the weight, which the forward saves anyway
    x    the forward saved only its codes. It returned an empty second output, through which x's gradient reaches the forward's
         node, which passes it on (`OfInput`)

The derivative of the gradient isn't symmetric like a Hessian, because rowwise and columnwise casts differ. JAX's products in
another order of differentiation (forward over reverse) therefore differ; docs/jax.md has figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import rotation
from blockfp.formats import Format
from blockfp.kernels.operand_cast import operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe

from ..ops import dequantize_plans
from ..ops.quantize.cuda_layouts import transpose_words
from ..ops.quantize.quantize_plans import quantize_matrix
from ..torch_internals import DelayedError, current_graph_task, dispatch_modes
from .call import Call, bias_gradient, groups_of, keys_of_gradient
from .delayed import multiplier
from .operands import Scaling, columnwise_weight, kept_inputs, quantized, weight_operand


def values_of(parts: Sequence[Tensor], format: Format | None, columns: int) -> Tensor:
    """Returns an operand's values in float32, from codes and scales, a quantized tensor, or values."""
    if len(parts) == 1:
        whole = parts[0].detach()
        return whole.float() if format is None else dequantize_plans.dequantize_tensor(whole, torch.float32)
    scale = parts[2] if len(parts) > 2 else None
    assert format is not None
    return dequantize_plans.dequantize(parts[0], parts[1], scale, format.name, torch.float32, columns, [0, 0])


def columnwise_values(parts: Sequence[Tensor], cast: Cast, rows: int) -> Tensor:
    """Returns the values [rows, columns] of an operand that was quantized columnwise, without its rotation."""
    values = values_of(parts, cast.format, rows)
    if cast.rotate:
        group, whole = rotation.GROUP, rows - rows % rotation.GROUP
        matrix = rotation.rotate(torch.eye(group, dtype=torch.float32, device=values.device))
        back = values[:, :whole].unflatten(1, (-1, group)) @ matrix.mT
        values = torch.cat([back.flatten(1), values[:, whole:]], 1)
    return values.mT


class StraightThrough(torch.autograd.Function):
    """Returns `value`, and passes its gradient to `original`."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = original.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return gradient.to(ctx.dtype), None


class OfInput(torch.autograd.Function):
    """Returns `value` in place of an input that the forward didn't save; appends its gradient to a list for the forward's node.

    Autograd runs that node after all nodes that feed it; graph task numbers tell concurrent backwards apart.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, waiting: list[tuple[int, Tensor]]) -> Tensor:
        ctx.waiting = waiting
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        ctx.waiting.append((current_graph_task(), gradient))
        return gradient.new_empty(0), None, None


def taken(waiting: list[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor | None:
    """Empties the list of pending gradients and returns the sum of this graph task's.

    Others belong to backwards that ended before reaching the forward's node.
    """
    task = current_graph_task()
    own = [gradient for number, gradient in waiting if number == task]
    waiting.clear()
    return sum(own[1:], own[0]).to(dtype) if own else None


def plus(d_x: Tensor, carried: Tensor | None) -> Tensor:
    """Adds the result of `taken` to a gradient, unless it is None."""
    return d_x if carried is None else d_x + carried


def cast_again(ctx: Any, kept: list[Tensor], laid: bool = False) -> list[Tensor]:
    """Quantizes the saved x columnwise, for a forward that saved its values; returns the parts, `laid` out or not."""
    recipe, scale = ctx.call.recipe, ctx.input_scale
    cast = recipe.input_columnwise
    if ctx.call.direct and not dispatch_modes():
        how = operand_cast(None, cast, recipe.eps, given=None if scale is None else "multiplier", laid=(False, laid))
        parts = quantize_matrix(kept[0], how, None, scale)
        return parts if scale is None else parts[:-1]
    scaling = Scaling(recipe.eps, scale)
    column = quantized(kept[0], "input", HIGH_PRECISION, cast, scaling, laid=(False, laid))[1]
    assert column is not None
    return list(column.parts)


def backward_with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Computes differentiable gradients of x, weight and bias."""
    call: Call = ctx.call
    recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
    saved, lengths = list(ctx.saved_tensors), ctx.counts or [gradient.shape[0]]
    kept, parts = saved[: ctx.kept], saved[ctx.kept : ctx.kept + ctx.parts]
    if ctx.again:
        kept = cast_again(ctx, kept)
    elif ctx.x_laid:
        kept = [kept[0], transpose_words(kept[1])[: ctx.shape[-1]]]
    with torch.no_grad():
        rows, columns = _gradient_values(ctx, gradient.detach())
        cast = recipe.input_columnwise
        inputs = kept_inputs(kept, cast.format, ctx.counts, ctx.x_origin)
        x = [columnwise_values(one.parts, cast, length) for one, length in zip(inputs, lengths, strict=needs_weight)]
        w = _weight_values(parts, ctx, recipe) if needs_x else None
    d_x = d_weight = None
    # Autocast must not change the products' dtypes.
    with torch.autocast(gradient.device.type, enabled=False):
        if w is not None:
            w = StraightThrough.apply(saved[ctx.kept + ctx.parts] if ctx.weight_beside else parts[0], w)
            weights = [w] if ctx.counts is None else w.unbind()
            g = StraightThrough.apply(gradient, torch.cat(rows)).split(lengths)
            d_x = torch.cat([one @ weight for one, weight in zip(g, weights, strict=True)]).to(gradient.dtype)
        if needs_weight:
            whole = torch.cat(x)
            x = (OfInput.apply(saved[-1], whole, ctx.waiting) if needs_x else whole).split(lengths)
            g = StraightThrough.apply(gradient, torch.cat(columns)).split(lengths)
            each = [one.mT @ other for one, other in zip(g, x, strict=True)]
            d_weight = (each[0] if ctx.counts is None else torch.stack(each)).to(ctx.dtype)
    if d_x is not None and needs_weight:
        d_x = plus(d_x, taken(ctx.waiting, d_x.dtype))
    d_bias = bias_gradient(gradient, ctx.counts, ctx.bias_dtype) if needs_bias else None
    return d_x, d_weight, d_bias


def _gradient_values(ctx: Any, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each group's gradient as cast rowwise and columnwise, [tokens, out]; unneeded directions keep the original."""
    recipe, (needs_x, needs_weight, _) = ctx.call.recipe, ctx.call.needs
    rowwise = recipe.gradient if needs_x else HIGH_PRECISION
    columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
    keys = keys_of_gradient(ctx, gradient) if rowwise.stochastic or columnwise.stochastic else None
    scaling = Scaling(
        recipe.eps, multiplier(gradient, ctx.scale, ctx.call, "gradient", counts=ctx.counts), ctx.history, ctx.observed
    )
    rows, columns = [], []
    for index, group in groups_of(gradient, ctx.counts):
        key = None if keys is None else keys[index or 0]
        row, column = quantized(group, "gradient", rowwise, columnwise, scaling, None, key)
        rows.append(values_of(row.parts, rowwise.format, group.shape[1]))
        columns.append(columnwise_values([group.mT] if column is None else column.parts, columnwise, group.shape[0]))
    return rows, columns


def _weight_values(parts: list[Tensor], ctx: Any, recipe: Recipe) -> Tensor:
    """Returns the weight that dx is computed with, float32 [.., out, in]."""
    columnwise = recipe.weight_columnwise
    if ctx.format is None and recipe.weight.format is not None:
        # It was quantized at use, and its codes were not saved.
        made = weight_operand(parts[0].detach(), None, recipe.weight, None)
        return values_of(made.parts, made.format, ctx.shape[-1])
    if ctx.format is not None or columnwise.format is None:
        return values_of(parts, ctx.format, ctx.shape[-1])
    matrices = parts[0].unbind() if parts[0].ndim > 2 else (parts[0],)
    each = [values_of(columnwise_weight(one, columnwise, None).parts, columnwise.format, ctx.shape[-2]).mT for one in matrices]
    return torch.stack(each) if parts[0].ndim > 2 else each[0]


def without_derivative(backward: Callable[..., Any], ctx: Any, gradient: Tensor, reason: str) -> Any:
    """Runs a backward in grad mode; differentiating its results raises RuntimeError with this reason."""
    with torch.no_grad():
        results = backward(ctx, gradient)
    if not gradient.requires_grad:
        return results
    refuse = DelayedError(reason.encode(), len(results))
    return refuse(*(None if one is None else one.detach().requires_grad_() for one in results))
