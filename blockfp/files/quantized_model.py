"""Quantized models in .safetensors files.

A tensor NAME of the original becomes

    NAME               no bytes: the original dtype with shape [0, *shape], which readers of plain weights reject
    NAME_codes         the codes, U8 [..., rows, bytes]
    NAME_scale         the scales, U8 or F32, one per block
    NAME_tensor_scale  F32, shape (), only for formats with two levels (NVFP4)

Tensors that are not quantized are stored unchanged. The metadata entry "blockfp" describes the codes as JSON:

    {"version": 1, "tensors": {NAME: {"format": "mxfp8_e4m3", "shape": [384, 1536], "dtype": "float32"}}}

Files written by other tools from a PyTorch state dict have no such entry; they contain NAME_format_FORMAT, an empty tensor like
NAME.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..array import QuantizedArray, quantize
from ..definition.layout import DTYPES
from ..errors import BadFile
from ..formats import NAMES, Format
from . import released, untrusted
from .contents import Contents, Progress, Weight, quantized_entries, weight_in
from .modelfile import METADATA, TAGS, Entry, Model, Tensor, write_safetensors
from .names import FORMAT, SUFFIXES, no_values

KEY = "blockfp"
VERSION = 1


def quantize_model(model: Model, format: Format, path: Path, done: Progress) -> None:
    """Writes a .safetensors file with every tensor quantized that can be (see `Tensor.skipped`).

    Raises BadFile if a tensor can't be read or stored; the output is then incomplete.
    """
    if contents_of(model).weights:
        raise BadFile(model.path, "is quantized already: dequantize it first, or convert it to another layout")
    entries: list[Entry] = []
    described: dict[str, dict[str, object]] = {}
    for tensor in model.tensors:
        if tensor.skipped:
            _check_storable(model, tensor)
            entries.append(Entry(tensor.name, tensor.dtype, tensor.shape))
            continue
        entries += quantized_entries(tensor.name, tensor.shape, tensor.dtype, format)
        described[tensor.name] = {"format": format.name, "shape": list(tensor.shape), "dtype": tensor.dtype.name}
    check_names(model.path, entries)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for tensor in model.tensors:
            if tensor.skipped:
                yield tensor.name, tensor.read()
            else:
                q = quantize(tensor.read(), format)
                entries = quantized_entries(tensor.name, tensor.shape, tensor.dtype, format)
                for entry, part in zip(entries, _parts(q), strict=True):
                    yield entry.name, part
            done(tensor)

    metadata = {**model.metadata, KEY: json.dumps({"version": VERSION, "tensors": described})}
    write_safetensors(path, entries, arrays(), metadata)


def dequantize_model(model: Model, path: Path, dtype: str | None, done: Progress) -> None:
    """Writes a quantized model's dequantized values, in `dtype` or each tensor's original dtype.

    Raises BadFile if the file isn't quantized or a tensor's codes and scales don't match; the output is then incomplete.
    """
    found = contents_of(model)
    if not found.weights:
        raise BadFile(model.path, "has no quantized tensors in blockfp's or another known layout")
    tensors = {tensor.name: tensor for tensor in model.tensors}
    entries = [Entry(t.name, t.dtype, t.shape) for t in found.others.values()]
    chosen = DTYPES[dtype] if dtype else None
    entries += [Entry(name, chosen or weight.dtype, weight.shape) for name, weight in found.weights.items()]

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, weight in found.weights.items():
            yield name, weight.values(chosen)
            for entry in weight.entries:
                done(tensors[entry])
        for name, tensor in found.others.items():
            yield name, tensor.read()
            done(tensor)

    metadata = {key: value for key, value in model.metadata.items() if key != KEY}
    write_safetensors(path, entries, arrays(), metadata)


def read_model(model: Model) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields (name, array) for each tensor of a file, quantized or not; raises BadFile for unreadable or inconsistent
    tensors."""
    found = contents_of(model)
    for name, weight in found.weights.items():
        yield name, weight.read()
    for name, tensor in found.others.items():
        yield name, tensor.read()


