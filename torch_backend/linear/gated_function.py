"""The autograd function of a linear layer behind an activation, of one rank.

    forward   a = activation(gate) * up, cast rowwise and columnwise as it is made;   y = a w^T
    backward  da = g w,  dw = g^T a,   d_gate, d_up from da, gate and up

It saves gate and up, which autograd keeps for the activation anyway, and the weight. What the activation makes is kept nowhere,
and its columnwise codes are made again in the backward, of gate and up; but for NVFP4's in eager code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION, Cast

from ..custom_ops import gated_ops
from ..custom_ops.activations import Activation, Layout, activate, gate_and_up, gradients, joined
from ..custom_ops.library import runs_now
from ..custom_ops.products import Matrix, multiply, multiply_parts
from ..custom_ops.quantize_plans import Aligned, part_count
from ..torch_internals import apply_of
from .call import Call
from .delayed import record
from .linear_function import NO_STATE, LinearFunction, layer_backward, taken_apart
from .operands import begins_with_a_block, kept_aligned
from .weight_operands import weight_operand


class Gating(NamedTuple):
    """The activation before the layer (`custom_ops.activations`).

    Attributes:
        activation: its name.
        layout: where gate and up lie.
    """

    activation: Activation
    layout: Layout


class GatedFunction(torch.autograd.Function):
    """y from gate, up or None, weight, bias, a `Call`, a `Gating`, and the tensors of `LinearState` or none."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        gating: Gating,
        *state: Tensor | None,
    ) -> Tensor:
        history, scale, ctx.history, ctx.scale, ctx.key, ctx.step, ctx.observed = ctx.state = state or NO_STATE
        recipe, (needs_x, needs_weight, _) = call.recipe, call.needs
        row = recipe.input.format
        assert row is not None
        direct = call.direct and runs_now(gate)
        column = recipe.input_columnwise if needs_weight else HIGH_PRECISION
        # Another pass for the amax costs more than those few codes are worth.
        at_once = not call.traced and column.format is row and row.scale.two_level
        known = (scale, call.eps, direct)
        operand = weight_operand(weight, call.stored, recipe.weight, None)
        if direct:
            *parts, origin = taken_apart(list(operand.parts), call)
            parts = [part for part in parts if part is not None]
            operand = Matrix(parts, operand.format, (origin[0], origin[1]))
        aligned = call.aligns[0] and begins_with_a_block(operand)
        by_column = column if at_once else HIGH_PRECISION
        made, amax = _cast(gate, up, gating, recipe.input, by_column, None, *known, (aligned, False))
        if amax is not None and scale is not None and history is not None and call.training:
            record(history, amax, now=direct)
        count = part_count(row)
        a, kept = Matrix(made[:count], row, aligned=aligned), made[count:]
        ctx.x_aligned = call.traced and needs_weight and kept_aligned(call)
        if call.traced and needs_weight:
            # Compilers move it to the backward, which alone needs it.
            kept, _ = _cast(gate, up, gating, HIGH_PRECISION, column, amax, *known, (False, ctx.x_aligned))
        n, k = weight.shape[0], weight.shape[1]
        fast, exact = "forward" in recipe.fast_accum, recipe.exact_products
        if direct:
            y = multiply_parts(a, operand, n, k, bias, gate.dtype, fast, None, exact)
        else:
            y = multiply(a, operand, (n, k), bias, gate.dtype, fast_accum=fast, exact=exact)
        parts = [weight] if needs_x else []
        ctx.call, ctx.gating, ctx.kept, ctx.parts = call, gating, len(kept), len(parts)
        ctx.again = None if kept or not needs_weight else _cast_again
        # Of now: it may move on before the backward.
        ctx.input_scale = None if scale is None or call.traced or not needs_weight else scale.clone()
        ctx.input_amax = None if call.traced or not needs_weight else amax
        ctx.counts, ctx.shape, ctx.dtype, ctx.bias_dtype = (
            None,
            weight.shape,
            weight.dtype,
            None if bias is None else bias.dtype,
        )
        # What gradients of gradients go to; else what is saved anyway.
        beside = (None, None) if call.traced else (weight, bias)
        ctx.save_for_backward(*kept, *parts, gate, up, *beside)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        call: Call = ctx.call
        recipe, (_, needs_weight, _) = call.recipe, call.needs
        rest = (None,) * (len(ctx.needs_input_grad) - 4)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            return *_with_graph(ctx, gradient), *rest
        saved = list(ctx.saved_tensors)
        gate, up = _gate_and_up(ctx, saved)
        d_a, d_weight, d_bias, *_ = layer_backward(ctx, gradient, None, saved)
        d_gate = d_up = None
        if d_a is not None:
            # A compiler makes one kernel of the operations and of the amax that the cast behind them wants.
            casts = (recipe.gradient, recipe.gradient_columnwise if needs_weight else HIGH_PRECISION)
            per_tensor = any(cast.format is not None and cast.format.block is None for cast in casts)
            apart = torch.compiler.is_compiling() and ctx.scale is None and per_tensor
            d_gate, d_up = _through(d_a, gate, up, ctx.gating, apart, call.direct and runs_now(gradient))
        return d_gate, d_up, d_weight, d_bias, *rest


