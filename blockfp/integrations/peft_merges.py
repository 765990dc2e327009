"""Merges of PEFT's adapters into quantized weights, and exact unmerges.

merge     quantize(dequantize(codes) + adapters), in float32, from the codes before any merge
unmerge   restores these codes, bit for bit
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as peft_layers
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..torch_backend.quantized_tensor import sharding
from ..torch_backend.quantized_tensor.sharding import placed, reduced
from ..torch_backend.quantized_tensor.tensor import QuantizedTensor
from ..torch_backend.weights.cast_weight import CastWeight
from ..torch_backend.weights.loading import load_high_precision_
from ..torch_backend.weights.requantize import check_writable

LOST = 3.0
"""Decibels: a merge warns if the change exceeds its rounding error by less; at 3 dB half of the change is error."""

NAME = f"{__name__.removesuffix('_merges')}.merged"


class Merged(NamedTuple):
    """Rounding errors of one merge.

    Attributes:
        name: name of the quantized parameter.
        adapters: the adapters in the order of merging.
        sqnr: signal-to-noise ratio of the merged codes in dB: 10 log10(sum of squares / sum of squared errors); Inf without
            error.
        change_sqnr: the same for the adapters' change alone. At 0 dB or less nothing of it is left.
    """

    name: str
    adapters: tuple[str, ...]
    sqnr: float
    change_sqnr: float


_REPORT = "_merged_adapters"
"""Attribute of a base layer that records what was merged into it; the layer outlives its adapters."""


def merged(model: nn.Module) -> list[Merged]:
    """Lists the merges that a model's quantized weights contain, from `merge_adapter()` or `merge_and_unload()`.

    Example:
        >>> model.merge_adapter()
        >>> min(each.sqnr for each in merged(model))
    """
    found = []
    for path, module in model.named_modules():
        report: dict[str, Merged] = vars(module).get(_REPORT, {})
        path = path.replace(".base_layer", "")
        found += [each._replace(name=f"{path}.{name}".lstrip(".")) for name, each in report.items()]
    return found


class MergesCodes(peft_layers.LoraLayer):
    """A PEFT layer that can merge into quantized weights, or values that will be quantized."""

    _kept: tuple[list[Tensor], list[Tensor], Tensor | None] | None = None
    """The codes and scales (or values) before merging, checksums of the merged ones, and the bias before merging."""

    merged_adapters: list[str]

    def held(self) -> tuple[str, Tensor]:
        """Returns the name and the parameter that is adapted."""
        raise NotImplementedError

    def change(self, adapter: str) -> Tensor:
        """Returns an adapter's change of the whole weight, in float32."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merges adapters: quantizes the sum in the weight's format, starting from the codes before any merge.

        Under FSDP2 every rank must call it. Warns if rounding leaves less than half of the change; `merged` has the figures.

        Args:
            safe_merge: no effect, because values that codes can't represent are always refused.
            adapter_names: the active adapters by default.

        Raises:
            ValueError: the sum has an Inf or a NaN, or the weight is FSDP's gathered copy. Nothing is changed then.
            NotImplementedError: the adapter is neither plain LoRA nor DoRA, or tensor parallelism has cut the layer.
        """
        name, param = self.held()
        if not isinstance(sharding.local_of(param), QuantizedTensor | CastWeight):
            super().merge(safe_merge, adapter_names)  # pyright: ignore[reportAttributeAccessIssue]
            return
        new = [adapter for adapter in check_adapters_to_merge(self, adapter_names) if adapter in self.lora_A]
        if new:
            with torch.no_grad():
                self._merge(name, param, [*self.merged_adapters, *new])

    def _merge(self, name: str, param: Tensor, adapters: list[str]) -> None:
        base: Any = self.get_base_layer()
        _check_merge(self, base, name, adapters)
        bias = self._merged_bias(base, adapters)
        before = [part.clone() for part in _parts(param)] if self._kept is None else self._kept[0]
        original = _float32(param, before)
        values = original.clone()
        for adapter in adapters:
            values = self._with(adapter, param, values, original)
        signal, change = _energies(param, values, values - original)
        if not math.isfinite(signal):
            raise ValueError(
                f"{name}: the weight with adapters {adapters} has an Inf or a NaN, which codes can't hold: look at the adapters"
            )
        load_high_precision_(param, placed(param, values), keep_init=False)
        (noise,) = _energies(param, _float32(param, _parts(param)) - values)
        old_bias = None if self._kept is None else self._kept[2]
        if bias is not None:
            old_bias = base.bias.detach().clone() if old_bias is None else old_bias
            base.bias.copy_(bias)
        self._kept = before, _sums(_parts(param)), old_bias
        self.merged_adapters[:] = adapters
        report = Merged(name, tuple(adapters), _decibels(signal, noise), _decibels(change, noise))
        vars(base).setdefault(_REPORT, {})[name] = report
        if report.change_sqnr < LOST:
            warnings.warn(
                f"a merge into quantized weights lost more than half of the adapter's change to rounding: {NAME}(model) "
                "has each weight's SQNR. Adapters stay exact unmerged, or merged into weights in high precision; "
                "unmerge_adapter() restores the codes.",
                UserWarning,
                stacklevel=4,
            )

    def _with(self, adapter: str, param: Tensor, values: Tensor, original: Tensor) -> Tensor:
        """Returns this rank's part of the weight with another adapter added."""
        change = sharding.own_part(self.change(adapter), param)
        if adapter not in self.lora_variant:
            return values.add_(change)
        over = 0 if getattr(self, "fan_in_fan_out", False) else 1
        if over == 0 and sharding.mesh_of(param) is not None:
            raise NotImplementedError("DoRA of a weight [in, out] is merged before fully_shard, not after it")
        magnitude = weight_of(self.lora_magnitude_vector, adapter)
        if over == 1:
            magnitude = magnitude[sharding.region_of(param).slices[0]]
        factor = magnitude / torch.linalg.norm(original + change, dim=over)
        return (values + change).mul_(factor.unsqueeze(over))

    def _merged_bias(self, base: Any, adapters: list[str]) -> Tensor | None:
        """Returns the bias plus the adapters' biases, or None if these have none."""
        biased = [adapter for adapter in adapters if self.lora_bias[adapter]]
        if not biased:
            return None
        if base.bias is None:
            raise ValueError(f"adapters {biased} have a bias, and the layer has none to merge it into")
        own: Any = base.bias if self._kept is None or self._kept[2] is None else self._kept[2]
        layers: Any = self.lora_B
        return own.detach() + sum(layers[adapter].bias.detach() * self.scaling[adapter] for adapter in biased)

    def unmerge(self) -> None:
        """Restores the codes from before the first merge.

        Raises:
            ValueError: the merged codes have been overwritten (loaded, trained), resharded, or changed in format.
        """
        if self._kept is None:
            super().unmerge()  # pyright: ignore[reportAttributeAccessIssue]
            return
        name, param = self.held()
        before, sums, bias = self._kept
        parts = _parts(param)
        if [part.shape for part in parts] != [part.shape for part in before]:
            raise ValueError(
                f"{name} was sharded, or got another recipe, after adapters were merged into it: unmerge before fully_shard "
                "and set_recipe"
            )
        if not all(torch.equal(now, then.to(now.device)) for now, then in zip(_sums(parts), sums, strict=True)):
            raise ValueError(f"{name} was overwritten after a merge, and unmerge would undo that: load the weight again")
        base: Any = self.get_base_layer()
        with torch.no_grad():
            for part, old in zip(parts, before, strict=True):
                part.copy_(old)
            if bias is not None:
                base.bias.copy_(bias)
        vars(base)[_REPORT].pop(name)
        self._kept = None
        self.merged_adapters.clear()


