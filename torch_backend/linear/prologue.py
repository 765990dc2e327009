"""The prologue of a layer: an activation whose output is cast as it is made, and never kept.

    forward   a = activation(gate) * up, cast rowwise and columnwise as it is made;   y = a w^T
    backward  da = g w,  dw = g^T a,   d_gate, d_up from da, gate and up

The layer saves gate and up, which autograd keeps for the activation anyway. The columnwise codes of a are made again in the
backward, of gate and up; but for NVFP4's in eager code. `ops.layer.activations` has a row for each activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.kernels import switch
from blockfp.kernels.operand_cast import Pair, given_of, operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe

from ..ops import cuda
from ..ops.kernels import kernels_for
from ..ops.layer import gated_kernels, gated_ops, linear_ops
from ..ops.layer.activations import Gating, activate, gate_and_up, gradients, joined
from ..ops.library import runs_now
from ..ops.product.products import Matrix
from ..ops.quantize.quantize_plans import part_count
from ..quantized_tensor.tensor import DTYPES
from ..torch_internals import assume_constant_result, functorch_is_active, jit_traces
from .call import Call


def takes(gate: Tensor, up: Tensor | None, weight: Tensor, recipe: Recipe, state: Any) -> bool:
    """Says whether a layer with a prologue computes what the activation and the layer would.

    It doesn't where something needs the values of the activation (`observe`, operands in high precision, delayed scaling that
    has no scale yet), in transforms of torch.func, under torch.jit.trace, under an autocast to another dtype, with DTensors, or
    where the layer would raise.
    """
    if recipe.input.format is None or recipe.input_columnwise.format is None:
        return False
    if functorch_is_active() or jit_traces():
        return False
    if state is not None and (state.observed is not None or (state.input_scale is not None and not state.has_scales)):
        return False
    kind = gate.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not gate.dtype:
        return False
    if type(gate) is not Tensor or gate.dtype not in DTYPES or gate.dtype is not weight.dtype:
        return False
    if up is None:
        return True
    alike = type(up) is Tensor and up.dtype is gate.dtype and up.shape == gate.shape and up.device == gate.device
    return alike and up.requires_grad == gate.requires_grad


def cast(
    gate: Tensor,
    up: Tensor | None,
    gating: Gating,
    row: Cast | None,
    column: Cast | None,
    amax: Tensor | None,
    multiplier: Tensor | None,
    eps: float,
    direct: bool,
    laid: Pair,
) -> tuple[list[Tensor], Tensor | None]:
    """Quantizes the activation's output; returns its parts in the directions that have a format, and its amax if the format has
    one scale per tensor.

    A known amax is used where it alone decides the scale.
    """
    how = operand_cast(row, column, eps, laid=laid)
    format = how.row or how.column
    # Not per_tensor: a compiler may not be the first to ask for a cached property.
    whole = format is not None and format.block is None
    amax = amax if whole and multiplier is None else None
    if direct:
        if amax is not None or multiplier is not None:
            how = how._replace(given=given_of(amax, multiplier))
        parts = gated_ops.quantize_gated(gate, up, *gating, how, amax, multiplier)
    else:
        names = [None if format is None else format.name for format in (how.row, how.column)]
        parts = gated_ops.quantize_op(gate, up, *gating, *names, amax, multiplier, how.rotate, how.eps, *how.laid)
    return (parts[:-1], parts[-1]) if whole else (parts, None)


def quantized(
    gate: Tensor, up: Tensor | None, call: Call, column: Cast, scale: Tensor | None, laid: Pair
) -> tuple[Matrix, list[Tensor], Tensor | None]:
    """Quantizes the activation's output through the ops; returns it rowwise, its columnwise parts, and its amax or None."""
    gating, row, known = call.prologue, call.recipe.input, (scale, call.eps, False)
    assert gating is not None
    assert row.format is not None
    count = part_count(row.format)
    if not call.traced or column.format is None:
        made, amax = cast(gate, up, gating, row, column, None, *known, laid)
        return Matrix(made[:count], row.format, laid=laid[0]), made[count:], amax
    made, amax = cast(gate, up, gating, row, None, None, *known, (laid[0], False))
    # An op of its own: compilers move it to the backward, which alone needs it.
    kept, _ = cast(gate, up, gating, None, column, amax, *known, (False, laid[1]))
    return Matrix(made, row.format, laid=laid[0]), kept, amax


def cast_again(ctx: Any, points: list[Any], laid: bool) -> list[Tensor]:
    """Returns the columnwise parts of the activation's output, of which a forward kept none; `laid` out if so."""
    gate, up = points
    call: Call = ctx.call
    assert call.prologue is not None
    known = (ctx.input_amax, ctx.input_scale, call.eps, call.direct and runs_now(gate))
    return cast(gate, up, call.prologue, None, call.recipe.input_columnwise, *known, (False, laid))[0]


gradient_casts: dict[Any, bool] = switch.plans()
"""What `casts_gradient` found in eager code, by the recipe's text, dtype, device, whether x wants a gradient, gating, and
whether there is an up."""


