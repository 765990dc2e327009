"""Quantizes shards of weights and of products' operands as parts of the whole: the plan's `Quantize`.

Weights call the kernels directly, many together, and may be written in place. Operands go through custom ops, for compiled
code, which also mark overflow (`ops.product.matrix`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.definition import four_over_six
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rounding import Key
from blockfp.formats import Format
from blockfp.recipes import Cast

from ..ops import cuda
from ..ops.collectives import max_reduce_together
from ..ops.kernels import kernels_for
from ..ops.quantize import part_ops
from .rank_plan import AXIS, COLUMNS, ROWS, Quantization, SharedBlocks, TensorParallelShard


class WeightShard(NamedTuple):
    """This rank's values of a weight to quantize.

    Attributes:
        values: this rank's shard.
        step: its quantization, from the plan.
        groups: process group name of each mesh axis that the step reduces over.
        nominal: name of the weight's nominal dtype.
        key: random key for a weight without a master, whose new scales depend on those in `out`; or None.
        out: codes, scales and tensor scale to write into; None allocates them.
    """

    values: Tensor
    step: Quantization
    groups: Mapping[str, str]
    nominal: str
    key: Key | None = None
    out: Quantized | None = None


def quantize_weights(shards: Sequence[WeightShard]) -> list[Quantized]:
    """Quantizes this rank's shards after reducing the amaxes that ranks share; collective, with weights in the same order."""
    exchange = AmaxExchange()
    found: list[list[Any] | None] = []
    for shard in shards:
        amaxes = None
        if shard.step.reduces:
            amaxes = list(kernels_for(shard.values).amax(shard.values, shard.step.format, origin=shard.step.origins[0]))
            if shard.step.sends_members:
                amaxes[3] = four_over_six.members(shard.values, shard.step.format, origin=shard.step.origins[0])
            exchange.add(amaxes, shard.step, shard.groups)
        found.append(amaxes)
    exchange.run()
    return [_quantized(shard, None if amaxes is None else Amax(*amaxes)) for shard, amaxes in zip(shards, found, strict=True)]


def _quantized(shard: WeightShard, amax: Amax | None) -> Quantized:
    kernels, out = kernels_for(shard.values), shard.out
    options: dict[str, Any] = {"origin": shard.step.origins[0], "shape": shard.step.shape, "amax": amax}
    format = Format.parse(shard.step.format)
    if shard.key is not None:
        assert out is not None
        made = kernels.requantize(shard.values, format, out.scales, out.tensor_scale, key=shard.key, **options)
        return _written(out, made)
    options["nominal"] = shard.nominal
    if out is None:
        return kernels.quantize(shard.values, format, **options)
    if kernels is cuda and all(part is None or part.is_contiguous() for part in out):
        cuda.quantize(shard.values, format, **options, out=out)
        return out
    return _written(out, kernels.quantize(shard.values, format, **options))


def _written(out: Quantized, made: Quantized) -> Quantized:
    for part, new in zip(out, made, strict=True):
        if part is not None:
            part.copy_(new)
    return out


class Direction(NamedTuple):
    """One direction in which a shard of an operand is quantized.

    Attributes:
        cast: format and rounding.
        step: its quantization, from the plan.
        key: random key of stochastic rounding, or None.
        names: "rowwise" or "columnwise", under which `observe` counts it.
    """

    cast: Cast
    step: Quantization
    key: Tensor | None = None
    names: tuple[str, ...] = ()


def quantize_operand_shard(
    x: Tensor, directions: Sequence[Direction], shard: TensorParallelShard, *, eps: float = 0.0
) -> list[list[Tensor]]:
    """Quantizes this rank's part [rows, columns] of an operand, with the codes and scales of the quantized whole.

    All directions share one reduction. `eps` is as for `numerics.quantize`.
    """
    exchange = AmaxExchange()
    found: list[list[Tensor] | None] = []
    for direction in directions:
        step, amaxes = direction.step, None
        if step.reduces:
            amaxes = list(part_ops.part_amaxes(x, step.format, step.columnwise, step.rotate, step.origins[0]))
            if step.sends_members:
                amaxes.append(part_ops.part_members(x, step.format, step.columnwise, step.rotate, step.origins[0]))
            exchange.add(amaxes, step, {AXIS: shard.group})
        found.append(amaxes)
    exchange.run()
    return [_operand_parts(x, *each, shard, eps) for each in zip(directions, found, strict=True)]


