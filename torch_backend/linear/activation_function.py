"""An activation by itself, where no cast behind it can take it in: a kernel each way, and only its inputs kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops.activations import activate, gate_and_up
from ..custom_ops.gated_ops import activated, gated_gradient
from ..custom_ops.library import runs_now
from ..torch_internals import functorch_is_active
from .gated_function import Gating


class ActivationFunction(torch.autograd.Function):
    """activation(gate), or activation(gate) * up, of [rows, columns], with the bits of PyTorch's operations.

    These would keep the activation's own output too.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
        ctx.gating = gating
        ctx.save_for_backward(gate, up)
        return activated(gate, up, *gating)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            made = activate(*gate_and_up(gate, up, ctx.gating.layout), ctx.gating.activation)
            wanted = [one for one, needed in zip((gate, up), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(made, wanted, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None
        d_gate, *rest = gated_gradient(gradient, gate, up, *ctx.gating)
        return d_gate, rest[0] if rest else None, None


def activation(gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
    """Returns what the activation makes, [.., features].

    Compilers join PyTorch's operations themselves, and on a CPU they are as fast.

    Args:
        gate, up, gating: as for `linear.gated.gated`.
    """
    plain = type(gate) is Tensor and (up is None or type(up) is Tensor)
    if not plain or not gate.is_cuda or torch.compiler.is_compiling() or not runs_now(gate) or functorch_is_active():
        return activate(*gate_and_up(gate, up, gating.layout), gating.activation)
    flat = [one if one is None or one.ndim == 2 else one.flatten(0, -2) if one.ndim > 1 else one[None] for one in (gate, up)]
    made = ActivationFunction.apply(*flat, gating)
    assert isinstance(made, Tensor)
    return made if gate.ndim == 2 else made.view(*gate.shape[:-1], made.shape[-1])
