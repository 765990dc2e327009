"""A quantized model held against the one that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..array import QuantizedArray, quantize
from ..definition.numerics import Quantized
from ..errors import BadFile
from ..files.contents import Contents
from ..files.modelfile import Model
from .measure import measure


class Held(NamedTuple):
    """A tensor of a quantized model beside the source's.

    Attributes:
        name: of both.
        format: of the codes; None for a tensor that isn't quantized.
        equal: True where codes and scales are those that blockfp makes of the source, or values the source's.
        sqnr_db: signal to quantization noise of the codes' values; None for a tensor that isn't quantized.
    """

    name: str
    format: str | None
    equal: bool
    sqnr_db: float | None = None


def against_source(model: Contents, source: Model) -> Iterator[Held]:
    """Yields what is found of each tensor of a quantized model.

    Raises:
        BadFile: the source lacks a tensor, has it in another shape, or has one that the model lacks.
    """
    there = {tensor.name: tensor for tensor in source.tensors}
    own = {**model.weights, **model.others}
    for name in [*own, *there]:
        if name not in own or name not in there:
            raise BadFile(model.path if name in there else source.path, "has no such tensor, and the other file has one", name)
        if own[name].shape != there[name].shape:
            raise BadFile(model.path, f"has shape {own[name].shape}, and {there[name].shape} in {source.path}", name)
        if name in model.weights and there[name].skipped:
            raise BadFile(source.path, f"is {there[name].dtype}, and a source is in high precision", name)
    for name, weight in model.weights.items():
        x, q = there[name].read(), weight.read()
        parts = Quantized(q.codes, q.scales, q.tensor_scale)
        sqnr = measure(x, parts, np.asarray(q.dequantize(np.float32)), q.format).sqnr_db
        yield Held(name, q.format.name, _same(q, quantize(x, q.format)), sqnr)
    for name, tensor in model.others.items():
        equal = tensor.dtype == there[name].dtype and tensor.read().tobytes() == there[name].read().tobytes()
        yield Held(name, None, equal)


def _same(a: QuantizedArray, b: QuantizedArray) -> bool:
    parts = zip((a.codes, a.scales, a.tensor_scale), (b.codes, b.scales, b.tensor_scale), strict=True)
    return all(x is y is None or np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in parts)
