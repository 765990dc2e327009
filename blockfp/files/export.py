"""Exports the model of a training checkpoint to a file, quantized or in high precision.

A checkpoint (from `blockfp.torch.save_checkpoint`, or torch's DCP of a state dict) stores a quantized weight NAME as codes and
scales, plus two tensors without bytes under NAME and NAME_format_FORMAT, with shape (0, *shape of the weight) and the nominal
dtype. The fp32 master, if any, is `PART.state.NAME.master`, where PART is the optimizer's name, usually "optimizer". A weight
with several names is stored under the first; `extra.tied.OTHER_NAME` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from ..definition.layout import DTYPES
from ..errors import BadFile
from ..formats import Format
from . import saving
from .contents import Contents, Progress, Weight, weight_in
from .modelfile import Model, Tensor
from .names import CAST, EXTRA, FORMAT, GROUPS, INPUT, LAYER_BUFFERS, MODEL, OPTIMIZER, OWN, STATE, TIED, master_of

_STATE_ENTRY = re.compile(rf"(.+?)\.{STATE}\.(.+)\.[^.]+")
"""DCP's names of entries of an optimizer's state."""


def contents(checkpoint: Model, prefix: str | None = None) -> Contents:
    """Returns the model in an open checkpoint.

    `prefix` is the prefix of the model's names; other names are ignored. None means "model.", and then the checkpoint may only
    contain the model, optimizers and the entries of `save_checkpoint`. Raises BadFile if no name has the prefix, if names would
    be left out unasked, or if a quantized weight's parts or master are missing or misshapen.
    """
    there = {tensor.name: tensor for tensor in checkpoint.tensors}
    before = f"{MODEL}." if prefix is None else prefix
    own = {name.removeprefix(before): tensor for name, tensor in there.items() if name.startswith(before)}
    if not own:
        known = ", ".join(sorted({name.split(".")[0] for name in there})) or "nothing"
        raise BadFile(checkpoint.path, f"no name begins with {before!r}: names begin with {known}")
    optimizers = _optimizers(there, before)
    of_optimizers = tuple(f"{part}.{kind}." for part in optimizers for kind in (STATE, GROUPS))
    if prefix is None:
        expected = (before, f"{OPTIMIZER}.", f"{EXTRA}.{OWN}.", *of_optimizers)
        beyond = sorted(name for name in there if not name.startswith(expected))
        if beyond:
            named = f"{', '.join(beyond[:4])}{f' and {len(beyond) - 4} more' if len(beyond) > 4 else ''}"
            choice = f"--prefix '' exports all of them, --prefix {before} omits these"
            raise BadFile(checkpoint.path, f"holds names that don't begin with {before!r}: {named}: {choice}")
    weights = {}
    taken: set[str] = set()
    for name, marker in own.items():
        weight, separator, format = name.rpartition(FORMAT)
        if separator and marker.shape[:1] == (0,):
            if weight in weights:
                raise BadFile(checkpoint.path, f"names two formats of its codes, {weights[weight].format} and {format}", weight)
            weights[weight] = _weight(checkpoint, own, weight, format, marker)
            taken |= {name, *weights[weight].entries}
    left_out = [n for n in own if n not in taken and ((before + n).startswith(of_optimizers) or _only_training(n, own))]
    others = {name: tensor for name, tensor in own.items() if name not in taken and name not in left_out}
    masters = _masters(checkpoint, there, before, optimizers, {**others, **weights})
    casts = _noted(checkpoint, before, CAST, others)
    inputs = _noted(checkpoint, before, INPUT, {**weights, **casts})
    return Contents(checkpoint.path, weights, others, masters, left_out, casts, inputs)


def _noted(checkpoint: Model, prefix: str, kind: str, names: Collection[str]) -> dict[str, Format]:
    """Returns the formats that the checkpoint notes for some of these weights: `kind` is `CAST` or `INPUT`."""
    found = {}
    for name in names:
        first = f"{prefix}{name}".removeprefix(f"{MODEL}.")
        first = checkpoint.metadata.get(f"{EXTRA}.{TIED}.{first}", first)
        if (format := checkpoint.metadata.get(f"{EXTRA}.{kind}.{first}")) is not None:
            found[name] = _format(checkpoint, name, format)
    return found


def _optimizers(there: Collection[str], prefix: str) -> dict[str, str]:
    """Returns the optimizers in a checkpoint, each with the prefix that completes its parameters' names.

    An optimizer names parameters as the whole model does; the checkpoint may prepend components of `prefix`, or nothing.
    """
    parameters: dict[str, set[str]] = {}
    for name in there:
        if state := _STATE_ENTRY.fullmatch(name):
            parameters.setdefault(state[1], set()).add(state[2])
    roots = ["", *(prefix[: dot.end()] for dot in re.finditer(r"\.", prefix))]
    fitting = {
        part: [root for root in roots if all(root + name in there for name in names)] for part, names in parameters.items()
    }
    return {part: found[0] for part, found in fitting.items() if found}


def _masters(
    checkpoint: Model,
    there: dict[str, Tensor],
    prefix: str,
    optimizers: Mapping[str, str],
    model: Mapping[str, Tensor | Weight],
) -> dict[str, Tensor]:
    """Returns the fp32 master of each weight that has one, stored under its name or the first name of a tied weight."""
    masters = {}
    for (name, what), (part, root) in product(model.items(), optimizers.items()):
        own = f"{prefix}{name}".removeprefix(root)
        first = checkpoint.metadata.get(f"{EXTRA}.{TIED}.{own}", own)
        master = there.get(f"{part}.{master_of(first)}")
        if master is None:
            continue
        if master.shape != what.shape:
            raise BadFile(checkpoint.path, f"has shape {master.shape}, {prefix}{name} has {what.shape}", master.name)
        masters[name] = master
    return masters


def _weight(checkpoint: Model, own: dict[str, Tensor], name: str, format: str, marker: Tensor) -> Weight:
    return weight_in(checkpoint.path, own, name, marker.shape[1:], marker.dtype, _format(checkpoint, name, format))


def _format(checkpoint: Model, name: str, format: str) -> Format:
    try:
        return Format.parse(format)
    except ValueError as error:
        raise BadFile(checkpoint.path, error, name) from error


def _only_training(name: str, own: dict[str, Tensor]) -> bool:
    """Returns whether an entry is a training buffer of blockfp's layers: its partner exists too."""
    layer, dot, last = name.rpartition(".")
    return any(last in pair and all(f"{layer}{dot}{other}" in own for other in pair) for pair in LAYER_BUFFERS)


