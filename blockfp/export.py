"""From a training checkpoint to a file of the model alone: quantized as it was trained, or in high precision.

A checkpoint (`blockfp.torch.save_checkpoint`, or torch's DCP over a model's state dict) holds for a quantized weight NAME its
codes, scales, and NAME_format_FORMAT, a tensor of no bytes whose shape is (0, *shape of the weight) and whose dtype is the
nominal one; the optimizer's fp32 weight, if there is one, is `optimizer.state.NAME.master`, under one of a tied weight's names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
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

_TOGETHER = (("input_amax_history", "input_scale"), ("gradient_amax_history", "gradient_scale"), ("rng_key", "step"))
"""Buffers of blockfp's layers that only training needs, each with another that its layer has too."""

_MASTER = "optimizer.state.{}.master"


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a checkpoint, as a `QuantizedArray` that is not read yet.

    Attributes:
        name: of the parameter.
        format, shape, dtype, codes, scales, tensor_scale: those of the array.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None

    origin = (0, 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, scales and, for NVFP4, the tensor scale."""
        return (self.codes, self.scales) if self.tensor_scale is None else (self.codes, self.scales, self.tensor_scale)

    def values(self, dtype: np.dtype) -> np.ndarray:
        """The values of the codes."""
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
        masters: the optimizer's fp32 weights, of quantized weights and others.
        left_out: names of what only training needs.
    """

    path: Path
    weights: dict[str, Weight]
    others: dict[str, Tensor]
    masters: dict[str, Tensor]
    left_out: list[str]


def contents(checkpoint: Model, prefix: str) -> Contents:
    """What a checkpoint holds of the model.

    Args:
        checkpoint: the open checkpoint.
        prefix: what the model's names begin with there, such as "model."; other names are not the model's.

    Raises:
        BadFile: no name begins so, or a quantized weight lacks a part, or has one (or a master) of another shape.
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
            weights[weight] = _weight(checkpoint, own, weight, format, marker)
            taken |= {name, *(part.name.removeprefix(prefix) for part in weights[weight].parts)}
    left_out = [name for name in own if name not in taken and _only_training(name, own)]
    others = {name: tensor for name, tensor in own.items() if name not in taken and name not in left_out}
    masters = _masters(checkpoint, there, prefix, {**others, **weights})
    return Contents(checkpoint.path, weights, others, masters, left_out)


def _masters(
    checkpoint: Model, there: dict[str, Tensor], prefix: str, model: Mapping[str, Tensor | Weight]
) -> dict[str, Tensor]:
    """The fp32 weight of each name of the model that has one.

    The optimizer's names are those of the whole model, which begin with the prefix's first part in the checkpoint or with
    nothing: with what makes each of them a name that is there.
    """
    before, after = _MASTER.split("{}")
    known = [
        name.removeprefix(before).removesuffix(after) for name in there if name.startswith(before) and name.endswith(after)
    ]
    for root in ("", prefix[: prefix.find(".") + 1]):
        if all(root + name in there for name in known):
            break
    else:
        return {}
    masters = {}
    for name, what in model.items():
        master = there.get(_MASTER.format(f"{prefix}{name}".removeprefix(root)))
        if master is None:
            continue
        if master.shape != what.shape:
            raise BadFile(checkpoint.path, f"has shape {master.shape}, {prefix}{name} has {what.shape}", master.name)
        masters[name] = master
    return masters


def _weight(checkpoint: Model, own: dict[str, Tensor], name: str, format: str, marker: Tensor) -> Weight:
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
    return Weight(name, parsed, shape, marker.dtype, codes, scales, rest[0] if rest else None)


def _only_training(name: str, own: dict[str, Tensor]) -> bool:
    layer, dot, last = name.rpartition(".")
    return any(last in pair and all(f"{layer}{dot}{other}" in own for other in pair) for pair in _TOGETHER)


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


def export_values(model: Contents, path: Path, dtype: str | None, file_bytes: int | None, done: Progress) -> list[str]:
    """Writes every weight in high precision: from the optimizer's masters, or from the codes where it has none.

    Args:
        dtype: "float32", "float16" or "bfloat16", of weights that are quantized and of parameters that have a master; None for
            each one's own.
        model, path, file_bytes, done: as for `export_quantized`.

    Returns:
        The names of the weights that have the values of their codes.

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    masters = model.masters | _of_tied(model)
    values = {}
    for name, what in {**model.others, **model.weights}.items():
        chosen = what.dtype if dtype is None else DTYPES[dtype]
        if name in masters:
            values[name] = Tensor(name, chosen, what.shape, partial(_rounded, masters[name], chosen))
        elif isinstance(what, Weight):
            values[name] = Tensor(name, chosen, what.shape, partial(what.values, chosen))
    write(path, {**model.others, **values}, file_bytes, done)
    return [name for name in model.weights if name not in masters]


def _of_tied(model: Contents) -> dict[str, Tensor]:
    """The masters of weights that the optimizer has under another name: all their bits are the other's."""
    alike: dict[tuple, list[str]] = {}
    for name, what in {**model.others, **model.weights}.items():
        alike.setdefault((what.dtype, what.shape, getattr(what, "format", None)), []).append(name)
    found = {}
    for names in alike.values():
        without = [name for name in names if name not in model.masters]
        if not without or len(without) == len(names):
            continue
        known = {_digest(model, name): model.masters[name] for name in names if name in model.masters}
        found |= {name: known[bits] for name in without if (bits := _digest(model, name)) in known}
    return found


def _digest(model: Contents, name: str) -> bytes:
    parts: Sequence[Tensor] = model.weights[name].parts if name in model.weights else [model.others[name]]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read().tobytes())
    return digest.digest()


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
