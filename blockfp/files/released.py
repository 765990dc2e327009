"""Reads released models: weights in the .safetensors layouts of other libraries.

A layout is recognized by the names and dtypes of its entries; b is a block of the format:

| written by | codes | scales | tensor scale | format |
|---|---|---|---|---|
| DeepSeek, Qwen, transformers | NAME F8_E4M3 | NAME_scale_inv F32, b 128x128 | | fp8_e4m3_128x128_fp32 |
| the same | NAME F8_E4M3 | NAME_scale_inv F8_E8M0, b 128x128 | | fp8_e4m3_128x128 |
| DeepSeek's experts in FP4 | NAME I8, two per byte | NAME_scale_inv F8_E8M0, b 1x32 | | mxfp4_e2m1 |
| DeepSeek V4, Mistral | L.weight, as above | L.scale, L.qscale_weight, as above | | as above |
| compressed-tensors, ModelOpt | NAME F8_E4M3, F8_E5M2 | NAME_scale, one | | fp8_e4m3, fp8_e5m2 |
| compressed-tensors | NAME F8_E4M3, F8_E5M2 | NAME_scale F32, b 128x128 or 1x128 | | fp8_.._fp32 |
| compressed-tensors, ModelOpt | NAME F8_E4M3, F8_E5M2 | NAME_scale [out, 1] or [out] | | fp8_e4m3_row, fp8_e5m2_row |
| compressed-tensors, ModelOpt | NAME F8_E4M3, F8_E5M2 | NAME_scale U8 or F8_E8M0, b 1x32 | | mxfp8_.. |
| compressed-tensors | NAME_packed U8 | NAME_scale U8 or F8_E8M0, b 1x32 | | mxfp4_e2m1 |
| compressed-tensors | NAME_packed U8 | NAME_scale F8_E4M3, b 1x16 | NAME_global_scale, one, divides | nvfp4 |
| ModelOpt | NAME U8 | NAME_scale F8_E4M3, b 1x16 | NAME_scale_2, one | nvfp4 |
| any of them | F4 in place of U8, I8 | as there | as there | as there |
| gpt-oss | NAME_blocks U8 [.., b, 16] | NAME_scales U8, b 1x32 | | mxfp4_e2m1 |

Codes and scales keep their bits, with three exceptions: E8M0 scales of 128x128 blocks become the same powers of two in fp32,
16-bit scales become fp32, and a dividing scale becomes its fp32 inverse rounded to nearest (values within 2 ulp). Reading a
scale that is NaN or infinite raises an error. If rows have at most 128 columns, [out, 1] is ambiguous: it means one scale per
row if config.json names the strategy "channel" and not "group", else 1x128 blocks with the same values.

Other quantization, such as zero points, is refused by name. So are codes without scales or with extra scales, block sizes that
contradict config.json, and integers of a model whose config.json names a method without a layout here (HQQ, EETQ, AQLM, torchao
..), which a reader would mistake for values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..definition.layout import DTYPES, codes_shape, dtype_of, pack, scales_shape
from ..errors import BadFile
from ..formats import E2M1, E4M3, E5M2, E8M0_CEIL, ElementFormat, Format
from . import untrusted
from .contents import Weight
from .modelfile import BY_TAG, F4, Tensor


class Marks(NamedTuple):
    """Suffixes of the entries of a weight in a layout.

    Attributes:
        codes, scales: suffixes of codes and block scales.
        tensor_scale: suffix of the tensor scale, or None.
        divides: whether the tensor scale divides.
        weight: suffix of the parameter's name.
    """

    codes: str
    scales: str
    tensor_scale: str | None = None
    divides: bool = False
    weight: str = ""


FINE_GRAINED_FP8 = Marks("", "_scale_inv")
MODELOPT = Marks("", "_scale", "_scale_2")
PACKED = Marks("_packed", "_scale", "_global_scale", divides=True)
GPT_OSS = Marks("_blocks", "_scales")

_DEEPSEEK_V4 = Marks(".weight", ".scale", weight=".weight")
_MISTRAL = Marks(".weight", ".qscale_weight", weight=".weight")

_BY_SCALES = (FINE_GRAINED_FP8, GPT_OSS, PACKED, MODELOPT, _DEEPSEEK_V4, _MISTRAL)
_SCALES = {ending for marks in _BY_SCALES for ending in (marks.scales, marks.tensor_scale) if ending and not marks.weight}
FP8 = dtype_of(E4M3.native_dtype)
_ELEMENTS = {dtype_of(element.native_dtype): element for element in (E4M3, E5M2, E2M1)}
_FNUZ = (BY_TAG["F8_E4M3FNUZ"], BY_TAG["F8_E5M2FNUZ"])
_BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
_E8M0 = dtype_of(E8M0_CEIL.native_dtype)
_NUMBERS = tuple(DTYPES.values())

_OTHERS = {
    "_zero_point": "zero points",
    ".qzeros": "GPTQ's or AWQ's integers",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes' NF4",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes' FP4",
    ".SCB": "bitsandbytes' integers",
    ".pre_quant_scale": "inputs that are scaled first (AWQ)",
    ".bitmask": "sparse weights",
}
"""Suffixes of entries that indicate an unsupported quantization."""

_METHODS = ("blockfp", "fp8", "compressed-tensors", "modelopt", "mxfp4", "fbgemm_fp8", "quark")
"""Methods in config.json with a known layout. With other methods, 32-bit integers and vectors may also be codes."""

_OF_ACTIVATIONS = tuple(f"{name}_scale" for name in ("input", "input_global", "activation", "output", "q", "k", "v", "kv"))
"""Suffixes of scales that weights don't use."""