def together(path: Path, models: Sequence[Model]) -> Model:
    """Combines several open files into one model named `path`; raises BadFile for duplicate names or an invalid description."""
    tensors = tuple(tensor for model in models for tensor in model.tensors)
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise BadFile(path, "is in more than one of its files", twice[0])
    metadata = {key: text for model in models for key, text in model.metadata.items() if key != KEY}
    quantized = [model for model in models if KEY in model.metadata]
    if quantized:
        described = {name: what for model in quantized for name, what in _description(model).items()}
        metadata[KEY] = json.dumps({"version": VERSION, "tensors": described})
    return Model(path, tensors, metadata, tuple(file for model in models for file in model.files))


def contents_of(model: Model) -> Contents:
    """Returns the quantized tensors of a file, in any known layout, and the others.

    Raises BadFile if codes and scales don't match, or have a layout without a blockfp format.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    if KEY in model.metadata:
        described = _description(model).items()
        weights = {name: _described_weight(model, tensors, name, what) for name, what in described}
    else:
        weights = _of_state_dict(model, tensors) or released.weights(model.path, tensors)
    taken = {name for weight in weights.values() for name in weight.entries}
    return Contents(model.path, weights, {name: tensor for name, tensor in tensors.items() if name not in taken})


def _parts(q: QuantizedArray) -> list[np.ndarray]:
    parts = [np.empty(no_values(q.shape), q.dtype), q.codes, q.scales]
    return parts if q.tensor_scale is None else [*parts, np.asarray(q.tensor_scale)]


def _check_storable(model: Model, tensor: Tensor) -> None:
    if tensor.dtype not in TAGS:
        raise BadFile(model.path, f"dtype {tensor.dtype} can't be stored in a .safetensors file", tensor.name)


def check_names(path: Path, entries: list[Entry]) -> None:
    """Raises BadFile for duplicate names and names that a file can't hold."""
    names: set[str] = set()
    for entry in entries:
        if not isinstance(entry.name, str) or entry.name == METADATA:
            raise BadFile(path, f"a name must be a string other than {METADATA!r}", entry.name)
        if entry.name in names:
            raise BadFile(path, "its name is needed for the codes or scales of another tensor", entry.name)
        names.add(entry.name)


def _description(model: Model) -> dict[str, dict]:
    try:
        description = untrusted.parse_json(model.metadata[KEY].encode(), "it")
        version, tensors = description["version"], dict(description["tensors"].items())
    except Exception as error:
        raise BadFile(model.path, f"its metadata 'blockfp' is not what blockfp writes: {error!r}") from error
    if version != VERSION:
        raise BadFile(model.path, f"is of version {version}; this blockfp reads version {VERSION}")
    return tensors


def _of_state_dict(model: Model, tensors: dict[str, Tensor]) -> dict[str, Weight]:
    """Finds the weights of a PyTorch state dict that another tool saved: an entry's name contains the format."""
    weights = {}
    for entry, tensor in tensors.items():
        name, _, format = entry.rpartition(FORMAT)
        if format in NAMES and name in tensors and tensor.shape[:1] == (0,) and len(tensor.shape) > 2:
            if name in weights:
                raise BadFile(model.path, f"names two formats of its codes, {weights[name].format} and {format}", name)
            weight = weight_in(model.path, tensors, name, tensor.shape[1:], tensor.dtype, Format.parse(format))
            weights[name] = replace(weight, entries=(*weight.entries, entry))
    for name, tensor in tensors.items():
        if tensor.shape[:1] == (0,) and name not in weights and name + SUFFIXES["codes"] in tensors:
            missing = f"has codes but no {name}{FORMAT}.., which names their format"
            raise BadFile(model.path, f"{missing}: a rank's shard, or one of several files that are read together?", name)
    return weights


def _described_weight(model: Model, tensors: dict[str, Tensor], name: str, what: dict) -> Weight:
    """Returns the weight that an entry of the description declares."""
    try:
        format = Format.parse(what["format"])
        shape = tuple(what["shape"])
        dtype = what["dtype"]
        fits = dtype in DTYPES and len(shape) >= 2 and all(map(untrusted.is_size, shape))
    except Exception as error:
        problem = error if isinstance(error, ValueError) else repr(error)
        raise BadFile(model.path, f"its description in the metadata is wrong: {problem}", name) from error
    if not fits:
        raise BadFile(model.path, f"can't be {dtype} of shape {shape}", name)
    return weight_in(model.path, tensors, name, shape, DTYPES[dtype], format)
