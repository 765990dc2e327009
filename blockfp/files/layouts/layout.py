"""`Layout`, the way in which a library keeps quantized weights in files, and how a model is written in one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
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
    """Entries of weights in .safetensors files, and the JSON files that a folder has beside them.

    Codes and scales may be read as arrays of any library; a tensor scale is NumPy's.

    Attributes:
        name: the word for it in the command.
    """

    name: str

    @abstractmethod
    def problem(self, weight: Weight) -> str | None:
        """The reason why the layout can't hold a weight of this format, shape or name, or None."""

    @abstractmethod
    def nearest(self, format: Format) -> Format:
        """A format that the layout has, for weights in one that it has not."""

    @abstractmethod
    def laid_out(self, weight: Weight) -> list[Tensor]:
        """The entries of a weight."""

    @abstractmethod
    def configs(self, model: Contents) -> dict[str, dict[str, Any]]:
        """Returns the content of the folder's JSON files, by their names."""

    def trouble(self, weight: Weight) -> str | None:
        """The reason why the layout can't hold these very scales, or None; reads them."""
        return nan_scales(weight, self.name)


_OF_ADAPTERS = {"base_layer", "modules_to_save", "original_module", "prompt_encoder"}
"""Parts of names that PEFT gives to what stands under an adapter or beside it."""


def not_released(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns a name that no release has, and the reason; None if there is none.

    Such are those of adapters, and of the layers that stand under them: PEFT's, and others' that call theirs `lora_..` (litgpt,
    torchtune). Readers leave their own random weights where they find a layer under another name.
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


def write_layout(known: Layout, model: Contents, folder: Path, file_bytes: int | None, done: Progress) -> None:
    """Writes model.safetensors and the layout's JSON files; keys that a config.json beside the model has stay there.

    Args:
        known: the layout.
        model: what to write.
        folder: where to.
        file_bytes: as for `blockfp.save`.
        done: called with each tensor.

    Raises:
        BadFile: the layout can't hold a weight, for its format, its shape, its name or its scales, or a tensor can't be stored,
            or is an adapter's; nothing is written then.
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
    path = folder / "model.safetensors"
    saving.entries_of(path, tensors)
    configs = {name: {**_beside(model.path, name), **content} for name, content in known.configs(model).items()}
    make_folder(folder)
    write(path, tensors, file_bytes, done, {"format": "pt"}, own=False)
    for name, content in configs.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")


def _beside(path: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file beside a model's file; {} where there is none."""
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
    """Tells whether a name is that of a layer's weight."""
    return name.rpartition(".")[2] == "weight"


def layer_of(name: str) -> str:
    """The layer's name in that of its weight."""
    return name.rpartition(".")[0]


def unquantized_layers(model: Contents) -> list[str]:
    """Names of the layers whose weights are matrices in high precision."""
    return sorted(layer_of(name) for name, tensor in model.others.items() if is_weight(name) and len(tensor.shape) == 2)


def nearest(format: Format, formats: Iterable[Format]) -> Format:
    """The format of the same element, or else of the most bits, whose blocks are most alike."""
    size = lambda f: 0 if f.block is None else f.block[0] * f.block[1]  # noqa: E731

    def distance(other: Format) -> tuple:
        element = abs(other.element.bits - format.element.bits), other.element is not format.element
        return *element, other.block != format.block, other.scale.dtype != format.scale.dtype, abs(size(other) - size(format))

    return min(formats, key=distance)


def codes_as(name: str, weight: Weight) -> Tensor:
    """The codes under a name: packed ones as bytes, others in the FP8 dtype."""
    dtype = np.dtype(np.uint8) if weight.format.element.packed else FP8
    return Tensor(name, dtype, weight.codes.shape, lambda: _viewed(weight.codes.read(), dtype))


def _viewed(x: Array, dtype: np.dtype) -> Array:
    """The bytes of an array of any library as another dtype."""
    return x.view(dtype if isinstance(x, np.ndarray) else getattr(array_namespace(x), dtype.name))


def scales_of_rows(name: str, weight: Weight, dtype: np.dtype, shape: tuple[int, ...]) -> Tensor:
    """The scales of blocks of one row: those of square blocks are repeated for each."""
    block_rows = (weight.format.block or (1, 1))[0]

    def repeated() -> Array:
        return _viewed(layout.repeat_scales(weight.scales.read(), block_rows, weight.shape[-2]), dtype).reshape(shape)

    return Tensor(name, dtype, shape, repeated)


def nan_scales(weight: Weight, reader: str) -> str | None:
    """The reason why a reader that knows no NaN in scales of a byte would read other values, or None."""
    nan = weight.format.scale.nan_code
    if nan is not None and (weight.scales.read() == nan).any():
        return f"has NaN scales, which {reader} would read as numbers"
    return None
