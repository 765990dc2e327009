"""`Layout`: how a library stores quantized weights, and how to write a model in this way."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ...definition import layout
from ...definition.bits import Array
from ...errors import BadFile
from ...formats import Format
from .. import saving, untrusted
from ..atomic import make_folder, replacing
from ..contents import Contents, Progress, Weight
from ..export import write
from ..modelfile import Tensor
from ..released import FP8


class Layout(ABC):
    """Entries of weights in .safetensors files, and the JSON files next to them.

    Codes and scales may be arrays of any library; a tensor scale is a NumPy array.

    Attributes:
        name: its name in the `blockfp` command.
        kv_names: names of an attention's scales of cached keys and values, after the attention's; () if readers know none.
        kv_per_head: whether such a scale may be one for each head.
    """

    name: str
    kv_names: tuple[str, ...] = ("k_scale", "v_scale")
    kv_per_head: bool = False

    @abstractmethod
    def problem(self, weight: Weight) -> str | None:
        """Returns why the layout can't hold a weight of this format, shape or name, or None."""

    @abstractmethod
    def nearest(self, format: Format) -> Format:
        """Returns the closest supported format."""

    @abstractmethod
    def laid_out(self, weight: Weight) -> list[Tensor]:
        """Returns the entries of a weight."""

    @abstractmethod
    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        """Returns the contents of the folder's JSON files, by file name."""

    def kv_laid_out(self, model: Contents) -> list[Tensor]:
        """Returns the entries of `model.kv_scales`; raises ValueError if readers don't know them."""
        found = []
        for attention, scales in model.kv_scales.items():
            if not self.kv_names:
                raise ValueError(f"kv_scales: {self.name} has no scales of keys and values")
            for name, scale in zip(self.kv_names, scales, strict=True):
                if len(scale.shape) > 1 and not self.kv_per_head:
                    raise ValueError(
                        f"kv_scales: {self.name} has one scale for all heads, got {scale.elements} for {attention}: take "
                        "scales(per='tensor')"
                    )
                found.append(replace(scale, name=f"{attention}.{name}"))
        return found

    def trouble(self, weight: Weight) -> str | None:
        """Returns why the layout can't hold the values of these scales, or None; reads the scales."""
        return nan_scales(weight, self.name)


_OF_ADAPTERS = {"base_layer", "modules_to_save", "original_module", "prompt_encoder"}
"""Components of names that PEFT gives to adapters and to the layers that they wrap."""


