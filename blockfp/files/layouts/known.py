"""The table of layouts, and conversion of models to a layout's formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ...array import QuantizedArray, quantize
from ...errors import BadFile
from ...formats import Format
from ..contents import Contents, Weight, quantized_entries
from ..modelfile import Tensor
from ..released import activation_scales
from .compressed_tensors import CompressedTensors
from .fine_grained_fp8 import FineGrainedFP8
from .layout import Layout
from .modelopt import ModelOpt
from .mxfp4 import MXFP4

LAYOUTS: dict[str, Layout] = {known.name: known for known in (CompressedTensors(), FineGrainedFP8(), ModelOpt(), MXFP4())}

Requantized = Callable[[Weight, np.ndarray, QuantizedArray], None]
"""Called with a weight, its previous values, and its requantization."""


def in_formats_of(known: Layout, model: Contents, done: Requantized) -> Contents:
    """Returns a model in formats that the layout supports; other weights are requantized when they are read.

    A weight that the layout rejects for another reason stays unchanged, so that `write_layout` raises the error. Scales of
    activations are dropped, because the layout's configuration doesn't describe them.
    """
    weights = {}
    for name, weight in model.weights.items():
        if known.problem(weight) is not None:
            other = _requantized(known, model, weight, done)
            weight = weight if known.problem(other) is not None else other
        weights[name] = weight
    left_out = activation_scales(weights, model.others)
    others = {name: tensor for name, tensor in model.others.items() if name not in left_out}
    return Contents(model.path, weights, others, model.masters, [*model.left_out, *left_out])


def quantized_as_used(model: Contents, known: Layout | None) -> Contents:
    """Returns a model with `casts` applied: these tensors are quantized when they are read, as its forward quantizes them.

    Raises BadFile, when reading, if the layout (None: blockfp's) can't hold the scales.
    """
    values = {name: replace(model.others[name], name=name) for name in model.casts}
    made = {name: _made(known, model.path, each, model.casts[name], each.read) for name, each in values.items()}
    others = {name: tensor for name, tensor in model.others.items() if name not in made}
    return replace(model, weights={**model.weights, **made}, others=others, casts={})


def _requantized(known: Layout, model: Contents, weight: Weight, done: Requantized) -> Weight:
    def noted(values: np.ndarray, q: QuantizedArray) -> None:
        done(weight, values, q)

    return _made(known, model.path, weight, known.nearest(weight.format), weight.values, noted)


def _made(
    known: Layout | None,
    path: Path,
    what: Weight | Tensor,
    format: Format,
    read_values: Callable[[], np.ndarray],
    done: Callable[[np.ndarray, QuantizedArray], None] = lambda values, q: None,
) -> Weight:
    """Returns a weight that is quantized when it is read."""

    @cache
    def made() -> QuantizedArray:
        values = read_values()
        q = quantize(values, format)
        parts = [np.asarray(part) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]
        held = _weight(what, format, [lambda part=part: part for part in parts])
        if known is not None and (problem := known.trouble(held)):
            raise BadFile(path, problem, what.name)
        done(values, q)
        return q

    def part(of: Callable[[QuantizedArray], np.ndarray | None], last: bool) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            array = np.asarray(of(made()))
            if last:
                # Models are written weight by weight: drop this weight after its last part.
                made.cache_clear()
            return array

        return read

    count = 3 if format.scale.two_level else 2
    of = (lambda q: q.codes, lambda q: q.scales, lambda q: q.tensor_scale)
    return _weight(what, format, [part(which, i == count - 1) for i, which in enumerate(of[:count])])


def _weight(weight: Weight | Tensor, format: Format, read: Sequence[Callable[[], np.ndarray]]) -> Weight:
    """Returns a weight in another format whose parts are computed by `read`."""
    _, *entries = quantized_entries(weight.name, weight.shape, weight.dtype, format)
    tensors = [Tensor(weight.name, entry.dtype, entry.shape, get) for entry, get in zip(entries, read, strict=True)]
    codes, scales, *rest = tensors
    return Weight(weight.name, format, weight.shape, weight.dtype, codes, scales, rest[0] if rest else None, made=True)
