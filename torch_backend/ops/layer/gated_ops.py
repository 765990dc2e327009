"""The custom ops of linear layers around an activation: the cast of what it makes, its gradients, and the cast of these.

    blockfp::quantize_gated  (gate, up, activation, layout, row, column, amax, multiplier, ..)
                             -> [row parts .., column parts .., amax of formats with one scale per tensor]
    blockfp::gated_gradient  (gradient, gate, up, activation, layout) -> [d_gate, d_up], or d_gate alone
    blockfp::quantize_gradient  (gradient, gate, up, activation, layout, of_up, row, column, multiplier, ..)
                             -> the parts of d_gate or, with `of_up`, of d_up, and its amax

On a GPU what the activation makes and the gradients that are cast never lie in memory, where a kernel has the bits of PyTorch's
operations (`gated_kernels`). Everywhere else the operations run one after the other. `activations` says what `activation` and
`layout` are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.operand_cast import NEITHER, OperandCast, given_of

from ..kernels import kernels_for
from ..library import define, fake, impl
from ..quantize.operand_ops import empty_directions
from ..quantize.quantize_plans import of_format, quantize_matrix
from . import gated_kernels
from .activations import activate, gate_and_up, gradients, joined

quantize_op = define(
    "quantize_gated(Tensor gate, Tensor? up, str activation, str layout, str? row, str? column, Tensor? amax=None, "
    "Tensor? multiplier=None, bool rotate=False, float eps=0.0, bool lay_row=False, bool lay_column=False) -> Tensor[]"
)
gradient_op = define("gated_gradient(Tensor gradient, Tensor gate, Tensor? up, str activation, str layout) -> Tensor[]")
quantize_gradient_op = define(
    "quantize_gradient(Tensor gradient, Tensor gate, Tensor? up, str activation, str layout, bool of_up, str? row, "
    "str? column, Tensor multiplier, float eps=0.0) -> Tensor[]"
)

_plans: dict[Any, Any] = switch.plans()


def quantize_gated(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    layout: str,
    cast: OperandCast,
    amax: Tensor | None = None,
    multiplier: Tensor | None = None,
) -> list[Tensor]:
    """Carries out the op `quantize_gated`; arguments as for `activations` and `operand_ops.quantize_operand`."""
    gate, up = gate_and_up(gate, up, layout)
    where = None if up is None else (up.stride(), up.storage_offset() - gate.storage_offset())
    key = (cast, activation, layout, gate.shape, gate.stride(), where, gate.dtype, gate.device)
    run = _plans.get(key, key)
    if run is key:
        run = gated_kernels.plan_of(gate, up, activation, layout, of_format(cast))
        if not (gate.is_cuda and torch.cuda.is_current_stream_capturing()):
            switch.kept(_plans, key, run)
    if run is not None and gated_kernels.lies_aligned(gate, None if layout == "pairs" else up):
        return run((gate.detach(), None if up is None else up.detach()), amax, multiplier)
    made, format = activate(gate, up, activation), cast.format
    if cast.given is None and format.per_tensor:
        amax, cast = kernels_for(made).amax(made, format).blocks.view(1), cast._replace(given="amax")
    parts = quantize_matrix(made, cast, amax, multiplier)
    # What was given is no result of its own.
    return parts if amax is None else [*parts, amax.clone()]


def activated(gate: Tensor, up: Tensor | None, activation: str, layout: str) -> Tensor:
    """Returns what the activation makes of [rows, columns], outside of a graph."""
    gate, up = gate_and_up(gate, up, layout)
    made = gated_kernels.made_of(gate, up, activation, layout)
    return activate(gate, up, activation) if made is None else made


def gated_gradient(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, layout: str) -> list[Tensor]:
    """Does what the op `gated_gradient` does, outside of a graph."""
    gate, up = gate_and_up(gate, up, layout)
    found = gated_kernels.gradient_of(gradient, gate, up, activation, layout)
    if found is not None:
        return found
    d_gate, d_up = gradients(gradient, gate, up, activation)
    if d_up is None:
        return [d_gate]
    return [d_gate, d_up] if layout == "apart" else [joined(d_gate, d_up, layout)]


def quantize_gradient(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    layout: str,
    of_up: bool,
    cast: OperandCast,
    multiplier: Tensor,
) -> list[Tensor]:
    """Carries out the op `quantize_gradient`: quantizes d_gate, d_up or, where one tensor holds gate and up, both in it."""
    beside = None if up is None else up.stride()
    key = (cast, activation, layout, of_up, gate.shape, gate.stride(), beside, gate.dtype, gate.device)
    run = _plans.get(key, key)
    if run is key:
        run = gated_kernels.gradient_plan_of(gate, up, activation, layout, of_up, of_format(cast))
        if not (gate.is_cuda and torch.cuda.is_current_stream_capturing()):
            switch.kept(_plans, key, run)
    first, second = gate_and_up(gate, up, layout)
    if run is not None and gated_kernels.lies_aligned(first, None if layout == "pairs" else second):
        gradient = gated_kernels.in_vectors(gradient)
        return run((gradient.detach(), first.detach(), None if second is None else second.detach()), None, multiplier)
    return quantize_matrix(gated_gradient(gradient, gate, up, activation, layout)[int(of_up)], cast, None, multiplier)


@impl(quantize_op)
def _quantize(
    gate, up, activation, layout, row, column, amax=None, multiplier=None, rotate=False, eps=0.0, lay_row=False,
    lay_column=False,
) -> list[Tensor]:  # fmt: skip
    first, second = (None if name is None else Format.parse(name) for name in (row, column))
    given, laid = given_of(amax, multiplier), (lay_row, lay_column)
    cast = OperandCast(first, second, given, NEITHER, rotate, eps, laid)
    return quantize_gated(gate, up, activation, layout, cast, amax, multiplier)


@fake(quantize_op)
def _quantize_fake(
    gate, up, activation, layout, row, column, amax=None, multiplier=None, rotate=False, eps=0.0, lay_row=False,
    lay_column=False,
) -> list[Tensor]:  # fmt: skip
    rows, columns = gate.shape[0], gate.shape[1] // (1 if layout == "apart" else 2)
    parts = empty_directions(gate, (rows, columns), (row, column), (lay_row, lay_column))
    whole = Format.parse(row or column).per_tensor
    return [*parts, gate.new_empty((1,), dtype=torch.int32)] if whole else parts


@impl(gradient_op)
def _gradient(gradient, gate, up, activation, layout) -> list[Tensor]:
    # Results are contiguous, as the fake's are.
    return [part.contiguous() for part in gated_gradient(gradient, gate, up, activation, layout)]


@fake(gradient_op)
def _gradient_fake(gradient, gate, up, activation, layout) -> list[Tensor]:
    return [gate.new_empty(gate.shape) for one in (gate, up) if one is not None]


@impl(quantize_gradient_op)
def _quantize_gradient(gradient, gate, up, activation, layout, of_up, row, column, multiplier, eps=0.0) -> list[Tensor]:
    first, second = (None if name is None else Format.parse(name) for name in (row, column))
    cast = OperandCast(first, second, "multiplier", eps=eps)
    return quantize_gradient(gradient, gate, up, activation, layout, of_up, cast, multiplier)


@fake(quantize_gradient_op)
def _quantize_gradient_fake(gradient, gate, up, activation, layout, of_up, row, column, multiplier, eps=0.0) -> list[Tensor]:
    return [*empty_directions(gate, tuple(gate.shape), (row, column), NEITHER), gate.new_empty((1,), dtype=torch.int32)]
