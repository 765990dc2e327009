"""The layout of gpt-oss, "mxfp4" in transformers: experts in blocks of 32.

NAME_blocks (U8) is [.., rows, blocks, 16] with two codes per byte, and NAME_scales (U8) is [.., rows, blocks].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import E2M1, Format
from ..contents import Contents, Weight
from ..modelfile import Tensor
from .layout import Layout, layer_of, scales_of_rows, unquantized_layers


class MXFP4(Layout):
    """MXFP4 codes in blocks of 16 bytes, and their scales."""

    name = "mxfp4"
    kv_names = ()

    def problem(self, weight: Weight) -> str | None:
        if weight.format.element is not E2M1 or not weight.format.scale.e8m0:
            return f"has no layout for {weight.format}, only for MXFP4"
        return f"needs rows of a multiple of 32 columns, got {weight.shape[-1]}" if weight.shape[-1] % 32 else None

    def nearest(self, format: Format) -> Format:
        return Format.parse("mxfp4_e2m1_32x32" if format.square else "mxfp4_e2m1")

    def laid_out(self, weight: Weight) -> list[Tensor]:
        grid = (*weight.shape[:-1], weight.shape[-1] // 32)
        blocks = (*grid, 16)
        codes = Tensor(f"{weight.name}_blocks", np.dtype(np.uint8), blocks, lambda: weight.codes.read().reshape(blocks))
        return [codes, scales_of_rows(f"{weight.name}_scales", weight, np.dtype(np.uint8), grid)]

    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        others = unquantized_layers(model)
        quantized = {layer_of(name) for name in model.weights}
        config = {"quant_method": "mxfp4", "modules_to_not_convert": [name for name in others if name not in quantized]}
        return {"config.json": {"quantization_config": config}}
