"""PEFT's LoRA over quantized weights: experts on codes, DoRA, merges and exact unmerges.

Plain LoRA doesn't need this module, because a `Linear` is a `torch.nn.Linear`. `register` adds the rest, with the layers below.
Their adapters have PEFT's names and shapes, so they can be saved, loaded and served as usual.

    merge     quantize(dequantize(codes) + adapters), in float32, from the codes before any merge
    unmerge   restores these codes, bit for bit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import layer as peft_layers
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from blockfp.recipes import HIGH_PRECISION, Recipe

from ..torch_backend.conversion.kinds import base_kind, weight_names
from ..torch_backend.linear.call import ends_of
from ..torch_backend.linear.linear import apply
from ..torch_backend.modules.experts import Experts
from ..torch_backend.modules.grouped_linear import GroupedLinear
from ..torch_backend.modules.linear import Linear, TransposedLinear
from ..torch_backend.quantized_tensor import sharding
from ..torch_backend.quantized_tensor.tensor import QuantizedTensor
from ..torch_backend.weights.cast_weight import CastWeight
from .peft_merges import Merged, MergesCodes, merged, weight_of

__all__ = ["Merged", "merged", "register"]

_CASTS = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)
PLAIN = Recipe("high precision", *_CASTS, *_CASTS)
"""The recipe of adapters' products."""


def register(config: LoraConfig) -> LoraConfig:
    """Makes PEFT use this module's layers for weights that are quantized, or that `convert` could quantize later.

    PEFT doesn't save this with the adapter, so register again when loading: `PeftModel.from_pretrained(base, path,
    config=register(LoraConfig.from_pretrained(path)))`. Weights quantized by other libraries keep their own layers.

    Args:
        config: a LoraConfig, which is changed.

    Returns:
        The same config.

    Raises:
        TypeError: config is not a LoraConfig.

    Example:
        >>> model = get_peft_model(model, register(LoraConfig(target_modules="all-linear", use_dora=True)))
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(f"config must be a peft.LoraConfig, got {type(config).__name__}")
    # A function instead of a class: if it returns None, PEFT uses its own layers.
    config._register_custom_module({nn.Module: _layer_for})  # pyright: ignore[reportArgumentType]
    return config


def _layer_for(
    target: nn.Module, adapter_name: str, *, config: LoraConfig, parameter_name: str | None = None, **options: Any
) -> nn.Module | None:
    """Returns the PEFT layer for a target; None if it isn't and can't be quantized."""
    base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    kind: Any = type(base) if isinstance(base, Linear | TransposedLinear | GroupedLinear | Experts) else base_kind(base)
    if kind is None:
        return None
    if parameter_name is not None:
        known = tuple(base.biases) if isinstance(base, Experts) else weight_names(kind, base)
        grouped = issubclass(kind, Experts | GroupedLinear) and parameter_name in known
        return ParamWrapper(target, adapter_name, parameter_name, config=config, **options) if grouped else None
    if not issubclass(kind, Linear | TransposedLinear):
        return None
    weight = sharding.local_of(base.get_parameter("weight"))
    if not isinstance(weight, QuantizedTensor | CastWeight) and type(weight) not in (Tensor, nn.Parameter):
        return None
    transposed = config.fan_in_fan_out = issubclass(kind, TransposedLinear)
    return LoraLinear(target, adapter_name, config=config, is_target_conv_1d_layer=transposed, **options)


class LoraLinear(MergesCodes, peft_layers.Linear):
    """PEFT's LoRA of a linear layer that is quantized or can be converted later."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {**super().lora_variants, ("use_dora",): DoraVariant}

    def held(self) -> tuple[str, Tensor]:
        base: Any = self.get_base_layer()
        return "weight", base.weight

    def change(self, adapter: str) -> Tensor:
        change = weight_of(self.lora_B, adapter) @ weight_of(self.lora_A, adapter)
        return (change.T if self.fan_in_fan_out else change) * self.scaling[adapter]


