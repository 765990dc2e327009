"""From a training checkpoint to a file of the model alone: quantized as it was trained, or in high precision.

A checkpoint (`blockfp.torch.save_checkpoint`, or torch's DCP over a model's state dict) holds for a quantized weight NAME its
codes, scales, and NAME_format_FORMAT, a tensor of no bytes whose shape is (0, *shape of the weight) and whose dtype is the
nominal one; the optimizer's fp32 weight, if there is one, is `optimizer.state.NAME.master`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import store
from .array import DTYPES, QuantizedArray
from .atomic import replacing
from .formats import Format
from .modelfile import TAGS, BadFile, Entry, Model, Tensor, write_safetensors
from .parts import FORMAT, SUFFIXES

Progress = Callable[[Tensor], None]
"""Called with each tensor when it is done."""

_TRAINING = ("input_amax_history", "input_scale", "gradient_amax_history", "gradient_scale", "rng_key")
"""Buffers of blockfp's layers that only training needs; with an rng_key goes a `step`."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a checkpoint.

    Attributes:
        name: of the parameter.
        format: of its codes.
        shape: of the weight.
        dtype: the nominal dtype.
        parts: codes, scales and, for NVFP4, the tensor scale, not read yet.
        master: the optimizer's fp32 weight, where there is one.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Tensor, ...]
    master: Tensor | None

    def read(self) -> QuantizedArray:
        """The quantized array."""
        codes, scales, *rest = (part.read() for part in self.parts)
        return QuantizedArray(codes, scales, rest[0] if rest else None, self.format, self.shape[-1], self.dtype)

    def values(self, dtype: np.dtype) -> np.ndarray:
        """The master rounded to `dtype`, or where there is none the values of the codes."""
        return self.read().dequantize(dtype) if self.master is None else self.master.read().astype(dtype)


@dataclass(frozen=True)
class Contents:
    """The model in a checkpoint: quantized weights, and everything else that inference needs, by name without the prefix."""

    path: Path
    weights: dict[str, Weight]
    others: dict[str, Tensor]

    @property
    def size(self) -> int:
        """How many tensors there are."""
        return len(self.weights) + len(self.others)


def contents(checkpoint: Model, prefix: str) -> Contents:
    """What a checkpoint holds of the model.

    Args:
        checkpoint: the open checkpoint.
        prefix: what the model's names begin with there, such as "model."; other names are not the model's.

    Raises:
        BadFile: no name begins so, or a quantized weight lacks a part, or has one of another shape.
    """
    there = {tensor.name: tensor for tensor in checkpoint.tensors}
    own = {name.removeprefix(prefix): tensor for name, tensor in there.items() if name.startswith(prefix)}
    if not own:
        known = ", ".join(sorted({name.split(".")[0] for name in there})) or "nothing"
        raise BadFile(checkpoint.path, f"no name begins with {prefix!r}: the names there begin with {known}")
    weights = {}
    taken: set[str] = set()
    for name, marker in own.items():
        weight, separator, format = name.rpartition(FORMAT)
        if separator and marker.shape[:1] == (0,):
            weights[weight] = _weight(checkpoint, own, weight, format, marker, there.get(f"optimizer.state.{weight}.master"))
            taken |= {name, *(part.name.removeprefix(prefix) for part in weights[weight].parts)}
    others = {name: tensor for name, tensor in own.items() if name not in taken and not _only_training(name, own)}
    return Contents(checkpoint.path, weights, others)


def _weight(checkpoint: Model, own: dict[str, Tensor], name: str, format: str, marker: Tensor, master: Tensor | None) -> Weight:
    try:
        parsed = Format.parse(format)
    except ValueError as error:
        raise BadFile(checkpoint.path, error, name) from error
    shape = marker.shape[1:]
    parts = []
    for entry in store.quantized_entries(name, shape, parsed):
        part = own.get(entry.name)
        if part is None or (part.dtype, part.shape) != (entry.dtype, entry.shape):
            found = "missing" if part is None else f"{part.dtype} of shape {part.shape}"
            needs = f"{format} of shape {shape} needs {entry.dtype} of shape {entry.shape}"
            raise BadFile(checkpoint.path, f"is {found}, {needs}", entry.name)
        parts.append(part)
    return Weight(name, parsed, shape, marker.dtype, tuple(parts), master)


def _only_training(name: str, own: dict[str, Tensor]) -> bool:
    layer, dot, last = name.rpartition(".")
    return last in _TRAINING or (last == "step" and f"{layer}{dot}rng_key" in own)


def export_quantized(model: Contents, path: Path, done: Progress) -> None:
    """Writes codes and scales as they are, in blockfp's own layout (`blockfp.store`).

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    entries = _other_entries(model)
    described = {}
    for name, weight in model.weights.items():
        entries += store.quantized_entries(name, weight.shape, weight.format)
        described[name] = {"format": weight.format.name, "shape": list(weight.shape), "dtype": weight.dtype.name}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        yield from other_arrays(model, done)
        for name, weight in model.weights.items():
            for part, suffix in zip(weight.parts, SUFFIXES.values(), strict=False):
                yield name + suffix, part.read()
            done(weight.parts[0])

    metadata = {store.KEY: json.dumps({"version": store.VERSION, "tensors": described})} if described else {}
    write(path, entries, arrays(), metadata)


def export_values(model: Contents, path: Path, dtype: str | None, done: Progress) -> None:
    """Writes every weight in high precision: from the optimizer's masters, or from the codes where it has none.

    Args:
        model: what to write.
        path: the .safetensors file.
        dtype: "float32", "float16" or "bfloat16"; None for each weight's nominal one.
        done: called with each tensor.

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    dtypes = {name: weight.dtype if dtype is None else DTYPES[dtype] for name, weight in model.weights.items()}
    entries = _other_entries(model) + [Entry(name, dtypes[name], weight.shape) for name, weight in model.weights.items()]

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        yield from other_arrays(model, done)
        for name, weight in model.weights.items():
            yield name, weight.values(dtypes[name])
            done(weight.parts[0])

    write(path, entries, arrays(), {})


def _other_entries(model: Contents) -> list[Entry]:
    for name, tensor in model.others.items():
        if tensor.dtype not in TAGS:
            raise BadFile(model.path, f"dtype {tensor.dtype} can't be stored in a .safetensors file", name)
    return [Entry(name, tensor.dtype, tensor.shape) for name, tensor in model.others.items()]


def other_arrays(model: Contents, done: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """What is not quantized, as it is."""
    for name, tensor in model.others.items():
        yield name, tensor.read()
        done(tensor)


def write(path: Path, entries: Sequence[Entry], arrays: Iterator[tuple[str, np.ndarray]], metadata: dict[str, str]) -> None:
    """Writes a .safetensors file that is there whole or not at all."""
    with replacing(path) as temporary:
        write_safetensors(temporary, entries, arrays, metadata)
