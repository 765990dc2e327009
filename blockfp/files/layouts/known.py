"""The layouts of FP8, NVFP4 and gpt-oss releases, the table of all layouts, and conversion of models to a layout's formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...array import QuantizedArray, quantize
from ...errors import BadFile
from ...formats import E2M1, E4M3, Format
from ..contents import Contents, Weight, quantized_entries
from ..modelfile import Tensor
from ..released import activation_scales
from .compressed_tensors import CompressedTensors
from .layout import FP8, Layout, codes_as, is_weight, layer_of, scales_of_rows, unquantized_layers


class FineGrainedFP8(Layout):
    """The layout of DeepSeek's and Qwen's FP8 releases ("fp8" in transformers, vLLM and SGLang): 128x128 blocks.

    NAME holds the codes as F8_E4M3; NAME_scale_inv (F32) holds one scale per block, a factor of the codes.
    """

    name = "fine-grained-fp8"

    def problem(self, weight: Weight) -> str | None:
        if weight.format.element is not E4M3 or weight.format.block != (128, 128):
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
            "weight_block_size": [128, 128],
            "modules_to_not_convert": unquantized_layers(model),
        }
        return {"config.json": {"quantization_config": config}}


class ModelOpt(Layout):
    """The layout of NVIDIA's ModelOpt for NVFP4, which TensorRT-LLM, vLLM and SGLang read.

    NAME holds two codes per byte, NAME_scale (F8_E4M3) one scale per 16 columns, NAME_scale_2 (F32) the tensor scale. A value
    is the product of all three, as in blockfp, so all bits are kept.

    The configuration states W4A16_NVFP4, weights alone. NVFP4 would state quantized inputs too, whose tensor scale is set
    before (`input_scale`) and which a recipe doesn't have; vLLM and SGLang leave one that is missing uninitialized.
    """

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
        algorithm = "W4A16_NVFP4"
        told = {"quant_algo": algorithm, "kv_cache_quant_algo": kv, "group_size": 16, "exclude_modules": ignored}
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        config: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "ignore": ignored,
            "config_groups": groups,
        }
        if kv:
            config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {
            "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": told},
            "config.json": {"quantization_config": config},
        }


class MXFP4(Layout):
    """The layout of gpt-oss, "mxfp4" in transformers: experts in blocks of 32.

    NAME_blocks (U8) is [.., rows, blocks, 16] with two codes per byte, and NAME_scales (U8) is [.., rows, blocks].
    """

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


LAYOUTS: dict[str, Layout] = {known.name: known for known in (CompressedTensors(), FineGrainedFP8(), ModelOpt(), MXFP4())}

Requantized = Callable[[Weight, np.ndarray, QuantizedArray], None]
"""Called with a weight, its previous values, and its requantization."""


def in_formats_of(known: Layout, model: Contents, done: Requantized) -> Contents:
    """Returns a model in formats that the layout supports; other weights are requantized when they are read.

    A weight that the layout rejects for another reason stays unchanged, so that `write_layout` raises the error. Scales of
    activations are dropped, because the layout's configuration doesn't describe them.
    """
    weights = {}
    for name, weight in model.weights.items():
        if known.problem(weight) is not None:
            other = _requantized(known, model, weight, done)
            weight = weight if known.problem(other) is not None else other
        weights[name] = weight
    left_out = activation_scales(weights, model.others)
    others = {name: tensor for name, tensor in model.others.items() if name not in left_out}
    return Contents(model.path, weights, others, model.masters, [*model.left_out, *left_out])


def quantized_as_used(model: Contents, known: Layout | None) -> Contents:
    """Returns a model with `casts` applied: these tensors are quantized when they are read, as its forward quantizes them.

    Raises BadFile, when reading, if the layout (None: blockfp's) can't hold the scales.
    """
    values = {name: replace(model.others[name], name=name) for name in model.casts}
    made = {name: _made(known, model.path, each, model.casts[name], each.read) for name, each in values.items()}
    others = {name: tensor for name, tensor in model.others.items() if name not in made}
    return replace(model, weights={**model.weights, **made}, others=others, casts={})


def _requantized(known: Layout, model: Contents, weight: Weight, done: Requantized) -> Weight:
    def noted(values: np.ndarray, q: QuantizedArray) -> None:
        done(weight, values, q)

    return _made(known, model.path, weight, known.nearest(weight.format), weight.values, noted)


def _made(
    known: Layout | None,
    path: Path,
    what: Weight | Tensor,
    format: Format,
    read_values: Callable[[], np.ndarray],
    done: Callable[[np.ndarray, QuantizedArray], None] = lambda values, q: None,
) -> Weight:
    """Returns a weight that is quantized when it is read."""

    @cache
    def made() -> QuantizedArray:
        values = read_values()
        q = quantize(values, format)
        parts = [np.asarray(part) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]
        held = _weight(what, format, [lambda part=part: part for part in parts])
        if known is not None and (problem := known.trouble(held)):
            raise BadFile(path, problem, what.name)
        done(values, q)
        return q

    def part(of: Callable[[QuantizedArray], np.ndarray | None], last: bool) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            array = np.asarray(of(made()))
            if last:
                # Models are written weight by weight: drop this weight after its last part.
                made.cache_clear()
            return array

        return read

    count = 3 if format.scale.two_level else 2
    of = (lambda q: q.codes, lambda q: q.scales, lambda q: q.tensor_scale)
    return _weight(what, format, [part(which, i == count - 1) for i, which in enumerate(of[:count])])


def _weight(weight: Weight | Tensor, format: Format, read: Sequence[Callable[[], np.ndarray]]) -> Weight:
    """Returns a weight in another format whose parts are computed by `read`."""
    _, *entries = quantized_entries(weight.name, weight.shape, weight.dtype, format)
    tensors = [Tensor(weight.name, entry.dtype, entry.shape, get) for entry, get in zip(entries, read, strict=True)]
    codes, scales, *rest = tensors
    return Weight(weight.name, format, weight.shape, weight.dtype, codes, scales, rest[0] if rest else None, made=True)
