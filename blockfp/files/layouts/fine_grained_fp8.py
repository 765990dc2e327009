"""The layout of DeepSeek's and Qwen's FP8 releases ("fp8" in transformers, vLLM and SGLang): 128x128 blocks.

NAME holds the codes as F8_E4M3; NAME_scale_inv (F32) holds one scale per block, a factor of the codes.
"""

from __future__ import annotations

from typing import Any

from ...formats import E4M3, Format
from ..contents import Contents, Weight
from ..modelfile import Tensor
from .layout import Layout, codes_as, unquantized_layers

_BLOCK = (128, 128)


class FineGrainedFP8(Layout):
    """FP8 codes and fp32 scales of 128x128 blocks."""

    name = "fine-grained-fp8"

    def problem(self, weight: Weight) -> str | None:
        if weight.format.element is not E4M3 or weight.format.block != _BLOCK:
            return f"has no layout for {weight.format}, only for E4M3 in blocks of 128x128"
        return None

    def nearest(self, format: Format) -> Format:
        return Format.parse("fp8_e4m3_128x128" if format.scale.power_of_two else "fp8_e4m3_128x128_fp32")

    def laid_out(self, weight: Weight) -> list[Tensor]:
        scales = weight.scales
        return [codes_as(weight.name, weight), Tensor(f"{weight.name}_scale_inv", scales.dtype, scales.shape, scales.read)]

    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_BLOCK),
            "modules_to_not_convert": unquantized_layers(model),
        }
        return {"config.json": {"quantization_config": config}}