def export_quantized(model: Contents, path: Path, file_bytes: int | None, done: Progress) -> None:
    """Writes the stored codes and scales in blockfp's layout, which `blockfp.load` reads in every framework.

    Writes to `path` (.safetensors) and calls `done` with each tensor; `file_bytes` is that of `blockfp.save`. Raises BadFile,
    before writing, if a tensor can't be read or stored.
    """
    write(path, {**model.others, **model.weights}, file_bytes, done)


def export_values(model: Contents, path: Path, dtype: str | None, file_bytes: int | None, done: Progress) -> list[str]:
    """Writes every weight in high precision, from its master or else from its codes; returns names of weights without a master.

    `dtype` ("float32", "float16", "bfloat16") applies to quantized weights and to parameters with a master; None keeps each
    weight's own. Otherwise like `export_quantized`.
    """
    values = {}
    for name, what in {**model.others, **model.weights}.items():
        chosen = what.dtype if dtype is None else DTYPES[dtype]
        if name in model.masters:
            values[name] = Tensor(name, chosen, what.shape, partial(_rounded, model.masters[name], chosen))
        elif isinstance(what, Weight):
            values[name] = Tensor(name, chosen, what.shape, partial(what.values, chosen))
    write(path, {**model.others, **values}, file_bytes, done)
    return [name for name in model.weights if name not in model.masters]


def _rounded(master: Tensor, dtype: np.dtype) -> np.ndarray:
    return master.read().astype(dtype)


def write(
    path: Path,
    tensors: Mapping[str, Tensor | Weight],
    file_bytes: int | None,
    done: Progress,
    metadata: Mapping[str, str] | None = None,
    *,
    own: bool = True,
) -> None:
    """Writes tensors to one or more .safetensors files, holding one tensor in memory at a time; `own` is that of
    `saving.write`."""

    def read(tensor: Tensor) -> np.ndarray:
        array = np.ascontiguousarray(tensor.read())
        done(tensor)
        return array.reshape(tensor.shape)

    saving.write(path, tensors, read, file_bytes, metadata or {}, own=own)
