"""Activations in front of a linear layer, and their gradients, as PyTorch's eager operations compute them.

    activation(gate)        gelu alone
    activation(gate) * up   SwiGLU, GeGLU

`layout` says where gate and up lie: "apart", in two tensors (or gate alone), or in one, as its "halves", or as "pairs" whose
first elements are the gate.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu"]
Layout = Literal["apart", "halves", "pairs"]


class Gating(NamedTuple):
    """An activation, and where its gate and up lie."""

    activation: Activation
    layout: Layout


def gate_and_up(gate: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    """Returns views of gate and up, which may lie in one tensor."""
    if layout == "apart":
        return gate, up
    first, second = gate.chunk(2, -1) if layout == "halves" else gate.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second


def joined(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """Returns the one tensor [.., 2 * features] in which both lie."""
    return torch.cat([gate, up], -1) if layout == "halves" else torch.stack([gate, up], -1).flatten(-2)


def activate(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Returns activation(gate), or activation(gate) * up."""
    made = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=_approximate(activation))
    return made if up is None else made * up


def gradients(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of gate and up from that of `activate`, with autograd's bits."""
    d_up = None
    if up is not None:
        d_up = gradient * activate(gate, None, activation)
        gradient = gradient * up
    if activation == "silu":
        return torch.ops.aten.silu_backward(gradient, gate), d_up
    return torch.ops.aten.gelu_backward(gradient, gate, approximate=_approximate(activation)), d_up


def _approximate(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"
