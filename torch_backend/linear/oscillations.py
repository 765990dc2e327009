"""Counts how often the codes of a model's weights flip back and forth, for `observe`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockfp.definition import layout, oscillation
from blockfp.formats import Format

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .recipe_layer import RecipeLayer


@dataclass(frozen=True)
class Oscillation:
    """The codes of one layer's weight in one step, or those of this rank's part of it.

    Attributes:
        step: number of the step, from 0.
        module: path of the layer.
        elements: how many codes there are.
        changed: how many of them changed.
        flipped: how many changed against the direction of their last change.
        frequency: mean of the codes' running frequencies of flips.
        oscillating: how many codes have a frequency above the threshold.
    """

    step: int
    module: str
    elements: int
    changed: int
    flipped: int
    frequency: float
    oscillating: int


class Flips:
    """Counters of one weight's codes: 6 bytes each.

    Attributes:
        path: of its layer.
        layer: the layer.
    """

    def __init__(self, path: str, layer: RecipeLayer):
        self.path, self.layer = path, layer
        self._format, self._before = self._codes()
        self._direction = torch.zeros_like(self._before)
        self._frequency = torch.zeros(self._before.shape, dtype=torch.float32, device=self._before.device)

    @torch.no_grad()
    def step(self, number: int, momentum: float, threshold: float) -> Oscillation:
        """Compares the codes with those of the last step. Codes of another format, from `set_recipe`, begin anew.

        Raises:
            ValueError: see `observe`.
        """
        format, now = self._codes()
        if format is not self._format:
            self.__init__(self.path, self.layer)
        flipped, self._direction = oscillation.flips(self._before.to(torch.int32), now.to(torch.int32), self._direction)
        changed = now != self._before
        self._before = now
        self._frequency = oscillation.frequency(self._frequency, flipped, momentum)
        above, mean = self._frequency > threshold, self._frequency.mean(dtype=torch.float64)
        changes, flips, oscillating = torch.stack([changed.sum(), flipped.sum(), above.sum()]).tolist()
        elements = now.numel()
        return Oscillation(number, self.path, elements, changes, flips, float(mean) if elements else 0.0, oscillating)

    def _codes(self) -> tuple[Format, Tensor]:
        """Returns the weight's format, and the places of its codes in the order of their values, int8."""
        weight = self.layer.held_weight()
        assert weight is not None
        local = sharding.local_of(weight)
        if isinstance(local, CastWeight):
            if sharding.mesh_of(weight) is not None or local.cut is not None:
                raise ValueError(
                    f"{self.path!r} keeps its weight in high precision and shares it among ranks, so there are no codes "
                    "between two steps: observe oscillations of weights='quantized'"
                )
            local = local.quantized()
        if not isinstance(local, QuantizedTensor):
            raise ValueError(f"{self.path!r} has a weight in high precision, by its recipe {self.layer.linear_recipe}")
        if local.geometry.gathered:
            raise ValueError(
                f"{self.path!r} holds FSDP's gathered weight: call step() behind optimizer.step(), or reshard() first"
            )
        codes = layout.unpack(local.codes, local.format.element.bits, local.shape[-1])
        return local.format, oscillation.ordinals(codes, local.format.element).to(torch.int8)


def has_codes(layer: RecipeLayer) -> bool:
    """Says whether a layer's weight is quantized at all."""
    weight = layer.held_weight()
    return weight is not None and isinstance(sharding.local_of(weight), QuantizedTensor | CastWeight)
