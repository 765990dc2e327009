"""Tensors of a model as several of a server's: experts that lie in one parameter, under the names that releases have for each.

A part is read when it is asked for. The first one that is reads the whole, which is gathered once and kept until the last is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.layout import scales_shape
from blockfp.files.contents import Weight, quantized_entries
from blockfp.files.modelfile import Tensor as Entry

from ..quantized_tensor.tensor import QuantizedTensor

Apart = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Takes a tensor of a model, maybe on the meta device, by its name; returns the server's tensors by theirs."""


def split(entry: Entry, apart: Apart) -> dict[str, Entry]:
    """Returns the entries that one becomes; each is to be read once."""
    meta = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name), device="meta")
    shapes = {name: tuple(part.shape) for name, part in apart(entry.name, meta).items()}
    values: Any = entry.read
    read = _at_once(lambda: apart(entry.name, values()))
    return {name: Entry(name, entry.dtype, shape, read(name)) for name, shape in shapes.items()}


def split_weight(weight: Weight, apart: Apart) -> dict[str, Weight]:
    """Returns the weights that one becomes, with the codes and scales that it has.

    Raises:
        ValueError: a part would begin within a block.
    """
    format, made = weight.format, {}
    codes = split(weight.codes, apart)
    scales = {} if format.block is None else split(weight.scales, apart)
    for name, own in codes.items():
        shape = (*own.shape[:-1], weight.shape[-1])
        one = (1,) * len(shape)
        grid = scales.get(name, Entry(name, weight.scales.dtype, one, lambda one=one: weight.scales.read().reshape(one)))
        cut = len(codes) > 1 and format.block is not None and shape[-2] != weight.shape[-2] and shape[-2] % format.block[0]
        if cut or grid.shape != scales_shape(shape, format):
            raise ValueError(
                f"{weight.name} {list(weight.shape)} in {format} can't be taken apart into {name} {list(shape)} and others: "
                "blocks reach over their ends"
            )
        made[name] = replace(weight, name=name, shape=shape, codes=own, scales=grid)
    return made


def turned(weight: Weight) -> Weight:
    """Returns a weight in square blocks with its last two axes swapped; each of its parts is to be read once."""
    format, factor = weight.format, weight.tensor_scale

    def whole() -> dict[str, Tensor]:
        codes, scales = (torch.as_tensor(part.read(), device="cpu") for part in (weight.codes, weight.scales))
        scale = None if factor is None else torch.as_tensor(factor.read(), device="cpu")
        q: Any = QuantizedTensor.from_parts(
            codes, scales, scale, format=format, columns=weight.shape[-1], dtype=torch.float32
        ).mT
        return {"codes": q.codes, "scales": q.scales}

    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])
    _, codes, scales, *_ = quantized_entries(weight.name, shape, weight.dtype, format)
    read = _at_once(whole)
    return replace(
        weight,
        shape=shape,
        codes=Entry(weight.name, codes.dtype, codes.shape, read("codes")),
        scales=Entry(weight.name, scales.dtype, scales.shape, read("scales")),
    )


def _at_once(read: Callable[[], Mapping[str, Tensor]]) -> Callable[[str], Callable[[], Any]]:
    """Returns what reads one of several tensors that are made together, and keeps the others until they are asked for."""
    held: dict[str, Tensor] = {}

    def of(name: str) -> Callable[[], Tensor]:
        def one() -> Tensor:
            if name not in held:
                held.update(read())
            return held.pop(name)

        return one

    return of
