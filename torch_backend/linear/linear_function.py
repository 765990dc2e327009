"""The autograd function behind `linear` of one rank, over `custom_ops/linear_ops`.

    forward   y  = x w^T     x rowwise      weight rowwise
    dgrad     dx = g w       g rowwise      weight columnwise: derived from the rowwise codes inside the product
    wgrad     dw = g^T x     g columnwise   x columnwise: made in the forward, from the same read as rowwise, and saved

What it saves for the backward is the codes and scales of x columnwise, or x where autograd keeps it anyway; and the weight as
it is. Layers that a tensor-parallel group shares have a function of their own (`shared_function`), with collectives between
casts and products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION

from ..custom_ops import linear_ops
from ..custom_ops.products import multiply
from ..torch_internals import KEEPS_RESULT, VIEWS, apply_of, dispatch_modes
from .call import Call, bias_gradient, keys_of_gradient
from .delayed import multiplier, record
from .observe import observe_again
from .operands import Scaling, amax_where_compiled, begins_with_a_block, kept_aligned, quantized
from .second_order import backward_with_graph, cast_again, plus, taken
from .weight_operands import weight_operand

NO_STATE = (None,) * 7


def layer_backward(
    ctx: Any, gradient: Tensor | None, carried: Tensor | None = None, saved: list[Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Runs the backward of a layer on one rank.

    Args:
        ctx: of its forward.
        gradient, carried: of the forward's outputs.
        saved: the tensors that it saved, which checkpoints hand out once; the list is emptied. From `ctx` by default.

    Returns:
        The gradients of x, weight and bias, and None for all else.
    """
    call: Call = ctx.call
    recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
    compiled = torch.compiler.is_compiling()
    rest = (None,) * (len(ctx.needs_input_grad) - 3)
    if gradient is None:
        return taken(ctx.waiting, ctx.saved_tensors[-1].dtype), None, None, *rest
    if not compiled and gradient.layout is not torch.strided:
        raise TypeError(f"the gradient of a layer's output must be dense, got layout {gradient.layout}: pass it as to_dense()")
    if not compiled and torch.is_grad_enabled():
        return *backward_with_graph(ctx, gradient), *rest
    saved = list(ctx.saved_tensors) if saved is None else saved
    kept, parts, x_aligned = saved[: ctx.kept], saved[ctx.kept : ctx.kept + ctx.parts], ctx.x_aligned
    if ctx.again is not None:
        x_aligned = call.aligns[1]
        kept = ctx.again(ctx, saved, x_aligned)
    del saved[:]
    if not compiled:
        # From here on each copy lives until its product is done.
        ctx.maybe_clear_saved_tensors()
    d_x = d_weight = d_bias = None
    if needs_x or needs_weight:
        row, column = recipe.gradient if needs_x else None, recipe.gradient_columnwise if needs_weight else None
        formats = (None if row is None else row.format, None if column is None else column.format)
        stochastic = (row is not None and row.stochastic) or (column is not None and column.stochastic)
        now = call.direct and type(gradient) is Tensor and not gradient.is_meta and not dispatch_modes()
        keys = keys_of_gradient(ctx, gradient, now=now, single=True) if stochastic else None
        given = None if formats == (None, None) else ctx.scale
        if given is not None and not call.has_scales:
            given = multiplier(gradient, given, call, "gradient")
        amax = None
        if compiled:
            plain = keys is None and (column is None or not column.rotate)
            amax = amax_where_compiled(gradient, *formats, plain, given)
        run = linear_ops.backward if now else linear_ops.linear_backward
        w = (None, None, None, (0, 0))
        if parts:
            w = taken_apart(parts, call) if call.direct else (parts[0], None, None, (0, 0))
        del parts
        if ctx.observed is not None:
            known = {"amax": amax, "multiplier": given, "keys": keys}
            observe_again(ctx.observed, "gradient", gradient, row, column, recipe.eps, **known)
        options = (needs_x, needs_weight, ctx.shape[-1], ctx.dtype, w[3], x_aligned)
        results = run(gradient, kept, *w[:3], amax, given, keys, recipe.text, *options)
        if given is not None and ctx.history is not None:
            record(ctx.history, results[-1], now=now)
        d_weight = results[int(needs_x)] if needs_weight else None
        d_x = results[0] if needs_x else None
        if d_x is not None and carried is not None:
            d_x = plus(d_x, taken(ctx.waiting, d_x.dtype))
    if needs_bias:
        d_bias = bias_gradient(gradient, None, ctx.bias_dtype)
    return d_x, d_weight, d_bias, *rest