def not_released(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns a name that no released model has, and the reason; None if all names are usual.

    These are names of adapters and wrapped layers, from PEFT or from libraries that use `lora_..` (litgpt, torchtune). A reader
    that doesn't find a layer under its usual name would keep random weights.
    """
    for name in names:
        parts = name.split(".")
        if not _OF_ADAPTERS.isdisjoint(parts) or any(part.startswith("lora_") for part in parts):
            return name, (
                "is the name of an adapter or of what stands under one, which no release has: call merge_and_unload() first, "
                "or unload() and send the adapter by itself"
            )
        if name.startswith("base_model.model."):
            return name, (
                "is a PeftModel's name, which no release has: take merge_and_unload(), or get_base_model() where nothing was "
                "put into the layers"
            )
    return None


_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def joined_by_servers(weights: Mapping[str, Weight]) -> str | None:
    """Returns what becomes of layers that vLLM joins to one matrix and whose scales of the whole tensor differ, or None.

    Scales of weights that are made when they are read count as different.
    """
    for name, weight in weights.items():
        if not is_weight(name) or not (weight.format.scale.two_level or weight.format.per_tensor):
            continue
        parent, _, own = layer_of(name).rpartition(".")
        for layers in (each for each in _JOINED if own == each[0]):
            places = (name.removesuffix(f"{own}.weight") + f"{layer}.weight" for layer in layers)
            joined = [weights[place] for place in places if place in weights]
            made = any(one.made for one in joined)
            if len(joined) > 1 and (made or len({_scale_of(one) for one in joined}) > 1):
                return (
                    f"{', '.join(layers)} of {parent or 'the model'} have scales of the whole tensor ({weight.format}) that "
                    "differ, and vLLM joins them to one matrix with one scale: it decodes all NVFP4 codes by it, and quantizes "
                    "FP8 again, so it multiplies other values than these. Formats by block or by row, FP8 and MX, have no such "
                    "scale"
                )
    return None


def _scale_of(weight: Weight) -> float:
    whole = weight.scales if weight.tensor_scale is None else weight.tensor_scale
    return float(whole.read().reshape(-1)[0])


def write_layout(known: Layout, model: Contents, folder: Path, file_bytes: int | None, done: Progress) -> None:
    """Writes model.safetensors and the layout's JSON files to `folder`, keeping other keys of the model's config.json.

    `file_bytes` is that of `blockfp.save`; `done` is called with each tensor. Raises BadFile, before writing, if the layout
    can't hold a weight's format, shape, name or scales, if a tensor can't be stored, or if one belongs to an adapter.
    """
    if found := not_released((*model.weights, *model.others)):
        raise BadFile(model.path, found[1], found[0])
    tensors = dict(model.others)
    for name, weight in model.weights.items():
        if problem := known.problem(weight):
            way = "convert it to a layout that has one, or to values"
            raise BadFile(model.path, f"{known.name} {problem}: {way}", name)
        if not weight.made and (problem := known.trouble(weight)):
            raise BadFile(model.path, problem, name)
        tensors |= {tensor.name: tensor for tensor in known.laid_out(weight)}
    tensors |= {tensor.name: tensor for tensor in known.kv_laid_out(model)}
    path = folder / "model.safetensors"
    saving.entries_of(path, tensors)
    configs = {name: {**_beside(model.path, name), **content} for name, content in known.configs(model).items()}
    make_folder(folder)
    write(path, tensors, file_bytes, done, {"format": "pt"}, own=False)
    for name, content in configs.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")


def _beside(path: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file next to a model's file; returns {} if there is none."""
    if path.suffix not in (".safetensors", ".json"):
        return {}
    try:
        found = untrusted.read_json(path.with_name(name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadFile(path.with_name(name), error) from error
    if not isinstance(found, dict):
        raise BadFile(path.with_name(name), "is not an object of JSON")
    return found


def is_weight(name: str) -> bool:
    """Returns whether a name belongs to a layer's weight."""
    return name.rpartition(".")[2] == "weight"


def layer_of(name: str) -> str:
    """Returns the layer's name, given its weight's."""
    return name.rpartition(".")[0]


def unquantized_layers(model: Contents) -> list[str]:
    """Returns the names of layers whose weights are unquantized matrices."""
    return sorted(layer_of(name) for name, tensor in model.others.items() if is_weight(name) and len(tensor.shape) == 2)


def nearest(format: Format, formats: Iterable[Format]) -> Format:
    """Returns the format with the most similar element, then block shape, scale dtype and block size."""
    size = lambda f: 0 if f.block is None else f.block[0] * f.block[1]  # noqa: E731

    def distance(other: Format) -> tuple:
        element = abs(other.element.bits - format.element.bits), other.element is not format.element
        return *element, other.block != format.block, other.scale.dtype != format.scale.dtype, abs(size(other) - size(format))

    return min(formats, key=distance)


def codes_as(name: str, weight: Weight) -> Tensor:
    """Returns the codes as a tensor: packed codes as bytes, others as FP8."""
    dtype = np.dtype(np.uint8) if weight.format.element.packed else FP8
    return Tensor(name, dtype, weight.codes.shape, lambda: _viewed(weight.codes.read(), dtype))


def _viewed(x: Array, dtype: np.dtype) -> Array:
    """Views the bytes of an array of any library as another dtype."""
    return x.view(dtype if isinstance(x, np.ndarray) else getattr(array_namespace(x), dtype.name))


def scales_of_rows(name: str, weight: Weight, dtype: np.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns scales of one-row blocks; scales of square blocks are repeated for each row."""
    block_rows = (weight.format.block or (1, 1))[0]

    def repeated() -> Array:
        return _viewed(layout.repeat_scales(weight.scales.read(), block_rows, weight.shape[-2]), dtype).reshape(shape)

    return Tensor(name, dtype, shape, repeated)


def nan_scales(weight: Weight, reader: str) -> str | None:
    """Returns why a reader would misread NaN scales stored as bytes, or None if there are none."""
    nan = weight.format.scale.nan_code
    if nan is not None and (weight.scales.read() == nan).any():
        return f"has NaN scales, which {reader} would read as numbers"
    return None