def _operand_parts(
    x: Tensor, direction: Direction, amaxes: list[Tensor] | None, shard: TensorParallelShard, eps: float
) -> list[Tensor]:
    step, key = direction.step, direction.key
    how = (step.format, step.columnwise, step.rotate)
    shape = step.shape
    if shard.dim == COLUMNS:
        # The plan doesn't fix the number of rows.
        shape = (shape[0], x.shape[0]) if step.columnwise else (x.shape[0], shape[1])

    def part(rows: Tensor, amaxes: Any, origin: tuple[int, int]) -> list[Tensor]:
        return part_ops.quantize_part(rows, amaxes, key, *how, origin, shape, eps)

    if key is None or shard.runs == 1:
        return part(x, amaxes, step.origins[0])
    # Random bits are indexed in the whole matrix, in which a rank's runs aren't contiguous.
    axis = COLUMNS if step.columnwise else ROWS
    each = (
        [None] * shard.runs if amaxes is None else list(zip(*(_runs(field, axis, shard.runs) for field in amaxes), strict=True))
    )
    parts = [part(rows, amax, origin) for rows, amax, origin in zip(x.chunk(shard.runs), each, step.origins, strict=True)]
    codes, scales, *tensor_scale = zip(*parts, strict=True)
    one = scales[0] if direction.cast.format is not None and direction.cast.format.per_tensor else torch.cat(scales, axis)
    return [torch.cat(codes, axis), one, *(scale[0] for scale in tensor_scale)]


def _runs(field: Tensor, axis: int, runs: int) -> list[Tensor]:
    """Returns the amaxes of each run; a field with at most one entry belongs to all runs."""
    return list(field.chunk(runs, axis)) if field.ndim == 2 and field.shape[axis] >= runs else [field] * runs


# ---- amaxes


Entry = tuple[list[Any], int, SharedBlocks | None, Tensor]
"""Amaxes of an array, the reduced field, its shared blocks (None: all of it), and the tensor to send."""


class AmaxExchange:
    """Collects amaxes of shards and reduces them as plans say, also in compiled code.

    Rows are reduced before columns because a block may cross ranks both ways. A tensor's amax is reduced with the rows.

    Example:
        >>> exchange = AmaxExchange()
        >>> exchange.add(amaxes, quantization, {"fsdp": group_name})
        >>> exchange.run()  # amaxes are reduced now
    """

    def __init__(self):
        self.parts: list[tuple[list[Any], Quantization, Mapping[str, str]]] = []
        self.waiting: dict[tuple[str, ...], list[Entry]] = {}
        self.rounds = 1

    def add(self, amaxes: list[Any], step: Quantization, groups: Mapping[str, str]) -> None:
        """Adds the amaxes of this rank's shard: the fields of `numerics.Amax`, which `run` replaces by the reduced ones.

        `groups` has the process group name of each mesh axis that the step reduces over.
        """
        self.parts.append((amaxes, step, groups))
        self.rounds = max(self.rounds, len(step.shared))
        self._put(amaxes, step, groups, 0)

    def run(self) -> None:
        """Reduces all amaxes; collective, with the arrays added in the same order on every rank."""
        for turn in range(self.rounds):
            if turn:
                for part in self.parts:
                    self._put(*part, turn)
            for groups, entries in self.waiting.items():
                reduced = max_reduce_together([tensor for *_, tensor in entries], groups)
                for (amaxes, field, shared, _), tensor in zip(entries, reduced, strict=True):
                    amaxes[field] = tensor if shared is None else _put(amaxes[field], shared, tensor)
            self.waiting = {}

    def _put(self, amaxes: list[Any], step: Quantization, groups: Mapping[str, str], turn: int) -> None:
        if turn < len(step.shared):
            shared = step.shared[turn]
            for field in step.block_fields:
                self._wait(shared.axes, groups, (amaxes, field, shared, _taken(amaxes[field], shared)))
        if turn == 0 and step.amax_axes:
            field = step.tensor_field
            self._wait(step.amax_axes, groups, (amaxes, field, None, amaxes[field]))

    def _wait(self, axes: tuple[str, ...], groups: Mapping[str, str], entry: Entry) -> None:
        self.waiting.setdefault(tuple([groups[axis] for axis in axes]), []).append(entry)


def _taken(amaxes: Tensor, shared: SharedBlocks) -> Tensor:
    """Returns the amaxes of shared blocks, with zeros for blocks that only other ranks hold."""
    entries, end = [], 0
    for number, index in (*shared.held, (shared.count, None)):
        if number > end:
            shape = list(amaxes.shape)
            shape[shared.dim] = number - end
            entries.append(amaxes.new_zeros(shape))
        if index is not None:
            entries.append(amaxes.narrow(shared.dim, index, 1))
        end = number + 1
    return torch.cat(entries, shared.dim)


def _put(amaxes: Tensor, shared: SharedBlocks, entries: Tensor) -> Tensor:
    amaxes = amaxes.clone()
    for number, index in shared.held:
        amaxes.select(shared.dim, index).copy_(entries.select(shared.dim, number))
    return amaxes