def casts_gradient(x: Tensor, recipe: Recipe, gating: Gating, gated: bool) -> bool:
    """Says whether a kernel casts the activation's gradient by a given scale, for a layer before it with this recipe that reads
    x."""
    traced, device = torch.compiler.is_compiling(), x.device
    found = _casts_gradient(device.type, device.index, x.dtype, recipe.text, x.requires_grad, gating.activation, gated)
    # A capture can't compare bits (`gated_kernels.agrees`): ask again after it.
    if not traced and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        switch.kept(gradient_casts, (recipe.text, x.dtype, device, x.requires_grad, gating, gated), found)
    return found


# A constant for dynamo.
@assume_constant_result
def _casts_gradient(
    kind: str, index: int | None, dtype: torch.dtype, casts: str, needs_x: bool, activation: str, gated: bool
) -> bool:
    recipe = linear_ops.recipe_of(casts)
    if dtype not in (torch.bfloat16, torch.float16) or recipe.gradient_columnwise.format is None:
        return False
    if kind == "cuda" and not torch.cuda.is_available():
        # Fake tensors may name a device that this machine lacks.
        return False
    x = torch.empty((0, 0), dtype=dtype, device=torch.device(kind) if index is None else torch.device(kind, index))
    row, column = recipe.gradient if needs_x else None, recipe.gradient_columnwise
    cast = operand_cast(row, column, recipe.eps, given="multiplier", keyed=True)
    # Any whole lengths: where others come, the operations run.
    fits = kernels_for(x) is cuda and cast.of_made(32, 128, gradient=True)
    return fits and gated_kernels.agrees(x, activation, gated)


class Source(NamedTuple):
    """What a gradient is made of that comes cast: that of an activation's output, and the activation's inputs.

    `of_up` says which of two gradients it is, where `gate` doesn't hold both.
    """

    gradient: Tensor
    gate: Tensor
    up: Tensor | None
    gating: Gating
    of_up: bool


def cast_gradient(source: Source, call: Call, multiplier: Tensor, direct: bool) -> list[Tensor]:
    """Quantizes an activation's gradient for a layer before it; returns its parts and its amax."""
    gradient, gate, up, gating, of_up = source
    row, column = call.recipe.gradient if call.needs[0] else None, call.recipe.gradient_columnwise if call.needs[1] else None
    cast = operand_cast(row, column, call.eps, given="multiplier")
    if direct:
        return gated_ops.quantize_gradient(gradient, gate, up, *gating, of_up, cast, multiplier)
    names = [None if one is None else one.name for one in (cast.row, cast.column)]
    return gated_ops.quantize_gradient_op(gradient, gate, up, *gating, of_up, *names, multiplier, call.eps)


def backward(ctx: Any, gradient: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of gate and up from that of the activation's output."""
    call: Call = ctx.call
    recipe = call.recipe
    assert call.prologue is not None
    activation, layout = call.prologue
    if torch.compiler.is_compiling() and ctx.scale is None:
        casts = (recipe.gradient, recipe.gradient_columnwise if call.needs[1] else HIGH_PRECISION)
        if any(one.format is not None and one.format.block is None for one in casts):
            # A compiler makes one kernel of these operations and of the amax that the next cast wants.
            d_gate, d_up = gradients(gradient, *gate_and_up(gate, up, layout), activation)
            return (d_gate, d_up) if d_up is None or layout == "apart" else (joined(d_gate, d_up, layout), None)
    run = gated_ops.gated_gradient if call.direct and runs_now(gradient) else gated_ops.gradient_op
    d_gate, *rest = run(gradient, gate, up, activation, layout)
    return d_gate, rest[0] if rest else None


# ---- an activation by itself


class ActivationFunction(torch.autograd.Function):
    """activation(gate), or activation(gate) * up, of [rows, columns], with the bits of PyTorch's operations.

    It keeps gate and up alone; PyTorch's operations keep the activation's output too.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
        ctx.gating = gating
        ctx.save_for_backward(gate, up)
        return gated_ops.activated(gate, up, *gating)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            made = activate(*gate_and_up(gate, up, ctx.gating.layout), ctx.gating.activation)
            wanted = [one for one, needed in zip((gate, up), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(made, wanted, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None
        d_gate, *rest = gated_ops.gated_gradient(gradient, gate, up, *ctx.gating)
        return d_gate, rest[0] if rest else None, None


def activation(gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
    """Returns the activation's output, [.., features], where no layer takes it in: one kernel each way on a GPU.

    Compilers fuse PyTorch's operations themselves, and on a CPU they are as fast.
    """
    plain = type(gate) is Tensor and (up is None or type(up) is Tensor)
    if not plain or not gate.is_cuda or torch.compiler.is_compiling() or not runs_now(gate) or functorch_is_active():
        return activate(*gate_and_up(gate, up, gating.layout), gating.activation)
    flat = [one if one is None or one.ndim == 2 else one.flatten(0, -2) if one.ndim > 1 else one[None] for one in (gate, up)]
    made = ActivationFunction.apply(*flat, gating)
    assert isinstance(made, Tensor)
    return made if gate.ndim == 2 else made.view(*gate.shape[:-1], made.shape[-1])
