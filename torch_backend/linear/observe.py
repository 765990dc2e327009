"""`observe(model)`: measures the effect of quantization on each operand, step by step, without changing a bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.definition import layout, oscillation
from blockfp.formats import Format
from blockfp.kernels.operand_cast import operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast

from ..ops.quantize.operand_ops import FIGURES, Directions, quantization_figures, quantize_operand
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import mark_static_address, uncounted
from ..weights.cast_weight import CastWeight
from .scale_watch import RecipeLayer

OPERANDS = ("input rowwise", "input columnwise", "gradient rowwise", "gradient columnwise")
"""Rows of a layer's figures."""


@dataclass(frozen=True)
class Observed:
    """One operand of one layer in one step.

    Attributes:
        step: number of the step, from 0.
        module: path of the layer.
        operand: one of `OPERANDS`.
        amax: largest finite magnitude.
        elements: number of quantized elements.
        saturated: number of elements clipped to the largest value of their scale (`check.measure.saturated`).
        flushed: number of nonzero elements that became zero.
        sqnr: 10 log10(sum of squares / sum of squared errors) in dB; Inf without errors. NaN if nothing can be compared: an
            operand with an Inf has NaN values in products.
    """

    step: int
    module: str
    operand: str
    amax: float
    elements: int
    saturated: int
    flushed: int
    sqnr: float


@dataclass
class Observation:
    """A model's open observation, from `observe`.

    Attributes:
        modules: the observed layers by path.
        records: results of all steps so far.
        steps: number of steps so far.
        oscillations: results for the weights' codes, if requested.
        flips: counters of the weights' codes.
        momentum, threshold: as given to `observe`.
    """

    modules: dict[str, RecipeLayer]
    records: list[Observed] = field(default_factory=list)
    steps: int = 0
    oscillations: list[Oscillation] = field(default_factory=list)
    flips: list[Flips] = field(default_factory=list, repr=False)
    momentum: float = 0.01
    threshold: float = 0.005

    def step(self) -> list[Observed]:
        """Ends a step: reads and clears every layer's figures since the last step, which waits for the device.

        Oscillations compare the current codes, so call it after `optimizer.step()`.

        Raises:
            ValueError: oscillations are observed and FSDP2 holds gathered weights.
        """
        new = []
        self.oscillations += [one.step(self.steps, self.momentum, self.threshold) for one in self.flips]
        for path, module in self.modules.items():
            figures = module.observed
            assert figures is not None
            for operand, row in zip(OPERANDS, figures.tolist(), strict=True):
                amax, elements, saturated, flushed, signal, noise = row
                if elements:
                    without = math.nan if amax and not signal else math.inf
                    sqnr = 10 * math.log10(signal / noise) if signal and noise else without
                    counts = (int(elements), int(saturated), int(flushed))
                    new.append(Observed(self.steps, path, operand, amax, *counts, sqnr))
            figures.zero_()
        self.records += new
        self.steps += 1
        return new

    def rows(self) -> list[dict]:
        """Returns the records as dictionaries, for tables and JSON."""
        return [asdict(record) for record in self.records]

    def scalars(self) -> dict[str, float]:
        """Returns the last step's figures by name, for loggers: "layers.0.up/input rowwise/sqnr".

        `amax` and `sqnr` are as in `Observed`; `saturated` and `flushed` are shares of the elements. Oscillations add
        "../weight" with shares `changed`, `flipped` and `oscillating`, and `frequency`.
        """
        found = {}
        for record in takewhile(self._is_last, reversed(self.records)):
            shares = {"saturated": record.saturated / record.elements, "flushed": record.flushed / record.elements}
            for name, value in {"amax": record.amax, "sqnr": record.sqnr, **shares}.items():
                found[f"{record.module}/{record.operand}/{name}"] = value
        for weight in takewhile(self._is_last, reversed(self.oscillations)):
            counts = {name: getattr(weight, name) / max(weight.elements, 1) for name in ("changed", "flipped", "oscillating")}
            for name, value in {**counts, "frequency": weight.frequency}.items():
                found[f"{weight.module}/weight/{name}"] = value
        return dict(sorted(found.items()))

    def _is_last(self, record: Observed | Oscillation) -> bool:
        return record.step == self.steps - 1


