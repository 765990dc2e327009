"""A layer behind an activation, called so that what the activation makes is cast as it is made, wherever nobody could tell."""

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
"""The forward of a quantized layer, as it was."""


def gated_product(layer: nn.Module, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
    """Returns layer(activation(gate) * up), or layer(activation(gate)), with the same bits whichever way it goes.

    Args:
        layer: the layer, of any class.
        gate, up: [.., features]; or the one tensor [.., 2 * features] that holds both, and None.
        gating: the activation, and where gate and up lie.
    """
    found = fused_product(layer, gate, up, gating)
    if found is not None:
        return found
    if up is not None:
        return layer(activation(gate, up, gating))
    return layer(in_pieces(lambda piece: activation(piece, None, gating), gate, getattr(layer, "parallel", None)))


def fused_product(layer: Any, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor | None:
    """Returns what `gated_product` does, in one op for activation and cast; None where the layer has to be called for it.

    That is where somebody may want to see its input (hooks), where another module or forward stands in its place, and where
    `prologue.takes` says no.
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
