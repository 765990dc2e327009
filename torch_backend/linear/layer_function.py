"""The autograd function of every layer: what a call's forward saves, and what its backward returns.

    forward   y  = a w^T     a rowwise      weight rowwise      a = x, or what a prologue makes of x and up
    dgrad     da = g w       g rowwise      weight columnwise: derived from the rowwise codes inside the product
    wgrad     dw = g^T a     g columnwise   a columnwise: made in the forward, from the same read as rowwise, and saved

`Call.layer` says how operands are cast and multiplied: of one rank (`dense_layer`), in groups (`grouped_layer`), or by a
tensor-parallel group (`parallel_layer`). The rest is the same for every layer: the state of the recipe, what is saved, the
prologue's backward, and gradients of gradients.

The backward needs the weight, and a columnwise: its codes and scales, or the values, where autograd keeps these anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.layer.activations import activate, gate_and_up
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import apply_of
from . import prologue
from .call import Call
from .second_order import backward_with_graph, plus, taken, without_derivative

NO_STATE = (None,) * 7

_CUT = "a tensor-parallel layer has no gradient of its gradient: take it of a layer that is not cut, or leave out create_graph"
_CODED = "a product of rows that came as codes has no gradient of its gradient: leave out create_graph"


class LayerFunction(torch.autograd.Function):
    """y from x, up, weight, bias, a `Call`, what the kind of layer takes besides, and the tensors of `LinearState` or none.

    `up` is a prologue's second input, or None. Outside of compilers and transforms the state comes as one tuple, because
    autograd looks at each argument in both directions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        extra: Any,
        *state: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        state = state[0] if state and type(state[0]) is tuple else state or NO_STATE
        # Not saved: another microbatch's backward may write into them before this one's.
        history, scale, ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = state
        ctx.call, ctx.axes, ctx.again, ctx.x_laid, ctx.x_origin, ctx.counts = call, None, False, False, (0, 0), None
        ctx.coded = None
        y, kept, parts, beside = call.layer.forward(
            ctx, x, up, weight, bias, call, extra, scale, history if call.training else None
        )
        ctx.kept, ctx.parts, ctx.weight_beside = len(kept), len(parts), len(beside) > 0
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        if call.prologue is not None:
            # The layer's own tensors are what gradients of gradients go to.
            ctx.state = state
            ctx.save_for_backward(*kept, *parts, x, up, *((None, None) if call.traced else (weight, bias)))
            return y
        if call.traced or not (call.needs[0] and call.needs[1]) or (call.parallel is not None and call.layer.cuts):
            ctx.save_for_backward(*kept, *parts, *beside)
            return y
        # Receives second-order gradients of x.
        anchor = x.new_empty(0)
        ctx.waiting = []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *parts, *beside, anchor)
        return y, anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, carried: Tensor | None = None):
        call: Call = ctx.call
        rest = (None,) * (len(ctx.needs_input_grad) - 4)
        axes = ctx.axes
        if gradient is None:
            d_x = taken(ctx.waiting, ctx.saved_tensors[-1].dtype)
            return d_x if d_x is None or axes is None else d_x.reshape(*axes), None, None, None, *rest
        compiled = torch.compiler.is_compiling()
        if not compiled:
            if gradient.layout is not torch.strided:
                raise not_dense(gradient)
            if torch.is_grad_enabled():
                return *_with_graph(ctx, gradient), *rest
        gradient = gradient if axes is None else gradient.flatten(0, -2)
        saved = list(ctx.saved_tensors)
        first = ctx.kept + ctx.parts
        kept, parts, points = saved[: ctx.kept], saved[ctx.kept : first], saved[first : first + 2]
        del saved
        if not compiled:
            # From here on each copy lives until its product is done.
            ctx.maybe_clear_saved_tensors()
        d_x, d_weight, d_bias = call.layer.backward(ctx, gradient, kept, parts, points, compiled)
        d_up = None
        if call.prologue is not None and d_x is not None:
            d_x, d_up = prologue.backward(ctx, d_x, *points)
        if d_x is not None:
            if carried is not None:
                d_x = plus(d_x, taken(ctx.waiting, d_x.dtype))
            if axes is not None:
                d_x = d_x.reshape(*axes)
        return d_x, d_up, d_weight, d_bias, *rest


def not_dense(gradient: Tensor) -> TypeError:
    return TypeError(f"the gradient of a layer's output must be dense, got layout {gradient.layout}: pass it as to_dense()")


def _with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Returns gradients of x, up, weight and bias that can be differentiated again."""
    call: Call = ctx.call
    if call.prologue is not None:
        return _through_prologue(ctx, gradient)
    reason = _CUT if call.parallel is not None and call.layer.cuts else _CODED if ctx.coded is not None else None
    if reason is not None or isinstance(gradient, QuantizedTensor):
        return without_derivative(LayerFunction.backward, ctx, gradient, reason or _CODED)[:4]
    axes = ctx.axes
    gradient = gradient if axes is None else gradient.flatten(0, -2)
    d_x, *others = backward_with_graph(call.layer.group_by_group(ctx, gradient), gradient)
    return d_x if d_x is None or axes is None else d_x.reshape(*axes), None, *others


def _through_prologue(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """`_with_graph` of a layer with a prologue: of the activation, then of the layer without one."""
    gate, up, weight, bias = ctx.saved_tensors[ctx.kept + ctx.parts :]
    activation, layout = ctx.call.prologue
    a = activate(*gate_and_up(gate, up, layout), activation)
    # The amax of a is recorded already.
    y = LayerFunction.apply(a, None, weight, bias, replace(ctx.call, training=False, prologue=None), None, *ctx.state)
    y = y[0] if isinstance(y, tuple) else y
    wanted = [one for one, needed in zip((gate, up, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:4])


run_layer = apply_of(LayerFunction)
"""`LayerFunction.apply` where nothing is traced or transformed."""
