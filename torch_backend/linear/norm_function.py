"""The autograd function of an RMSNorm and the linear layer behind it, of one rank, on a GPU.

    forward   a = norm(x), cast rowwise and columnwise as it is made;   y = a w^T
    backward  da = g w,  dw = g^T a,   dx and the gradient of the norm's weight from da, x and the scales of its rows

It saves what the norm and the layer one after the other would: x, a scale for each row, and the columnwise codes of a.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops import linear_ops
from ..custom_ops.cuda_reader import Read as MadeRun
from ..torch_internals import apply_of, rms_norm_backward
from .call import Call
from .delayed import record
from .linear_function import NO_STATE, LinearFunction, layer_backward, taken_apart


class NormFunction(torch.autograd.Function):
    """y from x, the norm's weight, weight, bias, a `Call`, the norm's eps, the cast, and the tensors of `LinearState`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        eps: float,
        cast: MadeRun,
        *state: Tensor | None,
    ) -> Tensor:
        history, scale, ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = ctx.state = state or NO_STATE
        needs_x, needs_weight, _ = call.needs
        rows = x.new_empty(x.shape[0], dtype=torch.float32)
        found = cast((x.detach(), None if norm_weight is None else norm_weight.detach(), rows), None, scale)
        row = call.recipe.input.format
        if scale is None and row is not None and row.block is None:
            found.pop()
        w = taken_apart([weight], call)
        y, *made = linear_ops.forward(x, *w[:3], bias, scale, call.recipe.text, needs_weight, w[3], None, found)
        if scale is not None:
            largest = made.pop()
            if history is not None and call.training:
                record(history, largest, now=True)
        kept = made[call.quantizes_weight :]
        parts = [weight] if needs_x else []
        ctx.call, ctx.eps, ctx.kept, ctx.parts, ctx.again = call, eps, len(kept), len(parts), None
        ctx.counts, ctx.shape, ctx.dtype, ctx.x_aligned = None, weight.shape, weight.dtype, False
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The last two are what gradients of gradients go to.
        ctx.save_for_backward(*kept, *parts, x, norm_weight, rows, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        rest = (None,) * (len(ctx.needs_input_grad) - 4)
        if torch.is_grad_enabled():
            return *_with_graph(ctx, gradient), *rest
        saved = list(ctx.saved_tensors)
        x, norm_weight, rows = saved[ctx.kept + ctx.parts :][:3]
        d_a, d_weight, d_bias, *_ = layer_backward(ctx, gradient, None, saved)
        d_x = d_norm = None
        if d_a is not None:
            wanted = [ctx.needs_input_grad[0], norm_weight is not None and ctx.needs_input_grad[1]]
            d_x, d_norm = rms_norm_backward(d_a, x, [x.shape[1]], rows[:, None], norm_weight, wanted)
        return d_x, d_norm, d_weight, d_bias, *rest


def _with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Runs the backward so that its results can be differentiated: that of the norm and the layer one after the other."""
    x, norm_weight, _, weight, bias = ctx.saved_tensors[ctx.kept + ctx.parts :]
    a = F.rms_norm(x, [x.shape[1]], norm_weight, ctx.eps)
    # The amax of a is recorded already.
    y = LinearFunction.apply(a, weight, bias, replace(ctx.call, training=False), None, *ctx.state)
    y = y[0] if isinstance(y, tuple) else y
    wanted = [one for one, needed in zip((x, norm_weight, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:4])


run_normed = apply_of(NormFunction)
"""`NormFunction.apply` where nothing is traced or transformed."""
