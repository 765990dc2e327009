"""The layout of compressed-tensors, which vLLM and transformers read.

| format | `quantization_config` | weight | weight_scale |
|---|---|---|---|
| fp8_e4m3, .._pow2 | float-quantized, strategy tensor | F8_E4M3 | F32 [1] |
| fp8_e4m3_row, .._pow2 | float-quantized, strategy channel | F8_E4M3 | F32 [out, 1] |
| fp8_e4m3_128x128, .._fp32 | float-quantized, strategy block | F8_E4M3 | F32 [out/128, in/128], rounded up |
| fp8_e4m3_1x128, .._fp32 | float-quantized, strategy group, 128 | F8_E4M3 | F32 [out, in/128] |
| mxfp8_e4m3, .._32x32, .._floor | mxfp8-quantized, strategy group, 32 | F8_E4M3 | U8 [out, in/32] |
| mxfp4_e2m1, .._32x32, .._floor | mxfp4-pack-quantized, strategy group, 32 | U8 weight_packed | U8 [out, in/32] |
| nvfp4, nvfp4_4over6.., .._16x16 | nvfp4-pack-quantized, strategy tensor_group, 16 | U8 weight_packed | F8_E4M3 [out, in/16] |

NVFP4 also has weight_global_scale F32 [1] = div(1, tensor_scale), by which readers divide. Codes are the same bytes. Scales of
square blocks of 16 and 32 are repeated for each row. FP8 and MX values are bit-exact; NVFP4 values are within 2 ulp of fp32,
because compressed-tensors computes code * (s_b / global_scale), and blockfp code * (s_b * tensor_scale).

"input_activations" describes how the forward quantizes a layer's input (`input_arguments`), if the model says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...formats import E2M1, E4M3, FORMATS, Format
from ..contents import Contents, Weight
from ..modelfile import Tensor
from .layout import FP8, Layout, codes_as, is_weight, nan_scales, nearest, scales_of_rows


@dataclass(frozen=True)
class Scheme:
    """compressed-tensors' description of a format.

    Attributes:
        format: its name for the layout.
        weights: fields of its `QuantizationArgs`.
        packed: whether an entry "weight_packed" holds two codes per byte.
    """

    format: str
    weights: dict[str, Any]
    packed: bool

    @property
    def group(self) -> int | None:
        """Columns per scale, which must divide a row."""
        return self.weights.get("group_size")


def scheme(format: Format) -> Scheme | None:
    """Returns the description of a format, or None if compressed-tensors has no layout for it."""
    common = {"num_bits": format.element.bits, "type": "float", "symmetric": True, "dynamic": False}
    if format.element is E4M3 and format.block is None:
        return Scheme("float-quantized", {**common, "strategy": "tensor"}, False)
    if format.element is E4M3 and format.per_row:
        return Scheme("float-quantized", {**common, "strategy": "channel"}, False)
    if format.element is E4M3 and format.block == (128, 128):
        return Scheme("float-quantized", {**common, "strategy": "block", "block_structure": [128, 128]}, False)
    if format.element is E4M3 and format.block == (1, 128):
        return Scheme("float-quantized", {**common, "strategy": "group", "group_size": 128}, False)
    e8m0 = {**common, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if format.scale.e8m0 and format.element in (E4M3, E2M1):
        name = "mxfp8-quantized" if format.element is E4M3 else "mxfp4-pack-quantized"
        return Scheme(name, e8m0, format.element is E2M1)
    if format.scale.two_level:
        e4m3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return Scheme("nvfp4-pack-quantized", {**common, "strategy": "tensor_group", "group_size": 16, **e4m3}, True)
    return None


def input_arguments(format: Format | None, weight: Weight) -> dict[str, Any] | None:
    """Returns the fields of `QuantizationArgs` of a layer's input, quantized in `format` at each forward; None states 16 bits.

    Described are pairs like the library's presets: servers read another as one that they know, or refuse the layer. Weight and
    input have one element and kind of scale, and the input's scales are of the tensor, of tokens, or of blocks of a row. NVFP4
    isn't described, because its presets set the input's scale of the tensor beforehand.
    """
    if format is None or (format.element, format.scale.dtype) != (weight.format.element, weight.format.scale.dtype):
        return None
    known = scheme(format)
    if known is None or format.scale.two_level or (format.block is not None and format.block[0] > 1):
        return None
    if known.group and weight.shape[-1] % known.group:
        return None
    return {**known.weights, "dynamic": True, **({"strategy": "token"} if format.per_row else {})}


_KV = Format.parse("fp8_e4m3")
"""The format of cached keys and values."""


class CompressedTensors(Layout):
    """Weights in compressed-tensors' entries, and "quantization_config" in config.json."""

    name = "compressed-tensors"
    kv_per_head = True

    def problem(self, weight: Weight) -> str | None:
        known = scheme(weight.format)
        if known is None:
            return f"has no layout for {weight.format}"
        if len(weight.shape) != 2 or not is_weight(weight.name):
            return f"quantizes matrices called '..weight'; this one has shape {weight.shape}"
        if known.group and weight.shape[1] % known.group:
            return f"needs rows of a multiple of {known.group} columns, got {weight.shape[1]}"
        return None

    def trouble(self, weight: Weight) -> str | None:
        if weight.tensor_scale is not None and not np.isfinite(_inverse(weight.tensor_scale)):
            scale = weight.tensor_scale.read()
            return f"tensor_scale {scale} has no finite inverse, by which compressed-tensors divides: its values are too small"
        return nan_scales(weight, self.name)

    def nearest(self, format: Format) -> Format:
        return nearest(format, (format for format in FORMATS if scheme(format)))

    def laid_out(self, weight: Weight) -> list[Tensor]:
        known = scheme(weight.format)
        assert known is not None
        name, (rows, columns) = weight.name, weight.shape
        scales, tensor_scale = weight.scales, weight.tensor_scale
        laid = [codes_as(f"{name}_packed" if known.packed else name, weight)]
        if known.group is None:
            shape = (1,) if weight.format.block is None else scales.shape
            return [*laid, Tensor(f"{name}_scale", scales.dtype, shape, lambda: scales.read().reshape(shape))]
        dtype = FP8 if tensor_scale is not None else scales.dtype
        laid.append(scales_of_rows(f"{name}_scale", weight, dtype, (rows, columns // known.group)))
        if tensor_scale is not None:
            inverse = partial(_inverse, tensor_scale)
            laid.append(Tensor(f"{name}_global_scale", np.dtype(np.float32), (1,), inverse))
        return laid

    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        schemes = {
            name: (known, input_arguments(model.inputs.get(name), weight))
            for name, weight in model.weights.items()
            if (known := scheme(weight.format))
        }
        kv, known = None, scheme(_KV)
        assert known is not None
        for scale, _ in model.kv_scales.values():
            kv = {**known.weights, "strategy": "attn_head" if len(scale.shape) > 1 else "tensor"}
        return {"config.json": {"quantization_config": {**_config(schemes), "kv_cache_scheme": kv}}}


def _inverse(tensor_scale: Tensor) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return (np.float32(1) / tensor_scale.read()).reshape(1)


def _config(schemes: dict[str, tuple[Scheme, dict[str, Any] | None]]) -> dict[str, Any]:
    groups: list[tuple[tuple[Scheme, dict[str, Any] | None], list[str]]] = []
    for name, known in schemes.items():
        target = _target(name.rpartition(".")[0])
        for other, targets in groups:
            if other == known:
                targets.append(target)
                break
        else:
            groups.append((known, [target]))
    formats = {known.format for (known, _), _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": known.weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": known.format,
            }
            for i, ((known, inputs), targets) in enumerate(groups)
        },
        "ignore": [],
    }


def _target(layer: str) -> str:
    """Returns a layer's name as a target; compressed-tensors may take a name without a dot for a class such as "Linear"."""
    return layer if "." in layer else f"re:^{re.escape(layer)}$"