class LinearFunction(torch.autograd.Function):
    """y from x, weight, bias, a `Call`, casts of x that layers share, and the tensors of `LinearState` or none.

    x is [tokens, in], or where the call `takes_axes` [.., in]; y is alike. Where nothing traces or transforms them the tensors
    of the state come as one tuple: autograd looks at each argument, in both directions.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shared: linear_ops.Casts | None, *state: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        state = state[0] if state and type(state[0]) is tuple else state or NO_STATE
        history, scale, ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = state
        recipe, (needs_x, needs_weight, _), count = call.recipe, call.needs, call.quantizes_weight
        if scale is not None and not call.has_scales:
            scale = multiplier(x, scale, call, "input")
        rows, leading, ctx.axes = x, [], None
        if x.ndim > 2:
            *leading, _ = ctx.axes = x.shape
            rows = x.flatten(0, -2)
        columnwise = recipe.input_columnwise if needs_weight else HIGH_PRECISION
        format = columnwise.format
        ctx.again, ctx.x_aligned, again = None, False, False
        if format is not None and not call.traced and ctx.observed is None:
            node: Any = x.grad_fn
            number = x.output_nr
            while type(node).__name__ in VIEWS:
                node, number = node.next_functions[0]
            # Codes would lie beside values that stay anyway.
            again = number == 0 and type(node).__name__ in KEEPS_RESULT
            if again:
                ctx.again, columnwise = cast_again, HIGH_PRECISION
        if call.direct and not dispatch_modes():
            given = scale if recipe.input.format is not None or format is not None else None
            w = taken_apart([weight], call)
            y, *made = linear_ops.forward(rows, *w[:3], bias, given, recipe.text, needs_weight and not again, w[3], shared)
            if given is not None:
                largest = made.pop()
                if history is not None and call.training:
                    record(history, largest, now=True)
            if ctx.observed is not None:
                observe_again(ctx.observed, "input", rows, recipe.input, columnwise, recipe.eps, multiplier=given)
            kept = made[count:]
            if ctx.axes is not None:
                # No view, which FSDP2 warns of and in-place operations refuse; torch's own linear gives none either.
                y.resize_(*leading, y.shape[1])
        else:
            # Layers that read one input share its casts: compilers know equal operations. Checkpoints keep products alone.
            scaling = Scaling(call.eps, scale, history if call.training else None, ctx.observed)
            operand = weight_operand(weight, call.stored, recipe.weight, None)
            aligned = (False, False)
            if ctx.observed is None:
                ctx.x_aligned = call.traced and needs_weight and kept_aligned(call)
                aligned = (call.aligns[0] and begins_with_a_block(operand), ctx.x_aligned)
            row, column = quantized(x, "input", recipe.input, columnwise, scaling, aligned=aligned)
            size, fast = (weight.shape[0], weight.shape[1]), "forward" in recipe.fast_accum
            y = multiply(row, operand, size, bias, x.dtype, fast_accum=fast, exact=recipe.exact_products)
            kept = [] if column is None else list(column.parts)
        if again or (needs_weight and format is None):
            kept = [rows]
            # Of now: it may move on before the backward.
            ctx.input_scale = scale.clone() if again and scale is not None else None
        parts = [weight] if needs_x else []
        ctx.call, ctx.counts, ctx.kept, ctx.parts, ctx.x_origin = call, None, len(kept), 1 if needs_x else 0, (0, 0)
        ctx.format, ctx.weight_beside = call.stored, False
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        if call.traced:
            ctx.save_for_backward(*kept, *parts)
            return y
        if not (needs_x and needs_weight):
            ctx.save_for_backward(*kept, *parts)
            return y
        # What gradients of gradients of x go to.
        anchor = x.new_empty(0)
        ctx.waiting = []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *parts, anchor)
        return y, anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, carried: Tensor | None = None):
        if ctx.axes is None:
            return layer_backward(ctx, gradient, carried)
        d_x, *others = layer_backward(ctx, None if gradient is None else gradient.flatten(0, -2), carried)
        return None if d_x is None else d_x.reshape(*ctx.axes), *others


def taken_apart(parts: list[Tensor], call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, Any]:
    """Codes, scales and tensor scale of the weight, and its origin; of values, these alone."""
    if len(parts) > 1:
        return parts[0], parts[1], parts[2] if len(parts) > 2 else None, (0, 0)
    weight: Any = parts[0]
    if call.stored is None:
        return weight, None, None, (0, 0)
    geometry = weight.geometry
    return weight.codes, weight.scales, weight.tensor_scale, geometry.origin or geometry.start


run_linear = apply_of(LinearFunction)
"""`LinearFunction.apply` where nothing is traced or transformed."""
