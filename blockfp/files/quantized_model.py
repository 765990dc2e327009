"""Quantized models in .safetensors files.

A tensor NAME of the original becomes

    NAME               nothing: the original's dtype, but of shape [0, *shape], which no reader of plain weights takes
    NAME_codes         the codes, U8 [..., rows, bytes]
    NAME_scale         the scales, U8 or F32, one for each block
    NAME_tensor_scale  F32, shape (), for NVFP4 only

and what is not quantized stays as it is, under its name. The file's metadata says under "blockfp" what the codes are, as JSON:

    {"version": 1, "tensors": {NAME: {"format": "mxfp8_e4m3", "shape": [384, 1536], "dtype": "float32"}}}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ..array import QuantizedArray, quantize
from ..definition import layout
from ..definition.views import DTYPES
from ..errors import BadFile
from ..formats import Format
from . import untrusted
from .atomic import replacing
from .modelfile import METADATA, TAGS, Entry, Model, Tensor, write_safetensors
from .names import SUFFIXES, no_values

KEY = "blockfp"
VERSION = 1

Progress = Callable[[Tensor], None]
"""Called with each tensor when it is done."""


def quantize_model(model: Model, format: Format, path: Path, done: Progress) -> None:
    """Writes the model with every tensor quantized that can be (`Tensor.skipped`), to a .safetensors file at `path`.

    Raises:
        BadFile: a tensor can't be read or stored; nothing is written then.
    """
    if KEY in model.metadata:
        raise BadFile(model.path, "is quantized already: dequantize it first")
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
    with replacing(path) as temporary:
        write_safetensors(temporary, entries, arrays(), metadata)


def dequantize_model(model: Model, path: Path, dtype: str | None, done: Progress) -> None:
    """Writes a quantized model with the values of its codes, in `dtype` or each tensor's original one.

    Raises:
        BadFile: the file is not a quantized one, or a tensor's codes and scales don't fit each other; nothing is written then.
    """
    quantized, others = _parted(model, _description(model))
    tensors = {tensor.name: tensor for tensor in model.tensors}
    entries = [Entry(t.name, t.dtype, t.shape) for t in others.values()]
    entries += [Entry(name, DTYPES[dtype or stored.dtype], stored.shape) for name, stored in quantized.items()]

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, stored in quantized.items():
            yield name, stored.read().dequantize(dtype and DTYPES[dtype])
            done(tensors[name])
        for name, tensor in others.items():
            yield name, tensor.read()
            done(tensor)

    metadata = {key: value for key, value in model.metadata.items() if key != KEY}
    with replacing(path) as temporary:
        write_safetensors(temporary, entries, arrays(), metadata)


def read_model(model: Model) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields (name, array) for each tensor of a file, quantized or not.

    Raises:
        BadFile: a tensor can't be read, or its codes and scales don't fit each other.
    """
    quantized, others = _parted(model, _description(model) if KEY in model.metadata else {})
    for name, stored in quantized.items():
        yield name, stored.read()
    for name, tensor in others.items():
        yield name, tensor.read()


def together(path: Path, models: Sequence[Model]) -> Model:
    """Several files as one, which is called `path`.

    Raises:
        BadFile: two hold a tensor of one name, or the description of a quantized one is not what blockfp writes.
    """
    tensors = tuple(tensor for model in models for tensor in model.tensors)
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise BadFile(path, "is in more than one of its files", twice[0])
    metadata = {key: text for model in models for key, text in model.metadata.items() if key != KEY}
    quantized = [model for model in models if KEY in model.metadata]
    if quantized:
        described = {name: what for model in quantized for name, what in _description(model).items()}
        metadata[KEY] = json.dumps({"version": VERSION, "tensors": described})
    return Model(path, tensors, metadata)