def weight_of(layers: Any, adapter: str) -> Tensor:
    """Returns the whole weight of an adapter's layer, in float32."""
    tensor = layers[adapter].weight.detach()
    return (tensor if sharding.mesh_of(tensor) is None else tensor.full_tensor()).float()


def _parts(param: Tensor) -> list[Tensor]:
    """Returns this rank's codes and scales of a weight, or its values; raises ValueError for FSDP's gathered copy."""
    local = sharding.local_of(param)
    if isinstance(local, CastWeight):
        return [local.values.detach()]
    assert isinstance(local, QuantizedTensor)
    check_writable(local)
    return local.parts


def _sums(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns sums along each axis of codes, scales or values read as integers, which detect overwriting."""
    integers = [part.view((torch.uint8, torch.int16, torch.int32)[part.element_size() // 2]) for part in parts]
    return [each.sum(axis, dtype=torch.int64) for each in integers for axis in range(max(each.ndim, 1))]


def _float32(param: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Returns the values of such parts."""
    local = sharding.local_of(param)
    return local.with_parts(*parts).dequantize(torch.float32) if isinstance(local, QuantizedTensor) else parts[0].float()


def _energies(param: Tensor, *tensors: Tensor) -> list[float]:
    """Returns sums of squares of tensors sharded like a parameter."""
    sums = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensors])
    if sharding.mesh_of(param) is not None:
        sums = reduced(param, sharding.sharding_of(param), sums, "sum")
    return sums.tolist()


def _decibels(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def _check_merge(layer: MergesCodes, base: Any, name: str, adapters: Sequence[str]) -> None:
    others = [
        variant
        for adapter in adapters
        if (variant := layer.lora_variant.get(adapter)) and not issubclass(type(variant), DoraLinearVariant)
    ]
    if others:
        raise NotImplementedError(f"{type(others[0]).__name__} is not merged into quantized weights: plain LoRA and DoRA are")
    if base.parallel is not None:
        raise NotImplementedError(f"{name} is sharded by tensor parallelism: merge adapters before parallelize")
