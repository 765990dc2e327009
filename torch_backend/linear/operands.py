"""Operands of products that a tensor-parallel group shares: quantized as parts of the whole, in both directions, and gathered.

The kernels that quantize a whole operand in one read (`operand_ops`) serve parts too, wherever nothing depends on the place of
a part but the amax of the tensor. Otherwise `activations.quantize_part` quantizes each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION, Cast
from blockfp.sharding.plans import Operand

from ..custom_ops import part_ops
from ..custom_ops.collectives import following, max_reduce
from ..custom_ops.operand_ops import Directions, quantize_operand, tensor_amax
from ..custom_ops.products import Matrix
from . import activations
from .activations import Direction, Way, way_of
from .delayed import record
from .linear_function import Scaling, quantized_whole
from .observe import observe_parts
from .place import Place


class Wanted(NamedTuple):
    """A direction in which an operand is quantized on this rank, and what of the layer's figures it counts as."""

    direction: Direction
    names: tuple[str, ...]


def quantized(
    x: Tensor,
    operand: Operand,
    rowwise: Cast,
    columnwise: Cast,
    scaling: Scaling,
    place: Place | None,
    keys: Tensor | None = None,
) -> tuple[Matrix, Matrix]:
    """x [rows, columns] rowwise and columnwise as it lies: a part of the whole at `place`, or the whole where that is None.

    A direction without a format keeps the values.
    """
    if place is None:
        row, column = quantized_whole(x, operand, rowwise, columnwise, scaling, keys)
        return Matrix(row, rowwise.format), Matrix(column if columnwise.format else [x.mT], columnwise.format)
    wanted = []
    for i, cast in enumerate((rowwise, columnwise)):
        if cast.format is not None:
            way = way_of(x.shape, cast, place, columnwise=i == 1, operand=operand, gathers=False)
            wanted.append(_wanted(i, cast, way, keys))
    made = iter(zip(_parts(x, operand, wanted, scaling, place), wanted, strict=True))
    found = []
    for cast, values in ((rowwise, x), (columnwise, x.mT)):
        if cast.format is None:
            found.append(Matrix([values], None))
        else:
            parts, (direction, _) = next(made)
            found.append(Matrix(parts, cast.format, direction.way.origins[0]))
    return found[0], found[1]


def gathered_input(x: Tensor, rowwise: Cast, columnwise: Cast, scaling: Scaling, place: Place) -> tuple[Matrix, list[Tensor]]:
    """The whole input rowwise, gathered, and what this rank is to keep until the columnwise codes are gathered.

    That are the columnwise codes of x (or the rowwise ones, where the others follow from them); x itself, where they can't
    travel or `columnwise` has no format.
    """
    row_way, column_way = way_of(x.shape, rowwise, place), way_of(x.shape, columnwise, place, columnwise=True)
    shares = column_way.transposes and row_way.by_codes and rowwise.format is columnwise.format
    wanted = []
    if row_way.by_codes:
        wanted.append(_wanted(0, rowwise, row_way, None, shares))
    if column_way.by_codes and not shares:
        wanted.append(_wanted(1, columnwise, column_way, None))
    made = _parts(x, "input", wanted, scaling, place)
    kept = made[-1] if column_way.by_codes else [x]
    whole = activations.gather(row_way, place, made[0] if row_way.by_codes else [x])
    if not row_way.by_codes:
        whole = quantized_whole(whole[0], "input", rowwise, HIGH_PRECISION, scaling)[0]
    return Matrix(whole, rowwise.format), kept


class Coming(NamedTuple):
    """The whole input columnwise, on its way."""

    received: list[Tensor]
    way: Way
    cast: Cast
    place: Place

    def finish(self, scaling: Scaling) -> Matrix:
        """Waits for it."""
        parts = activations.join(self.way, self.place, self.received)
        if self.way.by_codes:
            return Matrix(parts, self.cast.format, transposed=self.way.transposes)
        if self.cast.format is None:
            return Matrix([parts[0].mT], None)
        return Matrix(quantized_whole(parts[0], "input", HIGH_PRECISION, self.cast, scaling)[1], self.cast.format)


def regathered_input(kept: list[Tensor], shape: Sequence[int], cast: Cast, place: Place, gradient: Tensor) -> Coming:
    """Begins to gather the whole input columnwise, from what `gathered_input` kept of a part of this shape."""
    way = way_of(shape, cast, place, columnwise=True)
    sent = activations.padded(way, kept)
    if torch.compiler.is_compiling():
        # Else it would be gathered as soon as it is known: in the forward, which would keep all of it for the backward.
        sent[-1] = following(sent[-1], gradient)
    return Coming(activations.start(place, sent), way, cast, place)


