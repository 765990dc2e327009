"""Counts how often a model's weight codes flip back and forth, for `observe`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockfp.definition import layout, oscillation
from blockfp.formats import Format

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .scale_watch import RecipeLayer


@dataclass(frozen=True)
class Oscillation:
    """The codes of one layer's weight, or of this rank's shard, in one step.

    Attributes:
        step: number of the step, from 0.
        module: path of the layer.
        elements: number of codes.
        changed: number of codes that changed.
        flipped: number of codes that changed against the direction of their last change.
        frequency: mean of the codes' running flip frequencies.
        oscillating: number of codes with a frequency above the threshold.
    """

    step: int
    module: str
    elements: int
    changed: int
    flipped: int
    frequency: float
    oscillating: int


class Flips:
    """Counters of the codes of one layer's weight, 6 bytes each."""

    def __init__(self, path: str, layer: RecipeLayer):
        self.path, self.layer = path, layer
        self._format, self._before = self._codes()
        self._direction = torch.zeros_like(self._before)
        self._frequency = torch.zeros(self._before.shape, dtype=torch.float32, device=self._before.device)

    @torch.no_grad()
    def step(self, number: int, momentum: float, threshold: float) -> Oscillation:
        """Compares the codes with the last step's; after `set_recipe` to another format, starts over.

        Raises ValueError as `observe` does.
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
        """Returns the weight's format and its codes' ordinals by value, int8."""
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
    """Returns whether a layer's weight is quantized."""
    weight = layer.held_weight()
    return weight is not None and isinstance(sharding.local_of(weight), QuantizedTensor | CastWeight)