@contextmanager
def observe(
    model: nn.Module, *, oscillations: bool = False, momentum: float = 0.01, threshold: float = 0.005
) -> Iterator[Observation]:
    """Records the effect of quantization on inputs and gradients of a model's layers, within the context.

    Each operand is quantized once more and dequantized. A compiled model is recompiled.

    Args:
        model: the model to observe.
        oscillations: also count how often the weights' codes flip back and forth (Nagel et al. 2022, arXiv 2203.11086;
            `definition.oscillation`). This takes 6 bytes per weight element, and a pass over all codes at each `step`. Under
            FSDP2 each rank counts its shard.
        momentum: of the running mean of flips.
        threshold: frequency above which a weight element counts as oscillating.

    Raises:
        ValueError: no layer of the model quantizes anything; the model is observed already; oscillations are requested for
            sharded weights in high precision; or momentum or threshold is not between 0 and 1.

    Example:
        >>> with bfp.observe(model) as observation:
        ...     loss(model(x)).backward()
        ...     for record in observation.step():
        ...         print(record.module, record.operand, record.sqnr)
    """
    for name, value in (("momentum", momentum), ("threshold", threshold)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
    modules = {path: module for path, module in model.named_modules() if isinstance(module, RecipeLayer)}
    if not modules:
        raise ValueError("model holds no layer of blockfp.torch: use convert(model, recipe) first")
    if any(module.observed is not None for module in modules.values()):
        raise ValueError("model is observed already")
    try:
        for module in modules.values():
            weight = module.held_weight()
            assert weight is not None
            module.observed = torch.zeros((len(OPERANDS), len(FIGURES)), dtype=torch.float64, device=weight.device)
            # Under FSDP2 a CUDA graph would otherwise add to a copy.
            mark_static_address(module.observed)
        counted = [Flips(path, module) for path, module in modules.items() if has_codes(module)] if oscillations else []
        yield Observation(modules, flips=counted, momentum=momentum, threshold=threshold)
    finally:
        for module in modules.values():
            module.__dict__["observed"] = None


def observe_again(
    observed: Tensor, operand: str, x: Tensor, rowwise: Cast | None, columnwise: Cast | None, eps: float, **known: Any
) -> None:
    """Quantizes an operand again as a fused op did, which doesn't return the parts, and adds its figures to the layer's.

    Casts are None for unneeded directions; `known` has the op's `amax`, `multiplier` and `keys` (int32 [2, 2]), if any.
    """
    row, column = rowwise or HIGH_PRECISION, columnwise or HIGH_PRECISION
    if row.format is None and column.format is None:
        return
    found = quantize_operand(x, operand_cast(row, column, eps, keyed=known.get("keys") is not None), **known)
    observe_operand(observed, operand, x, found, row, column)


def observe_operand(observed: Tensor, operand: str, x: Tensor, found: Directions, rowwise: Cast, columnwise: Cast) -> None:
    """Adds the figures of x [tokens, size], "input" or "gradient", in both directions to `observed`, float64 [operands,
    figures].
    """
    for direction, parts, cast in (("rowwise", found.row, rowwise), ("columnwise", found.column, columnwise)):
        if cast.format is not None:
            observe_parts(observed, f"{operand} {direction}", x if direction == "rowwise" else x.mT, parts, cast)


def observe_parts(
    observed: Tensor, row: str, x: Tensor, parts: list[Tensor], cast: Cast, origin: tuple[int, int] = (0, 0)
) -> None:
    """Adds one direction's figures to a layer's; x is the tensor before its cast, `origin` its offset in the blocked matrix."""
    assert cast.format is not None
    new = quantization_figures(x, parts, cast.format.name, cast.rotate, list(origin))
    figures = uncounted(observed)[OPERANDS.index(row)]
    figures.copy_(torch.cat([torch.maximum(figures[:1], new[:1]), figures[1:] + new[1:]]))


# ---- flips of weight codes


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
