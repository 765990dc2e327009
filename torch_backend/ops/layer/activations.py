"""Activations before a linear layer, and their gradients, as PyTorch's eager operations compute them.

    activation(gate)        gelu or squared ReLU alone
    activation(gate) * up   SwiGLU, GeGLU

The layout says where gate and up are stored: "apart" in two tensors (or gate alone), or in one tensor, as its "halves" or as
"pairs" whose first elements are the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.kernels.calls import ACTIVATIONS

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
Layout = Literal["apart", "halves", "pairs"]


class Gating(NamedTuple):
    """An activation, and where gate and up are stored."""

    activation: Activation
    layout: Layout


class Row(NamedTuple):
    """An activation.

    Attributes:
        forward: gate -> activation(gate).
        backward: (gradient, gate) -> gradient of the gate, with autograd's bits.
        number: in the CUDA library.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    number: int


def _gelu(approximate: str, name: str) -> Row:
    backward = partial(torch.ops.aten.gelu_backward.default, approximate=approximate)
    return Row(partial(F.gelu, approximate=approximate), backward, ACTIVATIONS[name])


def _relu2(gate: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(gate).square()


def _relu2_backward(gradient: Tensor, gate: Tensor) -> Tensor:
    made = F.relu(gate)
    return torch.ops.aten.threshold_backward.default(gradient * (2 * made), made, 0)


ROWS: dict[str, Row] = {
    "silu": Row(F.silu, torch.ops.aten.silu_backward.default, ACTIVATIONS["silu"]),
    "gelu_tanh": _gelu("tanh", "gelu_tanh"),
    "gelu": _gelu("none", "gelu"),
    "relu2": Row(_relu2, _relu2_backward, ACTIVATIONS["relu2"]),
}


def gate_and_up(gate: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    """Returns views of gate and up, which may be stored in one tensor."""
    if layout == "apart":
        return gate, up
    first, second = gate.chunk(2, -1) if layout == "halves" else gate.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second


def joined(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """Returns the tensor [.., 2 * features] that holds both."""
    return torch.cat([gate, up], -1) if layout == "halves" else torch.stack([gate, up], -1).flatten(-2)


def activate(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Returns activation(gate), or activation(gate) * up."""
    made = ROWS[activation].forward(gate)
    return made if up is None else made * up


def gradients(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of gate and up from the gradient of `activate`'s result, with autograd's bits."""
    row, d_up = ROWS[activation], None
    if up is not None:
        d_up = gradient * row.forward(gate)
        gradient = gradient * up
    return row.backward(gradient, gate), d_up