def _parted(model: Model, described: dict[str, dict]) -> tuple[dict[str, _Stored], dict[str, Tensor]]:
    """The quantized tensors of a file, and the others."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    quantized = {name: _Stored(model, tensors, name, what) for name, what in described.items()}
    taken = {name for stored in quantized.values() for name in stored.keys}
    return quantized, {name: tensor for name, tensor in tensors.items() if name not in taken}


def quantized_entries(name: str, shape: tuple[int, ...], dtype: np.dtype, format: Format) -> list[Entry]:
    """The entries of a quantized tensor in a file: the empty one under its name, codes, scales, and maybe a tensor scale."""
    entries = [
        Entry(name, dtype, no_values(shape)),
        Entry(name + SUFFIXES["codes"], np.dtype(np.uint8), layout.codes_shape(shape, format)),
        Entry(name + SUFFIXES["scales"], np.dtype(format.scale.dtype), layout.scales_shape(shape, format)),
    ]
    if format.scale.two_level:
        entries.append(Entry(name + SUFFIXES["tensor_scale"], np.dtype(np.float32), ()))
    return entries


def _parts(q: QuantizedArray) -> list[np.ndarray]:
    parts = [np.empty(no_values(q.shape), q.dtype), q.codes, q.scales]
    return parts if q.tensor_scale is None else [*parts, np.asarray(q.tensor_scale)]


def _check_storable(model: Model, tensor: Tensor) -> None:
    if tensor.dtype not in TAGS:
        raise BadFile(model.path, f"dtype {tensor.dtype} can't be stored in a .safetensors file", tensor.name)


def check_names(path: Path, entries: list[Entry]) -> None:
    """Raises BadFile where two tensors would have one name, or one a name that a file can't hold."""
    names: set[str] = set()
    for entry in entries:
        if not isinstance(entry.name, str) or entry.name == METADATA:
            raise BadFile(path, f"a name must be a string other than {METADATA!r}", entry.name)
        if entry.name in names:
            raise BadFile(path, "its name is needed for the codes or scales of another tensor", entry.name)
        names.add(entry.name)


def _description(model: Model) -> dict[str, dict]:
    if KEY not in model.metadata:
        raise BadFile(model.path, "is not quantized by blockfp (its metadata has no 'blockfp')")
    try:
        description = untrusted.parse_json(model.metadata[KEY].encode(), "it")
        version, tensors = description["version"], dict(description["tensors"].items())
    except Exception as error:
        raise BadFile(model.path, f"its metadata 'blockfp' is not what blockfp writes: {error!r}") from error
    if version != VERSION:
        raise BadFile(model.path, f"is of version {version}; this blockfp reads version {VERSION}")
    return tensors


class _Stored:
    """A quantized tensor in a file, held against its description."""

    def __init__(self, model: Model, tensors: dict[str, Tensor], name: str, what: dict):
        try:
            self.format = Format.parse(what["format"])
            self.shape = tuple(what["shape"])
            self.dtype = what["dtype"]
            fits = self.dtype in DTYPES and len(self.shape) >= 2 and all(map(untrusted.is_size, self.shape))
        except Exception as error:
            problem = error if isinstance(error, ValueError) else repr(error)
            raise BadFile(model.path, f"its description in the metadata is wrong: {problem}", name) from error
        if not fits:
            raise BadFile(model.path, f"can't be {self.dtype} of shape {self.shape}", name)
        self.keys: list[str] = []
        self._tensors: list[Tensor] = []
        for entry in quantized_entries(name, self.shape, DTYPES[self.dtype], self.format):
            tensor = tensors.get(entry.name)
            found = "missing" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
                what_for = f"{self.format} of shape {self.shape}"
                problem = f"is {found}, {what_for} needs {entry.dtype} of shape {entry.shape}"
                raise BadFile(model.path, problem, entry.name)
            self.keys.append(entry.name)
            self._tensors.append(tensor)

    def read(self) -> QuantizedArray:
        codes, scales, *tensor_scale = (tensor.read() for tensor in self._tensors[1:])
        columns, dtype = self.shape[-1], DTYPES[self.dtype]
        return QuantizedArray(codes, scales, tensor_scale[0] if tensor_scale else None, self.format, columns, dtype)
