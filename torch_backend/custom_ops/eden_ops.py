"""The custom ops of MS-EDEN (`blockfp.definition.eden`): operands of products that are rotated by random signs.

    blockfp::rotate_eden    (x, key, origin) -> float32
    blockfp::eden_amaxes    (x, key, ..) -> [blocks, nan, tensor]    of the rotated values: what ranks reduce
    blockfp::quantize_eden  (x, amaxes, key, ..) -> [codes, scales, tensor_scale]; NaN scales mark an Inf

On a GPU the casts and amaxes are the CUDA library's (`eden_kernels`), elsewhere the definition's array operations. Rotated
values are the definition's everywhere. `columnwise` comes first: `origin` and `shape` speak of the matrix as it is encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.definition import eden, layout, numerics
from blockfp.definition.numerics import Amax
from blockfp.formats import Format

from . import eden_kernels
from .library import define, empty_parts, fake, impl
from .overflow import mark

rotate_eden = define("rotate_eden(Tensor x, Tensor key, int origin) -> Tensor")
eden_amaxes = define("eden_amaxes(Tensor x, Tensor key, bool columnwise, int[] origin) -> Tensor[]")
quantize_eden = define(
    "quantize_eden(Tensor x, Tensor[]? amaxes, Tensor key, str operand, bool columnwise, int[] origin, SymInt[]? shape) "
    "-> Tensor[]"
)

_FORMAT = Format.parse("nvfp4")


@impl(rotate_eden)
def _rotate_eden(x: Tensor, key: Tensor, origin: int) -> Tensor:
    return eden.rotate(x, key, origin).clone(memory_format=torch.contiguous_format)


@fake(rotate_eden)
def _rotate_eden_fake(x: Tensor, key: Tensor, origin: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _rotated(x: Tensor, key: Tensor, columnwise: bool, origin: list[int]) -> Tensor:
    return eden.rotate((x.mT if columnwise else x).contiguous(), key, origin[1])


@impl(eden_amaxes)
def _eden_amaxes(x: Tensor, key: Tensor, columnwise: bool, origin: list[int]) -> list[Tensor]:
    if eden_kernels.take(x, columnwise):
        return eden_kernels.amaxes(x, key, columnwise, origin[1])
    found = numerics.amax(_rotated(x, key, columnwise, origin), _FORMAT)
    return [field.contiguous() for field in found if field is not None]


@fake(eden_amaxes)
def _eden_amaxes_fake(x: Tensor, key: Tensor, columnwise: bool, origin: list[int]) -> list[Tensor]:
    grid = layout.scales_shape((x.mT if columnwise else x).shape, _FORMAT, (origin[0], origin[1]))
    return [x.new_empty(size, dtype=torch.int32) for size in (grid, grid, ())]


@impl(quantize_eden)
def _quantize_eden(
    x: Tensor,
    amaxes: list[Tensor] | None,
    key: Tensor,
    operand: eden.Operand,
    columnwise: bool,
    origin: list[int],
    shape: list[int] | None,
) -> list[Tensor]:
    if eden_kernels.take(x, columnwise):
        # An origin on a multiple of 128 cuts no block, so that of given amaxes the tensor's alone says anything new.
        return eden_kernels.quantize(x, None if amaxes is None else amaxes[2], key, operand, columnwise, origin, shape)
    amax = None if amaxes is None else Amax(*amaxes)
    place = None if shape is None else (shape[0], shape[1])
    z = _rotated(x, key, columnwise, origin)
    found = eden.quantize(z, _FORMAT, key, operand, origin=(origin[0], origin[1]), shape=place, amax=amax)
    parts = [part.contiguous() for part in found if part is not None]
    mark(x, [(_FORMAT, parts)], None if amax is None else amax.tensor)
    return parts


@fake(quantize_eden)
def _quantize_eden_fake(x: Tensor, amaxes, key, operand: str, columnwise: bool, origin, shape) -> list[Tensor]:
    return empty_parts(x, (x.mT if columnwise else x).shape, _FORMAT, (origin[0], origin[1]))