def weights(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Returns the quantized weights among a file's tensors, by name.

    Raises BadFile, naming the quantization, if blockfp has no format for it.
    """
    for name in tensors:
        for ending, what in _OTHERS.items():
            if name.endswith(ending):
                raise BadFile(path, f"uses {what}, for which blockfp has no format", name)
    found: dict[str, Weight] = {}
    told = cache(lambda: _told(path))
    for name, scales in tensors.items():
        for marks in _BY_SCALES:
            stem = name.removesuffix(marks.scales)
            codes = tensors.get(stem + marks.codes)
            if stem == name or codes is None or not _are_codes(codes):
                continue
            above = tensors.get(stem + marks.tensor_scale) if marks.tensor_scale else None
            weight = _weight(path, stem + marks.weight, marks, codes, scales, above, told())
            _check_alone(path, weight, found.get(weight.name), tensors)
            found[weight.name] = weight
            break
    _check_scaled(path, tensors, found, told)
    return found


def _check_alone(path: Path, weight: Weight, other: Weight | None, tensors: Mapping[str, Tensor]) -> None:
    """Raises BadFile if a weight has more scales than its layout."""
    beyond = [name for name in (weight.name + ending for ending in _SCALES) if name in tensors and name not in weight.entries]
    beyond += [] if other is None else list(other.entries[1:])
    if beyond:
        own = ", ".join(sorted(weight.entries[1:]))
        raise BadFile(path, f"has {own} and also {min(beyond)}, which no layout combines", weight.name)


def _check_scaled(path: Path, tensors: Mapping[str, Tensor], found: Mapping[str, Weight], told: Callable[[], _Told]) -> None:
    """Raises BadFile if a quantized model has codes without known scales, which would be mistaken for values."""
    taken = {name for weight in found.values() for name in weight.entries}
    for name, tensor in tensors.items():
        small = tensor.dtype in (*_ELEMENTS, *_FNUZ) and len(tensor.shape) > 1
        codes = small or (name.endswith((PACKED.codes, GPT_OSS.codes)) and _are_codes(tensor))
        if name in taken or not (codes or _may_be_codes(tensor, told)):
            continue
        layer = name.rpartition(".")[0] + "."
        scales = [other for other in tensors if other.startswith(layer) and "scale" in other.removeprefix(layer)]
        near = [other for other in scales if other not in taken and not other.endswith(_OF_ACTIVATIONS)]
        if near or found or told().quantized:
            there = f"; {near[0]} exists, but no known layout uses that name" if near else ", in this file or these files"
            if told().foreign:
                there += f"; config.json names the method {told().foreign!r}, whose layout is unknown"
            raise BadFile(path, f"is {tensor.dtype} {tensor.shape} without scales{there}", name)


def _may_be_codes(tensor: Tensor, told: Callable[[], _Told]) -> bool:
    """Returns whether unclaimed integers may be codes: the model is quantized, and they aren't tables of tokens or
    positions."""
    if tensor.dtype.kind not in "iu" or not tensor.shape or not told().quantized:
        return False
    return tensor.dtype.itemsize <= 4 if told().foreign else tensor.dtype.itemsize <= 2 and len(tensor.shape) > 1


def activation_scales(weights: Collection[str], others: Mapping[str, Tensor]) -> list[str]:
    """Returns names of single scales of activations (layer inputs and KV caches) in layers with quantized weights."""
    quantized = {name[: dot.start()] for name in weights for dot in re.finditer(r"\.", name)}
    return [
        name
        for name, tensor in others.items()
        if name.endswith(_OF_ACTIVATIONS) and tensor.elements == 1 and name.rpartition(".")[0] in quantized
    ]


def _are_codes(tensor: Tensor) -> bool:
    # 32-bit integers hold several codes of other quantizers.
    return tensor.dtype in (*_ELEMENTS, *_FNUZ, *_BYTES, np.dtype(np.int32))


class _Told(NamedTuple):
    """Settings in the config.json next to a file.

    Attributes:
        dtype: dtype of values; bfloat16 if unspecified.
        channels: whether compressed-tensors' strategy "channel" is present and "group" is not.
        blocks: (rows, columns) of the block sizes that it names.
        quantized: whether the model is quantized.
        foreign: the quantization method, if it has no layout here.
    """

    dtype: np.dtype
    channels: bool = False
    blocks: frozenset[tuple[int, int]] = frozenset()
    quantized: bool = False
    foreign: str = ""


def _told(path: Path) -> _Told:
    config_json = path.with_name("config.json")
    try:
        config = untrusted.read_json(config_json)
    except FileNotFoundError:
        return _Told(DTYPES["bfloat16"])
    except (OSError, ValueError) as error:
        raise BadFile(config_json, f"can't be read, and may say how the model is quantized: {error}") from error
    if not isinstance(config, dict):
        return _Told(DTYPES["bfloat16"])
    named = config.get("dtype") or config.get("torch_dtype")
    dtype = DTYPES.get(named if isinstance(named, str) else "", DTYPES["bfloat16"])
    # Multimodal models nest their settings.
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    there = [part.get("quantization_config") or part.get("compression_config") for part in parts]
    settings = next((settings for settings in there if isinstance(settings, dict)), None)
    if settings is None:
        return _Told(dtype)
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise BadFile(path, "config.json has transform_config, which rotates the inputs of layers: blockfp has no such format")
    try:
        schemes = [group["weights"] for group in settings["config_groups"].values()]
        strategies = {scheme["strategy"] for scheme in schemes}
    except (AttributeError, KeyError, TypeError):
        schemes, strategies = [], set()
    blocks = [settings.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    blocks += [[1, scheme.get("group_size")] for scheme in schemes]
    sizes = {tuple(block) for block in blocks if isinstance(block, list) and all(map(untrusted.is_size, block))}
    sizes = frozenset((size[0], size[1]) for size in sizes if len(size) == 2)
    method = str(settings.get("quant_method") or "")
    foreign = "" if method.lower().startswith(_METHODS) else method
    return _Told(dtype, "channel" in strategies and "group" not in strategies, sizes, True, foreign)


def _weight(path: Path, name: str, marks: Marks, codes: Tensor, scales: Tensor, above: Tensor | None, told: _Told) -> Weight:
    shape = codes.shape
    if marks is GPT_OSS and len(codes.shape) > 2 and codes.shape[-1] == 16:
        shape = (*shape[:-2], shape[-2] * 16)
    element = _ELEMENTS.get(codes.dtype, E2M1)
    if codes.dtype in _BYTES:
        shape = (*shape[:-1], 2 * shape[-1])
    format = None if codes.dtype in (np.dtype(np.int32), *_FNUZ) else _format(element, shape, scales, above, told.channels)
    if format is None:
        what = f"is {codes.dtype} {codes.shape} with scales {scales.dtype} {scales.shape} ({scales.name})"
        if above is not None:
            what += f" and one above them, {above.dtype} {above.shape} ({above.name})"
        elif marks.tensor_scale and scales.dtype == FP8:
            what += f" and without {codes.name.removesuffix(marks.codes)}{marks.tensor_scale}, the one above them"
        raise BadFile(path, f"{what}: a way to quantize that no format of blockfp has", name)
    if told.blocks and not any(_alike(format, block, shape) for block in told.blocks):
        sizes = " or ".join(f"{rows}x{columns}" for rows, columns in sorted(told.blocks))
        raise BadFile(path, f"has scales {scales.shape} as {format}, but config.json specifies blocks of {sizes}", name)
    stored = codes_shape(shape, format)

    def read_codes() -> np.ndarray:
        x = codes.read().view(np.uint8).reshape(-1)
        return (pack(x, 4) if codes.dtype == F4 else x).reshape(stored)

    kept = Tensor(name, np.dtype(np.uint8), stored, read_codes)
    grid = scales_shape(shape, format)

    def read_scales() -> np.ndarray:
        x = scales.read()
        x = x.view(np.uint8) if format.scale.dtype == "uint8" else _numbers(path, scales.name, x)
        return x.reshape(grid)

    own = Tensor(name, np.dtype(format.scale.dtype), grid, read_scales)
    entries = (codes.name, scales.name) if above is None else (codes.name, scales.name, above.name)
    factor = None
    if above is not None:

        def tensor_scale() -> np.ndarray:
            x = _numbers(path, above.name, above.read())
            with np.errstate(divide="ignore", over="ignore"):
                return (_numbers(path, above.name, 1 / x, "and its inverse") if marks.divides else x).reshape(())

        factor = Tensor(name, np.dtype(np.float32), (), tensor_scale)
    return Weight(name, format, shape, told.dtype, kept, own, factor, entries)


def _format(
    element: ElementFormat, shape: tuple[int, ...], scales: Tensor, above: Tensor | None, channels: bool
) -> Format | None:
    """Returns the format that matches these scales, or None; `channels` prefers one scale per row."""
    if len(shape) < 2:
        return None
    fp8, mx = f"fp8_{element}", f"{'mxfp4' if element is E2M1 else 'mxfp8'}_{element}"
    if above is not None:
        fits = element is E2M1 and scales.dtype == FP8 and above.elements == 1 and above.dtype in _NUMBERS
        names = ["nvfp4"] if fits else []
    elif scales.dtype in _NUMBERS:
        names = [] if element is E2M1 else [f"{fp8}_128x128_fp32", f"{fp8}_1x128_fp32", fp8, f"{fp8}_row"]
        names = sorted(names, key=lambda name: name != f"{fp8}_row") if channels else names
    elif scales.dtype == _E8M0:
        names = [mx] if element is E2M1 else [mx, f"{fp8}_128x128"]
    else:
        names = [mx] if scales.dtype == np.uint8 else []
    for format in map(Format.parse, names):
        grid = scales_shape(shape, format)
        fits = scales.elements == 1 if format.per_tensor else scales.shape == grid
        if fits or (format.per_row and scales.shape == grid[:-1]):
            return format
    return None


def _alike(format: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Returns whether both block shapes divide this matrix into the same blocks."""
    if format.block is None or format.per_row or format.element is E2M1:
        return True
    return all(a == b or size <= min(a, b) for a, b, size in zip(format.block, block, shape[-2:], strict=True))


def _numbers(path: Path, name: str, x: np.ndarray, what: str = "") -> np.ndarray:
    """Returns scales in fp32; raises BadFile if one is not finite or negative."""
    x = x.astype(np.float32)
    bad = ~(np.isfinite(x) & (x >= 0))
    if bad.any():
        found = x[bad].reshape(-1)[0]
        raise BadFile(path, f"holds a scale that is {found}: scales{what and f' {what}'} must be finite and not negative", name)
    return x
