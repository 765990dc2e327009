"""Contents of a model file, not read yet: quantized weights and other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..array import QuantizedArray
from ..definition import layout
from ..errors import BadFile
from ..formats import Format
from .modelfile import Entry, Tensor
from .names import SUFFIXES, no_values

Progress = Callable[[Tensor], None]
"""Called with each finished tensor."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a file, read on demand as a `QuantizedArray`.

    Attributes:
        name: name of the parameter.
        format, shape, dtype, codes, scales, tensor_scale: as in `QuantizedArray`.
        entries: names of all file entries of this weight.
        made: whether codes and scales are computed when read, which is slow and can raise errors late.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    entries: tuple[str, ...] = ()
    made: bool = False

    origin = (0, 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, scales and, with two levels, the tensor scale."""
        return (self.codes, self.scales) if self.tensor_scale is None else (self.codes, self.scales, self.tensor_scale)

    def read(self) -> QuantizedArray:
        """Reads codes and scales."""
        codes, scales, *rest = (part.read() for part in self.parts)
        return QuantizedArray(codes, scales, rest[0] if rest else None, self.format, self.shape[-1], self.dtype)

    def values(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Reads and dequantizes the codes."""
        return self.read().dequantize(dtype)


@dataclass(frozen=True)
class Contents:
    """The tensors of a model by name.

    Attributes:
        path: path of the file or checkpoint.
        weights: the quantized weights.
        others: all other tensors that inference needs.
        masters: an optimizer's fp32 weights, for quantized and other weights.
        left_out: names of tensors that only training needs.
        casts: the formats in which a forward multiplies some of the other tensors.
        inputs: the formats in which a forward multiplies the inputs of some weights, by the weight's name; a weight whose
            input is in high precision, has delayed scaling or is unknown isn't in it.
        kv_scales: scales of the cached keys and values of each attention, float32 [1] or [heads, 1, 1].
    """

    path: Path
    weights: dict[str, Weight]
    others: dict[str, Tensor]
    masters: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    casts: dict[str, Format] = field(default_factory=dict)
    inputs: dict[str, Format] = field(default_factory=dict)
    kv_scales: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def quantized_entries(name: str, shape: Sequence[int], dtype: np.dtype, format: Format) -> list[Entry]:
    """Lists the file entries of a quantized tensor: an empty one under its name, codes, scales, and maybe a tensor scale."""
    shape = tuple(shape)
    entries = [
        Entry(name, dtype, no_values(shape)),
        Entry(name + SUFFIXES["codes"], np.dtype(np.uint8), layout.codes_shape(shape, format)),
        Entry(name + SUFFIXES["scales"], np.dtype(format.scale.dtype), layout.scales_shape(shape, format)),
    ]
    if format.scale.two_level:
        entries.append(Entry(name + SUFFIXES["tensor_scale"], np.dtype(np.float32), ()))
    return entries


def weight_in(
    path: Path, tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: np.dtype, format: Format
) -> Weight:
    """Assembles a weight from its entries in blockfp's layout; raises BadFile if an entry is missing or has another dtype or
    shape."""
    entries = quantized_entries(name, shape, dtype, format)
    for entry in entries:
        tensor = tensors.get(entry.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            found = "missing" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            problem = f"is {found}, {format} of shape {tuple(shape)} needs {entry.dtype} of shape {entry.shape}"
            raise BadFile(path, problem, entry.name)
    _, codes, scales, *rest = (tensors[entry.name] for entry in entries)
    names = tuple(entry.name for entry in entries)
    return Weight(name, format, tuple(shape), dtype, codes, scales, rest[0] if rest else None, names)
