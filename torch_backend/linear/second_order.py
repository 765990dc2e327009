"""Gradients of the gradients of `linear`: those of the straight-through function.

    y  = cast(x) cast(w)^T      dx = cast(g) cast(w)      dw = cast(g)^T cast(x)

Every cast has the derivative of the identity, so derivatives of dx and dw are products with the dequantized other operand.
Where a graph of the backward is wanted (`create_graph=True`), dx and dw are made of dequantized operands, in float32 and by
operations that autograd knows; each operand has its value from its codes, and its gradient goes to what was cast:

    g    the gradient that the backward got, which has a graph
    w    the weight, which the forward saves anyway
    x    gone: the forward kept its codes alone. It returned an empty second output, whose gradient brings the one of x to the
         forward's own node, which passes it on (`OfInput`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import rotation
from blockfp.formats import Format
from blockfp.recipes import Cast

from ..custom_ops import ops


def values_of(parts: Sequence[Tensor], format: Format | None, columns: int) -> Tensor:
    """An operand's values in float32, from codes and scales, a quantized tensor, or values."""
    if len(parts) == 1:
        whole = parts[0].detach()
        return whole.float() if format is None else ops.dequantize_tensor(whole, torch.float32)
    scale = parts[2] if len(parts) > 2 else None
    assert format is not None
    return ops.dequantize(parts[0], parts[1], scale, format.name, torch.float32, columns, [0, 0])


def columnwise_values(parts: Sequence[Tensor], cast: Cast, rows: int) -> Tensor:
    """[rows, columns] of an operand that was quantized columnwise, its rotation undone."""
    values = values_of(parts, cast.format, rows)
    if cast.rotate:
        group, whole = rotation.GROUP, rows - rows % rotation.GROUP
        matrix = rotation.rotate(torch.eye(group, dtype=torch.float32, device=values.device))
        back = values[:, :whole].unflatten(1, (-1, group)) @ matrix.mT
        values = torch.cat([back.flatten(1), values[:, whole:]], 1)
    return values.mT


class StraightThrough(torch.autograd.Function):
    """A value that stands for `original`, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtype = original.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.to(ctx.dtype), None


class OfInput(torch.autograd.Function):
    """A value that stands for the input of a forward that kept none, for whose node its gradient waits in a list.

    Autograd runs that node after all that brings gradients, and each run has a number.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, waiting: list[tuple[int, Tensor]]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.waiting = waiting
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.waiting.append((torch._C._current_graph_task_id(), gradient))
        return gradient.new_empty(0), None, None


def taken(waiting: list[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor | None:
    """The sum of this run's gradients, of those that wait. Others came from runs that ended before the forward's node."""
    task = torch._C._current_graph_task_id()
    own = [gradient for number, gradient in waiting if number == task]
    waiting.clear()
    return sum(own[1:], own[0]).to(dtype) if own else None


def once_differentiable(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a backward whose results have no derivative: taking one raises RuntimeError with this reason."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *gradients: Tensor | None) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not any(gradient is not None and gradient.requires_grad for gradient in gradients):
                return results
            refuse = torch._C._functions.DelayedError(reason.encode(), len(results))  # pyright: ignore[reportAttributeAccessIssue]
            return refuse(*(None if one is None else one.detach().requires_grad_() for one in results))

        return run

    return decorate