def _gate_and_up(ctx: Any, saved: list[Tensor]) -> list[Any]:
    return saved[ctx.kept + ctx.parts : ctx.kept + ctx.parts + 2]


def _cast_again(ctx: Any, saved: list[Tensor], aligned: bool = False) -> list[Tensor]:
    """Returns the columnwise parts of what the activation makes, of which a forward kept none; `aligned` if so."""
    gate, up = _gate_and_up(ctx, saved)
    recipe, direct = ctx.call.recipe, ctx.call.direct and runs_now(gate)
    known = (ctx.input_amax, ctx.input_scale, ctx.call.eps, direct)
    return _cast(gate, up, ctx.gating, HIGH_PRECISION, recipe.input_columnwise, *known, (False, aligned))[0]


def _through(
    gradient: Tensor, gate: Tensor, up: Tensor | None, gating: Gating, apart: bool, direct: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of gate and up, as they were given; `apart`: by PyTorch's operations."""
    activation, layout = gating
    if apart:
        d_gate, d_up = gradients(gradient, *gate_and_up(gate, up, layout), activation)
        return (d_gate, d_up) if d_up is None or layout == "apart" else (joined(d_gate, d_up, layout), None)
    run = gated_ops.gated_gradient if direct else gated_ops.gradient_op
    d_gate, *rest = run(gradient, gate, up, activation, layout)
    return d_gate, rest[0] if rest else None


def _cast(
    gate: Tensor,
    up: Tensor | None,
    gating: Gating,
    row: Cast,
    column: Cast,
    amax: Tensor | None,
    multiplier: Tensor | None,
    eps: float,
    direct: bool,
    aligned: Aligned,
) -> tuple[list[Tensor], Tensor | None]:
    """The parts of what the activation makes, in the directions that have a format, and its amax where that has one scale.

    An amax that is known is taken where it says all.
    """
    format = row.format or column.format
    assert format is not None
    # Not per_tensor: a compiler may not be the first to ask for a cached property.
    whole = format.block is None
    amax = amax if whole and multiplier is None else None
    if direct:
        options = (amax, multiplier, column.rotate, eps, aligned)
        parts = gated_ops.quantize_gated(gate, up, *gating, row.format, column.format, *options)
    else:
        names = [None if cast.format is None else cast.format.name for cast in (row, column)]
        parts = gated_ops.quantize_op(gate, up, *gating, *names, amax, multiplier, column.rotate, eps, *aligned)
    return (parts[:-1], parts[-1]) if whole else (parts, None)


def _with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Runs the backward so that its results can be differentiated: that of the activation and the layer one after the other."""
    gate, up, weight, bias = ctx.saved_tensors[ctx.kept + ctx.parts :]
    a = activate(*gate_and_up(gate, up, ctx.gating.layout), ctx.gating.activation)
    # The amax of a is recorded already.
    y = LinearFunction.apply(a, weight, bias, replace(ctx.call, training=False), None, *ctx.state)
    y = y[0] if isinstance(y, tuple) else y
    wanted = [one for one, needed in zip((gate, up, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:4])


run_gated = apply_of(GatedFunction)
"""`GatedFunction.apply` where nothing is traced or transformed."""