def gathered_gradient(
    gradient: Tensor, rowwise: Cast | None, columnwise: Cast | None, scaling: Scaling, place: Place, keys: Tensor | None
) -> tuple[Matrix, Matrix]:
    """The whole gradient in both directions, of which None is not wanted. What travels does so in one collective."""
    casts = (rowwise, columnwise)
    ways = [
        None if cast is None else way_of(gradient.shape, cast, place, columnwise=i == 1, operand="gradient")
        for i, cast in enumerate(casts)
    ]
    if not all(way is None or way.by_codes for way in ways):
        values = way_of(gradient.shape, HIGH_PRECISION, place)
        (whole,) = activations.gather(values, place, [gradient])
        return quantized(whole, "gradient", rowwise or HIGH_PRECISION, columnwise or HIGH_PRECISION, scaling, None, keys)
    transposes = ways[1] is not None and ways[1].transposes
    shares = transposes and rowwise is not None and columnwise is not None and rowwise.format is columnwise.format
    wanted = [
        _wanted(i, cast, way, keys, shares)
        for i, (cast, way) in enumerate(zip(casts, ways, strict=True))
        if cast is not None and way is not None and not (shares and i == 1)
    ]
    sent = [
        activations.padded(each.direction.way, parts)
        for each, parts in zip(wanted, _parts(gradient, "gradient", wanted, scaling, place), strict=True)
    ]
    received = iter(activations.start(place, [part for parts in sent for part in parts]))
    found: list[Matrix] = []
    for (direction, _), parts in zip(wanted, sent, strict=True):
        joined = activations.join(direction.way, place, [next(received) for _ in parts])
        found.append(Matrix(joined, direction.cast.format))
    row, column = found[0], found[-1]
    if transposes:
        assert column.format is not None
        turned = part_ops.turned(column.parts[0], column.parts[1], column.format.name, gradient.shape[1])
        column = Matrix([*turned, *column.parts[2:]], column.format)
    return row, column


def _wanted(i: int, cast: Cast, way: Way, keys: Tensor | None, both: bool = False) -> Wanted:
    key = keys[i] if keys is not None and cast.stochastic else None
    names = ("rowwise", "columnwise")
    return Wanted(Direction(cast, way, key), names if both else (names[i],))


def _parts(x: Tensor, operand: Operand, wanted: Sequence[Wanted], scaling: Scaling, place: Place) -> list[list[Tensor]]:
    """This rank's part in each of the directions."""
    directions = [each.direction for each in wanted]
    across = [direction.way.across for direction in directions]
    if not directions:
        return []
    if all(map(_depends_on_amax_alone, directions)) and len(set(across)) == len(across) and _alike(directions):
        row, column = (
            next((d for d, a in zip(directions, across, strict=True) if a is turned), None) for turned in (False, True)
        )
        found = _in_one_read(x, row, column, scaling, place)
        parts = [found.column if turned else found.row for turned in across]
        if found.amax is not None and scaling.history is not None:
            record(scaling.history, found.amax)
    else:
        parts = activations.quantize_part(x, directions, place, eps=scaling.eps)
    if scaling.observed is not None:
        for (direction, names), made in zip(wanted, parts, strict=True):
            for name in names:
                cast, way, _ = direction
                values = x.mT if way.across else x
                observe_parts(scaling.observed, f"{operand} {name}", values, made, cast, way.origins[0])
    return parts


def _depends_on_amax_alone(direction: Direction) -> bool:
    """Whether nothing but the amax of the whole tensor depends on the other ranks, and on where the part lies."""
    format, way = direction.cast.format, direction.way
    assert format is not None
    # The amax of a tensor's rotated values is another one.
    rotated = direction.cast.rotate and format.per_tensor
    return direction.key is None and way.straddling is None and not format.scale.two_level and not rotated


def _alike(directions: Sequence[Direction]) -> bool:
    """Whether all formats have one scale per tensor, or none has."""
    return len({direction.cast.format is not None and direction.cast.format.per_tensor for direction in directions}) == 1


def _in_one_read(x: Tensor, row: Direction | None, column: Direction | None, scaling: Scaling, place: Place) -> Directions:
    formats = [None if direction is None else direction.cast.format for direction in (row, column)]
    one = row or column
    assert one is not None
    amax = None
    if one.way.whole_amax and scaling.multiplier is None:
        if x.is_cuda and torch.compiler.is_compiling() and x.numel():
            # There the compiler finds it while it makes x.
            amax = tensor_amax(x)
        else:
            amax = part_ops.part_amaxes(x, one.how[0], False, False, (0, 0))[0].view(1)
        amax = max_reduce(amax, (place.group,))
    rotate = column is not None and column.cast.rotate
    return quantize_operand(x, *formats, amax=amax, multiplier=scaling.multiplier, rotate=rotate, eps=scaling.eps)
