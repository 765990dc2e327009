"""A layer of one matrix on one rank, over `ops/layer/linear_ops`.

Eager code runs a plan for both casts and the product. Compiled code, modes and tensors without memory run an op for the casts
and one for the product, so that compilers see where layers share a cast.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockfp.recipes import HIGH_PRECISION

from ..ops.layer import linear_ops
from ..ops.product.products import in_order, multiply
from ..torch_internals import KEEPS_RESULT, VIEWS, dispatch_modes
from . import prologue
from .call import Call, Layer, Made, bias_gradient, keys_of_gradient
from .delayed import multiplier, record
from .observe import observe_again
from .operands import Scaling, amax_where_compiled, begins_with_a_block, quantized, weight_operand
from .second_order import cast_again

_VALUES = (None, None, (0, 0))


class DenseLayer(Layer):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        weight: Any,
        bias: Tensor | None,
        call: Call,
        extra: linear_ops.Casts | None,
        scale: Tensor | None,
        history: Tensor | None,
    ) -> Made:
        recipe, (needs_x, needs_weight, _), gating = call.recipe, call.needs, call.prologue
        if scale is not None and not call.has_scales:
            scale = multiplier(x, scale, call, "input")
        rows, leading = x, []
        if x.ndim > 2:
            *leading, _ = ctx.axes = x.shape
            rows = x.flatten(0, -2)
        row, columnwise = recipe.input, recipe.input_columnwise if needs_weight else HIGH_PRECISION
        format = columnwise.format
        if gating is not None:
            # Another pass for the amax costs more than NVFP4's few codes are worth.
            both_at_once = format is not None and format is row.format and format.scale.two_level
            ctx.again = needs_weight and not call.traced and not both_at_once
        elif format is not None and not call.traced and ctx.observed is None:
            # Codes would lie beside values that another operation keeps anyway.
            node: Any = x.grad_fn
            number = x.output_nr
            while type(node).__name__ in VIEWS:
                node, number = node.next_functions[0]
            ctx.again = number == 0 and type(node).__name__ in KEEPS_RESULT
        again, amax = ctx.again, None
        if again:
            columnwise = HIGH_PRECISION
        if call.direct and not dispatch_modes():
            given = scale if row.format is not None or format is not None else None
            w = weight, *_VALUES
            if call.stored is not None:
                geometry = weight.geometry
                w = weight.codes, weight.scales, weight.tensor_scale, geometry.origin or geometry.start
            found = None
            if gating is not None:
                laid = call.lays[0] and (w[3] == (0, 0) or in_order(recipe.weight.format, w[3], False))
                parts, amax = prologue.cast(rows, up, gating, row, columnwise, None, given, call.eps, True, (laid, False))
                parts = parts if given is None else [*parts, amax]
                found = linear_ops.Found(parts, laid, weight.shape[1])
            y, *made = linear_ops.forward(
                rows, *w[:3], bias, given, recipe.text, needs_weight and not again, w[3], extra, found, call.keeps_laid
            )
            if given is not None:
                largest = made.pop()
                if history is not None:
                    record(history, largest, now=True)
            if ctx.observed is not None:
                observe_again(ctx.observed, "input", rows, row, columnwise, recipe.eps, multiplier=given)
            kept, ctx.x_laid = made[call.quantizes_weight :], needs_weight and call.keeps_laid
            if leading:
                # No view, which FSDP2 warns of and in-place operations refuse; torch's own linear gives none either.
                y.resize_(*leading, y.shape[1])
        else:
            operand = weight_operand(weight, call.stored, recipe.weight, None)
            laid = (False, False)
            if ctx.observed is None:
                ctx.x_laid = needs_weight and call.keeps_laid
                laid = (call.lays[0] and begins_with_a_block(operand), ctx.x_laid)
            if gating is None:
                scaling = Scaling(call.eps, scale, history, ctx.observed)
                left, right = quantized(x, "input", row, columnwise, scaling, laid=laid)
                kept = [] if right is None else list(right.parts)
            else:
                left, kept, amax = prologue.quantized(x, up, call, columnwise, scale, laid)
                if amax is not None and scale is not None and history is not None:
                    record(history, amax)
            size, fast = (weight.shape[0], weight.shape[1]), "forward" in recipe.fast_accum
            y = multiply(left, operand, size, bias, x.dtype, fast_accum=fast, exact=recipe.exactness)
        if again:
            # Of now: it may move on before the backward.
            ctx.input_scale, ctx.input_amax = None if scale is None else scale.clone(), amax
        if gating is None and (again or (needs_weight and format is None)):
            kept = [rows]
        ctx.format = call.stored
        return y, kept, [weight] if needs_x else [], []

    @staticmethod
    def backward(
        ctx: Any, gradient: Any, kept: list[Tensor], parts: list[Any], points: list[Any], compiled: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        call: Call = ctx.call
        recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
        source = None
        if type(gradient) is prologue.Source:
            # From here on the gate stands for the gradient, which is as large.
            source, gradient = gradient, gradient.gate
        x_laid = ctx.x_laid
        if ctx.again:
            x_laid = call.lays[1]
            kept = cast_again(ctx, kept, x_laid) if call.prologue is None else prologue.cast_again(ctx, points, x_laid)
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
            amax = found = None
            if source is None and compiled:
                plain = keys is None and (column is None or not column.rotate)
                amax = amax_where_compiled(gradient, *formats, plain, given)
            weight = parts.pop() if parts else None
            w = weight, *_VALUES
            if weight is not None and call.direct and call.stored is not None:
                geometry = weight.geometry
                w = weight.codes, weight.scales, weight.tensor_scale, geometry.origin or geometry.start
            del weight
            if ctx.observed is not None:
                known = {"amax": amax, "multiplier": given, "keys": keys}
                observe_again(ctx.observed, "gradient", gradient, row, column, recipe.eps, **known)
            if source is not None:
                assert given is not None
                found = prologue.cast_gradient(source, call, given, now)
                source = None
            run = linear_ops.backward if now else linear_ops.linear_backward
            options = (needs_x, needs_weight, ctx.shape[-1], ctx.dtype, w[3], x_laid, found)
            results = run(gradient, kept, *w[:3], amax, given, keys, recipe.text, *options)
            if given is not None and ctx.history is not None:
                record(ctx.history, results[-1], now=now)
            d_weight = results[int(needs_x)] if needs_weight else None
            d_x = results[0] if needs_x else None
        if needs_bias:
            d_bias = bias_gradient(gradient, None, ctx.bias_dtype)
        return d_x, d_weight, d_bias
