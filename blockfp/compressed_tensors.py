"""Export to the layout of compressed-tensors, which vLLM and transformers read.

| format | `quantization_config` says | entries of a weight NAME.weight [out, in] |
|---|---|---|
| fp8_e4m3, .._pow2 | float-quantized, strategy tensor | weight F8_E4M3, weight_scale F32 [1] |
| fp8_e4m3_128x128, .._fp32 | float-quantized, strategy block | weight F8_E4M3, weight_scale F32 [out/128, in/128], rounded up |
| fp8_e4m3_1x128, .._fp32 | float-quantized, strategy group, 128 | weight F8_E4M3, weight_scale F32 [out, in/128] |
| mxfp8_e4m3, .._32x32, .._floor | mxfp8-quantized, strategy group, 32 | weight F8_E4M3, weight_scale U8 [out, in/32] |
| mxfp4_e2m1, .._32x32, .._floor | mxfp4-pack-quantized, strategy group, 32 | weight_packed U8 [out, in/2], weight_scale U8 [out, in/32] |
| nvfp4, nvfp4_16x16 | nvfp4-pack-quantized, tensor_group, 16 | weight_packed U8, weight_scale F8_E4M3 [out, in/16], weight_global_scale F32 [1] |

Codes are the same bytes. Scales of square blocks of 16 and 32 are repeated for each row. The global scale of NVFP4 is
div(1, tensor_scale), which readers divide by. FP8 and MX values come out as here, to the bit; those of NVFP4 differ by up to 2 ulp
of fp32, because compressed-tensors computes code * (s_b / global_scale), and blockfp code * (s_b * tensor_scale).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import layout
from .atomic import replacing
from .export import Contents, Progress, Weight, other_arrays, write
from .formats import E2M1, E4M3, Format
from .modelfile import BadFile, Entry

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors calls a format.

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
    """What a format is called there; None where compressed-tensors has no layout for it."""
    common = {"num_bits": format.element.bits, "type": "float", "symmetric": True, "dynamic": False}
    if format.element is E4M3 and format.block is None:
        return Scheme("float-quantized", {**common, "strategy": "tensor"}, False)
    if format.element is E4M3 and format.block == (128, 128):
        return Scheme("float-quantized", {**common, "strategy": "block", "block_structure": [128, 128]}, False)
    if format.element is E4M3 and format.block == (1, 128):
        return Scheme("float-quantized", {**common, "strategy": "group", "group_size": 128}, False)
    e8m0 = {**common, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if format.scale.name.startswith("e8m0") and format.element in (E4M3, E2M1):
        name = "mxfp8-quantized" if format.element is E4M3 else "mxfp4-pack-quantized"
        return Scheme(name, e8m0, format.element is E2M1)
    if format.scale.two_level:
        e4m3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return Scheme("nvfp4-pack-quantized", {**common, "strategy": "tensor_group", "group_size": 16, **e4m3}, True)
    return None


def export(model: Contents, folder: Path, done: Progress) -> None:
    """Writes model.safetensors and config.json, whose "quantization_config" belongs into the model's own config.json.

    Raises:
        BadFile: a weight in a format, of a shape, or with a NaN scale that compressed-tensors has no layout for, or one that isn't
            called "..weight"; nothing is written then.
    """
    schemes = {name: _checked(model, weight) for name, weight in model.weights.items()}
    entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in model.others.items()]
    for name, weight in model.weights.items():
        entries += [entry for entry, _ in _laid_out(name, weight, schemes[name])]

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        yield from other_arrays(model, done)
        for name, weight in model.weights.items():
            for entry, read in _laid_out(name, weight, schemes[name]):
                yield entry.name, np.ascontiguousarray(read())
            done(weight.parts[0])

    write(folder / "model.safetensors", entries, arrays(), {"format": "pt"})
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
    elif weight.format.scale.nan_code is not None and (weight.parts[1].read() == weight.format.scale.nan_code).any():
        problem = "has NaN scales, which compressed-tensors would read as numbers"
    if known is None or problem:
        raise BadFile(model.path, problem, weight.name)
    return known


def _laid_out(name: str, weight: Weight, known: Scheme) -> list[tuple[Entry, Callable[[], np.ndarray]]]:
    """The entries of a weight, and what reads each."""
    rows, columns = weight.shape
    codes, scales, *rest = weight.parts
    where = f"{name}_packed" if known.packed else name
    byte = np.dtype(np.uint8) if known.packed else _FP8
    laid = [(Entry(where, byte, codes.shape), lambda: codes.read().view(byte))]
    if known.group is None:
        shape = (1,) if weight.format.block is None else scales.shape
        laid.append((Entry(f"{name}_scale", scales.dtype, shape), lambda: scales.read().reshape(shape)))
        return laid
    dtype = _FP8 if weight.format.scale.two_level else scales.dtype
    block_rows = (weight.format.block or (1, 1))[0]
    laid.append(
        (
            Entry(f"{name}_scale", dtype, (rows, columns // known.group)),
            lambda: np.asarray(layout.repeat_scales(scales.read(), block_rows, rows)).view(dtype),
        )
    )
    if rest:
        entry = Entry(f"{name}_global_scale", np.dtype(np.float32), (1,))
        laid.append((entry, lambda: (np.float32(1) / rest[0].read()).reshape(1)))
    return laid


def _config(schemes: dict[str, Scheme]) -> dict[str, Any]:
    groups: list[tuple[Scheme, list[str]]] = []
    for name, known in schemes.items():
        for other, targets in groups:
            if other == known:
                targets.append(name.rpartition(".")[0])
                break
        else:
            groups.append((known, [name.rpartition(".")[0]]))
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
