"""Fuses an activation with the next layer's quantization when the result is identical."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..custom_ops.activations import Gating
from ..linear.linear import apply
from ..linear.pieces import in_pieces
from ..linear.prologue import activation, takes
from .known_classes import LINEAR, watched
from .linear import Linear

QUANTIZED = Linear.forward
"""The forward of quantized layers at import, before anyone patches it."""


def gated_product(layer: nn.Module, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
    """Returns layer(activation(gate) * up), or layer(activation(gate)); fused or not, the bits are the same.

    `layer` is of any class. gate and up are [.., features]; or gate is [.., 2 * features] with both, in `gating.layout`, and up
    is None.
    """
    found = fused_product(layer, gate, up, gating)
    if found is not None:
        return found
    if up is not None:
        return layer(activation(gate, up, gating))
    return layer(in_pieces(lambda piece: activation(piece, None, gating), gate, getattr(layer, "parallel", None)))


def fused_product(layer: Any, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor | None:
    """Like `gated_product`, with activation and cast in one op; None if the layer must be called unfused.

    That is the case if hooks observe the layer's input, if its class or forward was replaced, if it is tensor parallel, or if
    `prologue.takes` refuses.
    """
    if type(layer).forward is not QUANTIZED or layer.parallel is not None or watched(layer):
        return None
    if layer.made_of is not None and layer.made_of.forward is not LINEAR:
        return None
    state = layer.state() if layer.stateful or layer.observed is not None else None
    weight = layer.weight
    if not takes(gate, up, weight, layer.linear_recipe, state):
        return None
    return apply(gate, weight, layer.bias, layer.linear_recipe, state=state, up=up, prologue=gating)
