"""Custom ops that quantize one shard of a matrix; a collective runs between the amaxes (or members) and the quantization.

    blockfp::part_amaxes    (x, ..) -> [blocks, nan, tensor]    amaxes of the shard; fields that the format lacks are empty
    blockfp::part_members   (x, ..) -> members    all elements by block, for formats whose blocks choose a scale (4-over-6)
    blockfp::quantize_part  (x, amaxes, key, ..) -> [codes, scales] or [codes, scales, tensor_scale]; NaN scales mark an Inf
    blockfp::turned         (codes, scales, ..) -> [codes, scales]    of the transposed matrix, for square blocks

`columnwise` and `rotate` are applied first; `origin` and `shape` refer to the resulting matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.definition import four_over_six, layout
from blockfp.definition.numerics import Amax
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format

from .. import kernels
from ..kernels import kernels_for
from ..library import define, empty_parts, fake, impl
from ..product.matrix import mark

part_amaxes = define("part_amaxes(Tensor x, str format, bool columnwise, bool rotate, int[] origin) -> Tensor[]")
part_members = define("part_members(Tensor x, str format, bool columnwise, bool rotate, int[] origin) -> Tensor")
quantize_part = define(
    "quantize_part(Tensor x, Tensor[]? amaxes, Tensor? key, str format, bool columnwise, bool rotate, int[] origin, "
    "SymInt[] shape, float eps) -> Tensor[]"
)
turned = define("turned(Tensor codes, Tensor scales, str format, int columns) -> Tensor[]")


def _encoded(x: Tensor, columnwise: bool, rotate: bool) -> Tensor:
    values = x.mT if columnwise else x
    return kernels.rotate(values) if rotate else values


@impl(part_amaxes)
def _part_amaxes(x: Tensor, format: str, columnwise: bool, rotate: bool, origin: list[int]) -> list[Tensor]:
    values = _encoded(x, columnwise, rotate)
    found = kernels_for(values).amax(values, Format.parse(format), origin=tuple(origin))
    return [x.new_empty(0, dtype=torch.int32) if field is None else field for field in found[:3]]


@fake(part_amaxes)
def _part_amaxes_fake(x: Tensor, format: str, columnwise: bool, rotate: bool, origin: list[int]) -> list[Tensor]:
    parsed = Format.parse(format)
    grid = layout.scales_shape((x.mT if columnwise else x).shape, parsed, (origin[0], origin[1]))
    nan = (0,) if parsed.element.has_nan else grid
    tensor = () if parsed.scale.two_level else (0,)
    return [x.new_empty(size, dtype=torch.int32) for size in (grid, nan, tensor)]


@impl(part_members)
def _part_members(x: Tensor, format: str, columnwise: bool, rotate: bool, origin: list[int]) -> Tensor:
    found = four_over_six.members(_encoded(x, columnwise, rotate), format, origin=(origin[0], origin[1]))
    return found.clone(memory_format=torch.contiguous_format)


@fake(part_members)
def _part_members_fake(x: Tensor, format: str, columnwise: bool, rotate: bool, origin: list[int]) -> Tensor:
    parsed = Format.parse(format)
    assert parsed.block is not None
    grid = layout.scales_shape((x.mT if columnwise else x).shape, parsed, (origin[0], origin[1]))
    return x.new_empty((*grid, parsed.block[0] * parsed.block[1]), dtype=torch.int32)


@impl(quantize_part)
def _quantize_part(
    x: Tensor,
    amaxes: list[Tensor] | None,
    key: Tensor | None,
    format: str,
    columnwise: bool,
    rotate: bool,
    origin: list[int],
    shape: list[int],
    eps: float,
) -> list[Tensor]:
    values = _encoded(x, columnwise, rotate)
    parsed, amax = Format.parse(format), None
    if amaxes is not None:
        blocks, nan, tensor, *members = amaxes
        whole = tensor if parsed.scale.two_level else None
        amax = Amax(blocks, None if parsed.element.has_nan else nan, whole, *members)
    options = {"key": key, "eps": eps_for(parsed, eps), "origin": tuple(origin), "shape": tuple(shape), "amax": amax}
    parts = [part.contiguous() for part in kernels_for(values).quantize(values, parsed, **options) if part is not None]
    known = None
    if amax is not None and parsed.has_tensor_scale:
        known = amax.blocks if parsed.per_tensor else amax.tensor
    mark(x, [(parsed, parts)], known)
    return parts


@fake(quantize_part)
def _quantize_part_fake(
    x: Tensor, amaxes, key, format: str, columnwise: bool, rotate: bool, origin, shape, eps
) -> list[Tensor]:
    return empty_parts(x, (x.mT if columnwise else x).shape, Format.parse(format), (origin[0], origin[1]))


@impl(turned)
def _turned(codes: Tensor, scales: Tensor, format: str, columns: int) -> list[Tensor]:
    # An op may not return its inputs, so copy.
    found = kernels.transpose(codes, scales, Format.parse(format), columns=columns)
    return [part.clone(memory_format=torch.contiguous_format) for part in found]


@fake(turned)
def _turned_fake(codes: Tensor, scales: Tensor, format: str, columns: int) -> list[Tensor]:
    packed = layout.packed_columns(codes.shape[0], Format.parse(format).element.bits)
    return [codes.new_empty((columns, packed)), scales.new_empty((scales.shape[1], scales.shape[0]))]
