"""The layout of NVIDIA's ModelOpt for NVFP4, which TensorRT-LLM, vLLM and SGLang read.

NAME holds two codes per byte, NAME_scale (F8_E4M3) one scale per 16 columns, NAME_scale_2 (F32) the tensor scale. A value is
the product of all three, as in blockfp, so all bits are kept.

The configuration states W4A16_NVFP4, weights alone. NVFP4 would state quantized inputs too, whose tensor scale is set before
(`input_scale`) and which a recipe doesn't have; vLLM and SGLang leave one that is missing uninitialized.
"""

from __future__ import annotations

from typing import Any

from ...formats import Format
from ..contents import Contents, Weight
from ..modelfile import Tensor
from .layout import FP8, Layout, codes_as, is_weight, scales_of_rows, unquantized_layers

_ALGORITHM = "W4A16_NVFP4"


class ModelOpt(Layout):
    """NVFP4 codes, scales and tensor scales."""

    name = "modelopt"
    kv_names = ("k_proj.k_scale", "v_proj.v_scale")

    def problem(self, weight: Weight) -> str | None:
        if not weight.format.scale.two_level:
            return f"has no layout for {weight.format}, only for NVFP4"
        if len(weight.shape) != 2 or not is_weight(weight.name):
            return f"quantizes matrices called '..weight'; this one has shape {weight.shape}"
        return f"needs rows of a multiple of 16 columns, got {weight.shape[1]}" if weight.shape[1] % 16 else None

    def nearest(self, format: Format) -> Format:
        return Format.parse("nvfp4_16x16" if format.square else "nvfp4")

    def laid_out(self, weight: Weight) -> list[Tensor]:
        name, (rows, columns), factor = weight.name, weight.shape, weight.tensor_scale
        assert factor is not None
        scales = scales_of_rows(f"{name}_scale", weight, FP8, (rows, columns // 16))
        return [codes_as(name, weight), scales, Tensor(f"{name}_scale_2", factor.dtype, (), factor.read)]

    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        ignored = unquantized_layers(model)
        kv = "FP8" if model.kv_scales else None
        told = {"quant_algo": _ALGORITHM, "kv_cache_quant_algo": kv, "group_size": 16, "exclude_modules": ignored}
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        config: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": _ALGORITHM,
            "ignore": ignored,
            "config_groups": groups,
        }
        if kv:
            config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {
            "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": told},
            "config.json": {"quantization_config": config},
        }
