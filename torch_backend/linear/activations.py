"""Activations and gradients cut over a tensor-parallel group: quantized as parts of the whole, and gathered as codes.

    this rank's rows or columns
      | quantize_part                 amaxes max-reduced over the group where the plan says so; blocks and random bits
      v                               counted from where the part lies in the whole
    codes, scales
      | start, .. join                one collective for all tensors, begun early and waited for late
      v
    codes and scales of the whole, bit for bit as if it had been quantized in one piece

Where a cut falls inside a block the values are gathered instead, and quantized behind the gather: the plan
(`plans.gather_activation`) says so, and a warning repeats its first reason. Nothing here holds a process group: collectives go
by group name, as compiled code takes it. A plan is made while a function is traced, and stands in the graph as constants.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.recipes import Cast
from blockfp.sharding import plans
from blockfp.sharding.plans import Operand
from blockfp.sharding.steps import Gather, Join, Quantize, Transpose, grid_span

from ..custom_ops import part_ops
from ..custom_ops.collectives import max_reduce_together
from .place import COLUMNS, ROWS, Place, sharding_of


class Part(NamedTuple):
    """How one tensor is sent and put together.

    Attributes:
        axis: along which it is put together, 0 or 1.
        runs: how many runs it has along the axis.
        own, chunk: entries of a run that this rank has, and that every rank sends.
        take: (source, start, stop) of what is taken of the chunks of all ranks, in order; empty where that is their head.
        size: entries of the result.
        floats: whether the entries are float32 that travel as bytes: gloo takes one dtype in a collective.
    """

    axis: int
    runs: int
    own: int
    chunk: int
    take: tuple[tuple[int, int, int], ...]
    size: int
    floats: bool = False


class Straddling(NamedTuple):
    """Blocks that lie on several ranks.

    Attributes:
        axis: along which they do.
        blocks: how many there are, on all ranks.
        held: (number, place in this rank's own scale grid) of those that this rank has a part of.
    """

    axis: int
    blocks: int
    held: tuple[tuple[int, int], ...]


class Way(NamedTuple):
    """What a plan comes down to on this rank, as constants.

    Attributes:
        by_codes: whether codes and scales are gathered; else values, which are quantized behind the gather. False where nothing
            is gathered.
        parts: of codes, scales and tensor scale, or of the values; empty where nothing is gathered.
        whole_amax: whether the amax of the whole tensor is reduced over the group.
        straddling: the blocks whose amaxes are, or None.
        origins: (row, column) of this rank's first element as it is encoded, for each run.
        size: rows of the whole matrix where those are cut, or its columns.
        across: whether it is encoded transposed.
        transposes: whether it is its rowwise codes that travel, to be transposed behind the gather.
    """

    by_codes: bool
    parts: tuple[Part, ...]
    whole_amax: bool
    straddling: Straddling | None
    origins: tuple[tuple[int, int], ...]
    size: int
    across: bool
    transposes: bool


def way_of(
    shape: Sequence[int],
    cast: Cast,
    place: Place,
    *,
    columnwise: bool = False,
    operand: Operand = "input",
    gathers: bool = True,
) -> Way:
    """What to do with one operand in one direction. Warns, once for each kind of operand, where it can't travel as codes.

    Args:
        shape: of this rank's part [rows, columns].
        cast: the operand's cast in this direction; without a format, values are gathered.
        place: where the part lies.
        columnwise: whether the transposed matrix is wanted.
        operand: "input", "weight" or "gradient".
        gathers: whether the whole is wanted on every rank, or this rank's part of its codes and scales.

    Raises:
        ValueError: the shape isn't that of what this rank holds; or there is no such plan (`plans.quantize_shards`).
    """
    # Compiled code calls `_way_of` while it is traced, and keeps what it returns; `index` makes it take lengths as constants.
    # How columns are cut doesn't depend on how many rows there are, which it may leave open.
    rows, columns = 1 if place.axis == COLUMNS else operator.index(shape[0]), operator.index(shape[1])
    format = None if cast.format is None else cast.format.name
    return _way_of(format, cast.stochastic, cast.rotate, place[1:], (rows, columns), columnwise, operand, gathers)


_told: set[tuple[str, bool, Operand]] = set()
"""Format, direction and operand of which a warning was given."""


@torch.compiler.assume_constant_result
def _way_of(*question: Any) -> Way:
    return _answer(*question)


@lru_cache(maxsize=4096)
def _answer(
    format: str | None,
    stochastic: bool,
    rotate: bool,
    numbers: tuple[int, int, int, int, int | None],
    local: tuple[int, int],
    columnwise: bool,
    operand: Operand,
    gathers: bool,
) -> Way:
    place = Place("", *numbers)
    lies = sharding_of(place, local)
    if format is None:
        gather = Gather(lies, place.axis, lies.mesh.names, None, "values")
        part = _part(gather.elements(place.rank), gather.dim, place)
        return Way(False, (part,), False, None, ((0, 0),), lies.shape[place.axis], False, False)
    options: dict[str, Any] = {"operand": operand, "columnwise": columnwise, "rotate": rotate, "stochastic": stochastic}
    if gathers:
        plan = plans.gather_activation(format, lies, lies.mesh.names, **options)
    else:
        plan = plans.quantize_shards(format, lies, **options)
    if plan.reason is not None and (format, columnwise, operand) not in _told:
        warnings.warn(f"{plan.use}: it is gathered in high precision, because {plan.reason}", stacklevel=2)
        # The next length of a sequence is no news. After the warning, which may be an error.
        _told.add((format, columnwise, operand))
    (quantize,) = (step for step in plan.steps if isinstance(step, Quantize))
    gather = next((step for step in plan.steps if isinstance(step, Gather)), None)
    axes = quantize.amax_axes
    if gather is not None and gather.payload == "values":
        parts, by_codes, origins, axes = (_part(gather.elements(place.rank), gather.dim, place),), False, ((0, 0),), ()
    else:
        parts, by_codes = _code_parts(gather, place), gather is not None
        origins = tuple(quantize.sharding.region(_rank(place, run)).origin for run in range(place.runs))
    transposes = [step for step in plan.steps if isinstance(step, Transpose)]
    return Way(
        by_codes,
        parts,
        bool(axes),
        _straddling(quantize, place),
        origins,
        lies.shape[place.axis],
        any(step.format is None for step in transposes),
        any(step.format is not None for step in transposes),
    )


def _rank(place: Place, run: int = 0) -> int:
    """This rank's number in the mesh of `sharding_of`: of several runs, one for each."""
    return run * place.ranks + place.rank


def _code_parts(gather: Gather | None, place: Place) -> tuple[Part, ...]:
    if gather is None:
        return ()
    assert gather.format is not None
    assert not gather.unpacks, "whole blocks are whole bytes"
    codes = _part(gather.stored(place.rank), gather.dim, place)
    # One scale of the tensor is the same in all runs of a rank.
    one = Part(gather.dim, 1, 1, 1, ((gather.first(place.rank) % place.ranks, 0, 1),), 1, True)
    scales = one if gather.format.per_tensor else _part(gather.scales(place.rank), gather.dim, place)
    scales = scales._replace(floats=gather.format.scale.dtype == "float32")
    return (codes, scales, one._replace(axis=0)) if gather.format.scale.two_level else (codes, scales)


def _part(join: Join, axis: int, place: Place) -> Part:
    own = next((stop - start for source, start, stop in join.runs if source == place.rank), 0)
    return Part(axis, place.runs, own, join.chunk, () if join.head else join.runs, join.size)


def _straddling(step: Quantize, place: Place) -> Straddling | None:
    if not step.straddles:
        return None
    if place.runs > 1:
        raise ValueError(
            f"{place.runs} sequences that lie {step.sharding} share blocks: their parts can't be quantized where they are"
        )
    # One axis is cut, so blocks straddle along one.
    (straddle,) = step.straddles
    first, count = grid_span(step.format, step.sharding.region(place.rank), straddle.dim)
    held = [(number, block - first) for number, block in enumerate(straddle.blocks) if first <= block < first + count]
    return Straddling(straddle.dim, len(straddle.blocks), tuple(held))


class Direction(NamedTuple):
    """One direction in which a part is quantized: how, what the plan says of it, and its key where it is stochastic."""

    cast: Cast
    way: Way
    key: Tensor | None = None

    @property
    def how(self) -> tuple[str, bool, bool]:
        assert self.cast.format is not None
        return self.cast.format.name, self.way.across, self.cast.rotate


def quantize_part(x: Tensor, directions: Sequence[Direction], place: Place, *, eps: float = 0.0) -> list[list[Tensor]]:
    """Codes, scales and, of two-level formats, tensor scale of this rank's part, as the whole matrix's quantization has them.

    Args:
        x: this rank's part [rows, columns], float32, float16 or bfloat16.
        directions: the directions wanted; what they reduce goes in one collective.
        place: where the part lies.
        eps: see `numerics.quantize`.
    """
    amaxes = _reduced_amaxes(x, directions, place)
    return [_encoded(x, *each, place, eps) for each in zip(directions, amaxes, strict=True)]


def _encoded(x: Tensor, direction: Direction, amaxes: list[Tensor] | None, place: Place, eps: float) -> list[Tensor]:
    (cast, way, key), how = direction, direction.how
    shape = (way.size, x.shape[1]) if place.axis == ROWS else (x.shape[0], way.size)
    shape = shape[::-1] if way.across else shape
    if key is None or place.runs == 1:
        return part_ops.quantize_part(x, amaxes, key, *how, way.origins[0], shape, eps)
    # Random bits are counted in the whole, where the runs of a rank don't lie one after another.
    axis = COLUMNS if way.across else ROWS
    each = (
        [None] * place.runs if amaxes is None else list(zip(*(_runs(field, axis, place.runs) for field in amaxes), strict=True))
    )
    parts = [
        part_ops.quantize_part(rows, amax, key, *how, origin, shape, eps)
        for rows, amax, origin in zip(x.chunk(place.runs), each, way.origins, strict=True)
    ]
    codes, scales, *tensor_scale = zip(*parts, strict=True)
    one = scales[0] if cast.format is not None and cast.format.per_tensor else torch.cat(scales, axis)
    return [torch.cat(codes, axis), one, *(scale[0] for scale in tensor_scale)]


def _runs(field: Tensor, axis: int, runs: int) -> list[Tensor]:
    """The amaxes of each run; what the tensor has one of, or none, belongs to all."""
    return list(field.chunk(runs, axis)) if field.ndim == 2 and field.shape[axis] >= runs else [field] * runs


def _reduced_amaxes(x: Tensor, directions: Sequence[Direction], place: Place) -> list[list[Tensor] | None]:
    """For each direction (blocks, nan, tensor) as all ranks of the group have them; None where nothing is reduced."""
    found: list[list[Tensor] | None] = [None] * len(directions)
    sent: list[Tensor] = []
    put: list[tuple[list[Tensor], int, Straddling | None]] = []
    for i, direction in enumerate(directions):
        format, way = direction.cast.format, direction.way
        assert format is not None
        if not way.whole_amax and way.straddling is None:
            continue
        fields = found[i] = list(part_ops.part_amaxes(x, *direction.how, way.origins[0]))
        if way.straddling is not None:
            for field in (0,) if format.element.has_nan else (0, 1):
                sent.append(_taken(fields[field], way.straddling))
                put.append((fields, field, way.straddling))
        if way.whole_amax:
            field = 2 if format.scale.two_level else 0
            sent.append(fields[field])
            put.append((fields, field, None))
    for (fields, field, straddling), reduced in zip(put, max_reduce_together(sent, (place.group,)), strict=True):
        fields[field] = reduced if straddling is None else _put(fields[field], straddling, reduced)
    return found


def _taken(field: Tensor, straddling: Straddling) -> Tensor:
    """The entries of straddling blocks among zeros for those that only other ranks have."""
    axis, held = straddling.axis, dict(straddling.held)
    shape = list(field.shape)
    shape[axis] = 1
    zero = field.new_zeros(shape)
    return torch.cat([field.narrow(axis, held[n], 1) if n in held else zero for n in range(straddling.blocks)], axis)


def _put(field: Tensor, straddling: Straddling, entries: Tensor) -> Tensor:
    field = field.clone()
    for number, place in straddling.held:
        field.select(straddling.axis, place).copy_(entries.select(straddling.axis, number))
    return field


def padded(way: Way, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Codes, scales and tensor scale (or the values) as they are sent: of the same length on every rank."""
    sent = [_padded(part, tensor) for part, tensor in zip(way.parts, tensors, strict=True)]
    return [tensor.view(torch.uint8) if part.floats else tensor for part, tensor in zip(way.parts, sent, strict=True)]


def _padded(part: Part, tensor: Tensor) -> Tensor:
    if tensor.ndim == 0:
        return tensor.view(1)
    missing = part.chunk - part.own
    if not missing:
        return tensor.contiguous()
    rows, columns = tensor.shape
    if part.axis == ROWS:
        return F.pad(tensor.reshape(part.runs, part.own, columns), (0, 0, 0, missing)).view(part.runs * part.chunk, columns)
    return F.pad(tensor.reshape(rows, part.runs, part.own), (0, missing)).view(rows, part.runs * part.chunk)


def start(place: Place, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Begins the all-gather of what `padded` made, all in one collective; what it returns is for `join`."""
    return torch.ops._c10d_functional.all_gather_into_tensor_coalesced(list(tensors), place.ranks, place.group)


def join(way: Way, place: Place, received: Sequence[Tensor]) -> list[Tensor]:
    """Waits for what `start` began and puts it together. Equal parts of rows are together already, and not copied."""
    waited = [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in received]
    return [_joined(part, place.ranks, tensor) for part, tensor in zip(way.parts, waited, strict=True)]


def gather(way: Way, place: Place, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`padded`, `start` and `join` at once: where there is nothing to do meanwhile."""
    return join(way, place, start(place, padded(way, tensors)))


def _joined(part: Part, ranks: int, tensor: Tensor) -> Tensor:
    axis, total = part.axis, ranks * part.runs * part.chunk
    if part.floats:
        # Bytes of nothing have strides that floats don't.
        tensor = tensor.view(torch.float32) if tensor.numel() else tensor[:, ::4].float()
    if tensor.ndim == 1:
        ((source, _, _),) = part.take
        return tensor[source]
    if axis == ROWS:
        columns = tensor.shape[1]
        tensor = tensor.view(ranks, part.runs, part.chunk, columns).transpose(0, 1).reshape(total, columns)
    else:
        rows = tensor.shape[0] // ranks
        tensor = tensor.view(ranks, rows, part.runs, part.chunk).permute(1, 2, 0, 3).reshape(rows, total)
    if part.take:
        pieces = [tensor.narrow(axis, source * part.chunk + first, last - first) for source, first, last in part.take]
        return torch.cat(pieces, axis)
    return tensor if part.size == total else tensor.narrow(axis, 0, part.size).contiguous()
