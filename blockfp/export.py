"""From a training checkpoint to a file of the model alone: quantized as it was trained, or in high precision.

A checkpoint (`blockfp.torch.save_checkpoint`, or torch's DCP over a model's state dict) holds for a quantized weight NAME its
codes, scales, and NAME_format_FORMAT, a tensor of no bytes whose shape is (0, *shape of the weight) and whose dtype is the
nominal one; the optimizer's fp32 weight, if there is one, is `optimizer.state.NAME.master`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from . import saving, store
from .array import DTYPES, QuantizedArray
from .formats import Format
from .modelfile import BadFile, Model, Tensor
from .parts import FORMAT

Progress = Callable[[Tensor], None]
"""Called with each tensor when it is done."""

_TRAINING = ("input_amax_history", "input_scale", "gradient_amax_history", "gradient_scale", "rng_key")
"""Buffers of blockfp's layers that only training needs; with an rng_key goes a `step`."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a checkpoint, as a `QuantizedArray` that is not read yet.

    Attributes:
        name: of the parameter.
        format, shape, dtype, codes, scales, tensor_scale: those of the array.
        master: the optimizer's fp32 weight, where there is one.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    master: Tensor | None

    origin = (0, 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, scales and, for NVFP4, the tensor scale."""
        return (self.codes, self.scales) if self.tensor_scale is None else (self.codes, self.scales, self.tensor_scale)

    def values(self, dtype: np.dtype) -> np.ndarray:
        """The master rounded to `dtype`, or where there is none the values of the codes."""
        if self.master is not None:
            return _rounded(self.master, dtype)
        codes, scales, *rest = (part.read() for part in self.parts)
        q = QuantizedArray(codes, scales, rest[0] if rest else None, self.format, self.shape[-1], self.dtype)
        return q.dequantize(dtype)


@dataclass(frozen=True)
class Contents:
    """The model in a checkpoint, by name without the prefix.

    Attributes:
        path: of the checkpoint.
        weights: the quantized weights.
        others: everything else that inference needs.
        masters: the optimizer's fp32 weights of those among the others that have one.
    """

    path: Path
    weights: dict[str, Weight]
    others: dict[str, Tensor]
    masters: dict[str, Tensor]


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
            weights[weight] = _weight(checkpoint, own, weight, format, marker, there.get(_master(weight)))
            taken |= {name, *(part.name.removeprefix(prefix) for part in weights[weight].parts)}
    others = {name: tensor for name, tensor in own.items() if name not in taken and not _only_training(name, own)}
    masters = {name: there[_master(name)] for name in others if _master(name) in there}
    return Contents(checkpoint.path, weights, others, masters)


def _master(name: str) -> str:
    return f"optimizer.state.{name}.master"


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
    codes, scales, *rest = parts
    return Weight(name, parsed, shape, marker.dtype, codes, scales, rest[0] if rest else None, master)


def _only_training(name: str, own: dict[str, Tensor]) -> bool:
    layer, dot, last = name.rpartition(".")
    return last in _TRAINING or (last == "step" and f"{layer}{dot}rng_key" in own)


def export_quantized(model: Contents, path: Path, file_bytes: int | None, done: Progress) -> None:
    """Writes codes and scales as they are, in blockfp's own layout, which `blockfp.load` reads in every framework.

    Args:
        model: what to write.
        path: the .safetensors file.
        file_bytes: as for `blockfp.save`.
        done: called with each tensor.

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    write(path, {**model.others, **model.weights}, file_bytes, done)


def export_values(model: Contents, path: Path, dtype: str | None, file_bytes: int | None, done: Progress) -> None:
    """Writes every weight in high precision: from the optimizer's masters, or from the codes where it has none.

    Args:
        dtype: "float32", "float16" or "bfloat16", of weights that are quantized and of parameters that have a master; None for
            each one's own.
        model, path, file_bytes, done: as for `export_quantized`.

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    values = {}
    for name, master in model.masters.items():
        chosen = model.others[name].dtype if dtype is None else DTYPES[dtype]
        values[name] = Tensor(name, chosen, master.shape, partial(_rounded, master, chosen))
    for name, weight in model.weights.items():
        chosen = weight.dtype if dtype is None else DTYPES[dtype]
        values[name] = Tensor(name, chosen, weight.shape, partial(weight.values, chosen))
    write(path, {**model.others, **values}, file_bytes, done)


def _rounded(master: Tensor, dtype: np.dtype) -> np.ndarray:
    return master.read().astype(dtype)


def write(
    path: Path,
    tensors: Mapping[str, Tensor | Weight],
    file_bytes: int | None,
    done: Progress,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors to one .safetensors file or several, one tensor in memory at a time."""

    def read(tensor: Tensor) -> np.ndarray:
        array = np.ascontiguousarray(tensor.read())
        done(tensor)
        return array.reshape(tensor.shape)

    saving.write(path, tensors, read, file_bytes, metadata or {})
