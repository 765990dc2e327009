"""Export of a training checkpoint's model to a file: quantized as it was trained, or in high precision.

A checkpoint (`blockfp.torch.save_checkpoint`, or torch's DCP over a model's state dict) holds for a quantized weight NAME its
codes, scales, and, under NAME and NAME_format_FORMAT, tensors of no bytes whose shape is (0, *shape of the weight) and whose
dtype is the nominal one; the optimizer's fp32 weight, if there is one, is `PART.state.NAME.master`, PART being "optimizer" or
what else the optimizer was called. Of a weight with several names it is under the first, which `extra.tied.OTHER_NAME` says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from ..definition.views import DTYPES
from ..errors import BadFile
from ..formats import Format
from . import saving
from .contents import Contents, Progress, Weight, weight_in
from .modelfile import Model, Tensor
from .names import EXTRA, FORMAT, GROUPS, LAYER_BUFFERS, MODEL, OPTIMIZER, OWN, STATE, TIED, master_of

_STATE_ENTRY = re.compile(rf"(.+?)\.{STATE}\.(.+)\.[^.]+")
"""The name that DCP gives to an optimizer's state."""


def contents(checkpoint: Model, prefix: str | None = None) -> Contents:
    """The model in a checkpoint.

    Args:
        checkpoint: the open checkpoint.
        prefix: what the model's names begin with there; other names are not the model's. None is "model.", and then nothing
            else may be there but optimizers and what `save_checkpoint` adds.

    Raises:
        BadFile: no name begins so, some would be left out unasked, or a quantized weight lacks a part, or has one (or a master)
            of another shape.
    """
    there = {tensor.name: tensor for tensor in checkpoint.tensors}
    before = f"{MODEL}." if prefix is None else prefix
    own = {name.removeprefix(before): tensor for name, tensor in there.items() if name.startswith(before)}
    if not own:
        known = ", ".join(sorted({name.split(".")[0] for name in there})) or "nothing"
        raise BadFile(checkpoint.path, f"no name begins with {before!r}: the names there begin with {known}")
    optimizers = _optimizers(there, before)
    of_optimizers = tuple(f"{part}.{kind}." for part in optimizers for kind in (STATE, GROUPS))
    if prefix is None:
        expected = (before, f"{OPTIMIZER}.", f"{EXTRA}.{OWN}.", *of_optimizers)
        beyond = sorted(name for name in there if not name.startswith(expected))
        if beyond:
            named = f"{', '.join(beyond[:4])}{f' and {len(beyond) - 4} more' if len(beyond) > 4 else ''}"
            choice = f"--prefix '' takes all as they are, --prefix {before} leaves these out"
            raise BadFile(checkpoint.path, f"holds names that don't begin with {before!r}: {named}: {choice}")
    weights = {}
    taken: set[str] = set()
    for name, marker in own.items():
        weight, separator, format = name.rpartition(FORMAT)
        if separator and marker.shape[:1] == (0,):
            weights[weight] = _weight(checkpoint, own, weight, format, marker)
            taken |= {name, *weights[weight].entries}
    left_out = [n for n in own if n not in taken and ((before + n).startswith(of_optimizers) or _only_training(n, own))]
    others = {name: tensor for name, tensor in own.items() if name not in taken and name not in left_out}
    masters = _masters(checkpoint, there, before, optimizers, {**others, **weights})
    return Contents(checkpoint.path, weights, others, masters, left_out)


def _optimizers(there: Collection[str], prefix: str) -> dict[str, str]:
    """The optimizers in a checkpoint, each with the beginning that completes its parameters' names.

    An optimizer calls parameters as the whole model does. In the checkpoint some of the prefix's parts stand before that, or
    nothing.
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
    """The fp32 weight of each name of the model that has one, under that name or the first of the same weight."""
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
    try:
        parsed = Format.parse(format)
    except ValueError as error:
        raise BadFile(checkpoint.path, error, name) from error
    return weight_in(checkpoint.path, own, name, marker.shape[1:], marker.dtype, parsed)


def _only_training(name: str, own: dict[str, Tensor]) -> bool:
    """Tells whether an entry is a buffer that blockfp's layers train with: its partner is there too."""
    layer, dot, last = name.rpartition(".")
    return any(last in pair and all(f"{layer}{dot}{other}" in own for other in pair) for pair in LAYER_BUFFERS)


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
    """Writes tensors to one .safetensors file or several, one tensor in memory at a time; `own` as for `saving.write`."""

    def read(tensor: Tensor) -> np.ndarray:
        array = np.ascontiguousarray(tensor.read())
        done(tensor)
        return array.reshape(tensor.shape)

    saving.write(path, tensors, read, file_bytes, metadata or {}, own=own)
