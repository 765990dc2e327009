"""Export to the layout of compressed-tensors, which vLLM and transformers read.

| format | `quantization_config` says | weight | weight_scale |
|---|---|---|---|
| fp8_e4m3, .._pow2 | float-quantized, strategy tensor | F8_E4M3 | F32 [1] |
| fp8_e4m3_128x128, .._fp32 | float-quantized, strategy block | F8_E4M3 | F32 [out/128, in/128], rounded up |
| fp8_e4m3_1x128, .._fp32 | float-quantized, strategy group, 128 | F8_E4M3 | F32 [out, in/128] |
| mxfp8_e4m3, .._32x32, .._floor | mxfp8-quantized, strategy group, 32 | F8_E4M3 | U8 [out, in/32] |
| mxfp4_e2m1, .._32x32, .._floor | mxfp4-pack-quantized, strategy group, 32 | U8 weight_packed | U8 [out, in/32] |
| nvfp4, nvfp4_16x16 | nvfp4-pack-quantized, strategy tensor_group, 16 | U8 weight_packed | F8_E4M3 [out, in/16] |

NVFP4 has a weight_global_scale F32 [1] beside them, div(1, tensor_scale), by which readers divide. Codes are the same bytes.
Scales of square blocks of 16 and 32 are repeated for each row. FP8 and MX values come out to the bit; those of NVFP4 within
2 ulp of fp32, because compressed-tensors computes code * (s_b / global_scale), and blockfp code * (s_b * tensor_scale).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..definition import layout
from ..errors import BadFile
from ..formats import E2M1, E4M3, Format
from . import saving
from .atomic import replacing
from .export import Contents, Progress, Weight, write
from .modelfile import Tensor

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Scheme:
    """compressed-tensors' description of a format.

    Attributes:
        format: its name for the layout.
        weights: its description of the numbers, the fields of its `QuantizationArgs`.
        packed: whether codes are two a byte, in an entry "weight_packed".
    """

    format: str
    weights: dict[str, Any]
    packed: bool

    @property
    def group(self) -> int | None:
        """Columns that share a scale, and must divide a row."""
        return self.weights.get("group_size")


def scheme(format: Format) -> Scheme | None:
    """The description of a format; None where compressed-tensors has no layout for it."""
    common = {"num_bits": format.element.bits, "type": "float", "symmetric": True, "dynamic": False}
    if format.element is E4M3 and format.block is None:
        return Scheme("float-quantized", {**common, "strategy": "tensor"}, False)
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


def export(model: Contents, folder: Path, file_bytes: int | None, done: Progress) -> None:
    """Writes model.safetensors and config.json, whose "quantization_config" belongs into the model's own config.json.

    Args:
        model: what to write.
        folder: where to.
        file_bytes: as for `blockfp.save`.
        done: called with each tensor.

    Raises:
        BadFile: compressed-tensors has no layout for a weight, for its format, its shape, its name (which must be "..weight")
            or scales that the layout can't hold, or a tensor can't be stored; nothing is written then.
    """
    schemes = {name: _checked(model, weight) for name, weight in model.weights.items()}
    tensors = dict(model.others)
    for name, weight in model.weights.items():
        tensors |= {tensor.name: tensor for tensor in _laid_out(name, weight, schemes[name])}
    path = folder / "model.safetensors"
    saving.entries_of(path, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write(path, tensors, file_bytes, done, {"format": "pt"})
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps({"quantization_config": _config(schemes)}, indent=1) + "\n")


def _checked(model: Contents, weight: Weight) -> Scheme:
    known = scheme(weight.format)
    problem = None
    if known is None:
        problem = f"compressed-tensors has no layout for {weight.format}: export it in blockfp's, or in high precision"
    elif len(weight.shape) != 2 or weight.name.rpartition(".")[2] != "weight":
        problem = f"compressed-tensors quantizes matrices called '..weight'; this one has shape {weight.shape}"
    elif known.group and weight.shape[1] % known.group:
        problem = f"compressed-tensors needs rows of a multiple of {known.group} columns, got {weight.shape[1]}"
    elif weight.format.scale.nan_code is not None and (weight.scales.read() == weight.format.scale.nan_code).any():
        problem = "has NaN scales, which compressed-tensors would read as numbers"
    elif weight.tensor_scale is not None and not np.isfinite(_inverse(weight.tensor_scale)):
        scale = weight.tensor_scale.read()
        problem = f"tensor_scale {scale} has no finite inverse, by which compressed-tensors divides: its values are too small"
    if known is None or problem:
        raise BadFile(model.path, problem, weight.name)
    return known


def _laid_out(name: str, weight: Weight, known: Scheme) -> list[Tensor]:
    """The entries of a weight."""
    rows, columns = weight.shape
    codes, scales, tensor_scale = weight.codes, weight.scales, weight.tensor_scale
    byte = np.dtype(np.uint8) if known.packed else _FP8
    where = f"{name}_packed" if known.packed else name
    laid = [Tensor(where, byte, codes.shape, lambda: codes.read().view(byte))]
    if known.group is None:
        shape = (1,) if weight.format.block is None else scales.shape
        return [*laid, Tensor(f"{name}_scale", scales.dtype, shape, lambda: scales.read().reshape(shape))]
    dtype = _FP8 if tensor_scale is not None else scales.dtype
    block_rows = (weight.format.block or (1, 1))[0]

    def repeated() -> np.ndarray:
        return np.asarray(layout.repeat_scales(scales.read(), block_rows, rows)).view(dtype)

    laid.append(Tensor(f"{name}_scale", dtype, (rows, columns // known.group), repeated))
    if tensor_scale is not None:
        inverse = partial(_inverse, tensor_scale)
        laid.append(Tensor(f"{name}_global_scale", np.dtype(np.float32), (1,), inverse))
    return laid


def _inverse(tensor_scale: Tensor) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return (np.float32(1) / tensor_scale.read()).reshape(1)


def _config(schemes: dict[str, Scheme]) -> dict[str, Any]:
    groups: list[tuple[Scheme, list[str]]] = []
    for name, known in schemes.items():
        target = _target(name.rpartition(".")[0])
        for other, targets in groups:
            if other == known:
                targets.append(target)
                break
        else:
            groups.append((known, [target]))
    formats = {known.format for known, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": known.weights,
                "input_activations": None,
                "output_activations": None,
                "format": known.format,
            }
            for i, (known, targets) in enumerate(groups)
        },
        "ignore": [],
        "kv_cache_scheme": None,
    }


def _target(layer: str) -> str:
    """A layer's name as a target: without a dot, compressed-tensors might take it for a class such as "Linear"."""
    return layer if "." in layer else f"re:^{re.escape(layer)}$"