class ParamWrapper(MergesCodes, peft_layers.ParamWrapper):
    """PEFT's LoRA of one weight of experts: multiplies codes, and adapters separately.

    An expert's output is x w^T + scaling (x A^T) B^T. PEFT's own layer adds adapters to all experts' weights in each forward.
    PEFT recognizes the class by its name.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, parameter_name: str, config: LoraConfig, **options: Any):
        super().__init__(base_layer, adapter_name, parameter_name, config, **options)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        super()._get_in_out_features(module)
        base: Any = self.get_base_layer()
        *_, first, second = self.get_param().shape
        lengths = (first, second) if self._transposed else (second, first)
        # PEFT swaps these if a module doesn't declare its weights transposed.
        return lengths if getattr(base, "is_transposed", False) else lengths[::-1]

    @property
    def _transposed(self) -> bool:
        """Whether the weight is [experts, in, out]."""
        base: Any = self.get_base_layer()
        return base.transposed if isinstance(base, Experts | GroupedLinear) else getattr(base, "is_transposed", False)

    def held(self) -> tuple[str, Tensor]:
        return self.parameter_name, self.get_param()

    def factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A [experts, rank, in] and B [experts, out, rank]."""
        first: Any = self.lora_A[adapter]
        second: Any = self.lora_B[adapter]
        return self._by_expert(first.weight, second.weight)

    def _by_expert(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Splits PEFT's A [experts rank, in] and B [out, rank experts] by expert."""
        experts = self.num_experts
        return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)

    def change(self, adapter: str) -> Tensor:
        a, b = self._by_expert(weight_of(self.lora_A, adapter), weight_of(self.lora_B, adapter))
        change = torch.bmm(b, a).mul_(self.scaling[adapter])
        return change.mT if self._transposed else change

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        base: Any = self.get_base_layer()
        adapters = [adapter for adapter in active_adapters if adapter in self.lora_A]
        if isinstance(base, GroupedLinear) or (isinstance(base, Experts) and not adapters):
            yield
        elif isinstance(base, Experts):
            if base.parallel is not None:
                raise ValueError("LoRA on experts sharded by parallelize is not supported: shard them by fully_shard")
            with base.adding(self.parameter_name, partial(self.low_rank, adapters)):
                yield
        else:
            with super()._activate_lora(list(active_adapters)):
                yield

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if not isinstance(base, GroupedLinear) or self.disable_adapters or self.merged or not adapters:
            return y
        (counts,) = (*args, *kwargs.values())
        if base.parallel is not None or not isinstance(counts, Tensor | Sequence):
            raise ValueError(
                "LoRA on experts needs one rank's rows, with counts: neither dispatched rows nor experts sharded over ranks"
            )
        ends = counts.cumsum(0, dtype=torch.int32) if isinstance(counts, Tensor) else ends_of(counts, x)
        return y + self.low_rank(adapters, x, ends)

    def low_rank(self, adapters: Sequence[str], x: Tensor, offs: Tensor) -> Tensor:
        """Returns the adapters' contribution to the products of x [tokens, in], sorted by expert: [tokens, out].

        `offs` holds the end of each expert's rows, int32 [experts].
        """
        total: Tensor | None = None
        for adapter in adapters:
            a, b = (factor.to(x.dtype) for factor in self.factors(adapter))
            # torch's grouped product needs lengths that are multiples of 8.
            missing = -a.shape[1] % 8
            if missing:
                a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
            inner = apply(x, a, None, PLAIN, offs=offs) * self.scaling[adapter]
            y = apply(inner, b.contiguous(), None, PLAIN, offs=offs)
            total = y if total is None else total + y
        assert total is not None
        return total


class DoraLayer(DoraLinearLayer):
    """DoRA's magnitudes over a quantized weight; norms are computed in float32 from dequantized codes."""

    def update_layer(
        self, *, base_layer: Any, lora_A: Tensor, lora_B: Tensor, scaling: float, place_on_cpu: bool = False
    ) -> None:
        values = _values(base_layer)
        if values is None:
            super().update_layer(
                base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, scaling=scaling, place_on_cpu=place_on_cpu
            )
            return
        norm = self.get_weight_norm(values.to(lora_A.device), (lora_B @ lora_A).float(), scaling)
        self.weight = nn.Parameter(norm.to(lora_A.dtype))

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Returns the addition to the base's output [.., out] for x [.., in], after dropout."""
        with torch.no_grad():
            values = _values(base_layer)
            if values is not None:
                added = self.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name)
                norm = self.get_weight_norm(values, added.float(), scaling, adapter_name=adapter_name)
        if values is None:
            return super().forward(
                x, lora_A=lora_A, lora_B=lora_B, scaling=scaling, base_layer=base_layer, base_result=base_result,
                adapter_name=adapter_name,
            )  # fmt: skip
        y: Any = base_result
        if y is None:
            y = base_layer(x if torch.is_autocast_enabled(x.device.type) else x.to(base_layer.weight.dtype))
        if base_layer.bias is not None:
            y = y - base_layer.bias
        factor = self.weight / norm
        return (factor - 1).to(x.dtype) * y + factor.to(x.dtype) * lora_B(lora_A(x)) * scaling


class DoraVariant(DoraLinearVariant):
    """PEFT's DoRA with `DoraLayer`."""

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        made = DoraLayer(module.fan_in_fan_out)
        factors = {"lora_A": module.lora_A[adapter_name].weight, "lora_B": module.lora_B[adapter_name].weight}
        made.update_layer(base_layer=module.get_base_layer(), scaling=module.scaling[adapter_name], **factors)
        module.lora_magnitude_vector[adapter_name] = made


def _values(base_layer: Any) -> Tensor | None:
    """Returns a quantized layer's weight as its products see it, in float32; None for other layers."""
    weight = base_layer.weight
    if isinstance(weight, CastWeight):
        weight = weight.quantized()
    if not isinstance(weight, QuantizedTensor):
        return None
    with torch.no_grad():
        return weight.dequantize(torch.float32)
