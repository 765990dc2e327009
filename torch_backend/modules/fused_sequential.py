"""A `torch.nn.Sequential` after `convert`: layers behind an RMSNorm or an activation cast what that makes as it is made."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..linear.gated_function import Gating
from .forwards import SEQUENTIAL
from .gated_mlp import activation_of
from .gated_product import fused_product
from .linear import Linear
from .normed_product import fused_norm_product


class FusedSequential(nn.Sequential):
    """Its modules one after the other, with the same bits; where somebody looks (hooks), each is called."""

    def forward(self, input: Any) -> Any:
        if nn.Sequential.forward is not SEQUENTIAL:
            return nn.Sequential.forward(self, input)
        modules = list(self)
        place = 0
        while place < len(modules):
            y = None
            if place + 1 < len(modules) and isinstance(modules[place + 1], Linear) and isinstance(input, Tensor):
                y = _at_once(modules[place], modules[place + 1], input)
            input, place = (modules[place](input), place + 1) if y is None else (y, place + 2)
        return input


def _at_once(first: nn.Module, layer: nn.Module, x: Tensor) -> Tensor | None:
    """Returns layer(first(x)) in one op for `first` and the cast; None where both have to be called."""
    if isinstance(first, nn.RMSNorm):
        return fused_norm_product(first, layer, x)
    activation = activation_of(first)
    return None if activation is None else fused_product(layer, x, None, Gating(activation, "apart"))


def sequentials(model: nn.Module, made: Container[nn.Module]) -> Iterator[nn.Sequential]:
    """Gives the `torch.nn.Sequential`s of a model, of that very class, that are to become fused ones.

    Args:
        made: the layers that `convert` changes.
    """
    for module in model.modules():
        if (
            type(module) is not nn.Sequential
            or nn.Sequential.forward is not SEQUENTIAL
            or "forward" in vars(module)
            or parametrize.is_parametrized(module)
        ):
            continue
        modules = list(module)
        if any(
            layer in made and (type(first) is nn.RMSNorm or activation_of(first) is not None)
            for first, layer in itertools.pairwise(modules)
        ):
            yield module
