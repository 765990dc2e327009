"""Runs plans on lists of NumPy arrays, one per rank; tests compare other executors with it.

Ranks communicate only through `max_reduce` and `all_gather`, which reject what a real collective would reject. Everything else
depends on one rank's data and the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..definition import four_over_six, numerics
from ..definition.bits import Array
from ..definition.layout import pack, swap_matrix, unpack
from ..definition.numerics import Amax, Quantized
from ..definition.rotation import rotate
from ..definition.rounding import Key, fold_in
from ..formats import Format
from .placement import Mesh, Sharding
from .reducing import check_reduce_format
from .steps import Dequantize, Gather, Join, Plan, Quantize, Rotate, Step, Straddle, Transpose


class Local(NamedTuple):
    """One rank's data: values, or codes and scales."""

    values: Array = None
    codes: Array = None
    scales: Array = None
    tensor_scale: Array = None


class _Options(NamedTuple):
    key: Key | None
    eps: float
    nominal: str


def shards(array: np.ndarray, sharding: Sharding) -> list[np.ndarray]:
    """Returns each rank's part of a global array.

    Raises:
        ValueError: the array doesn't have the sharding's shape.
    """
    if tuple(array.shape) != sharding.shape:
        raise ValueError(f"array must have the sharding's shape {sharding.shape}, got {tuple(array.shape)}")
    return [array[region.slices] for region in sharding.regions]


def run(
    plan: Plan,
    locals: Sequence[np.ndarray | Quantized],
    *,
    key: Key | None = None,
    eps: float = 0.0,
    nominal: str = "float32",
) -> list[Local]:
    """Runs a plan and returns the data of every rank.

    Args:
        plan: a plan of `sharding.plans`.
        locals: each rank's input, by rank: values, or codes and scales.
        key: for stochastic rounding; None rounds to nearest even. The plan must have been made with `stochastic`.
        eps: see `numerics.quantize`.
        nominal: name of the array's nominal dtype.

    Raises:
        ValueError: the number of entries differs from the number of ranks, or a shape doesn't match the placements.
    """
    if len(locals) != plan.source.mesh.size:
        raise ValueError(f"locals must hold one entry for each of {plan.source.mesh.size} ranks, got {len(locals)}")
    world = [Local(None, *x) if isinstance(x, Quantized) else Local(x) for x in locals]
    for rank, (local, region) in enumerate(zip(world, plan.source.regions, strict=True)):
        if local.values is not None and local.values.shape != region.shape:
            raise ValueError(f"locals[{rank}] must have shape {region.shape}, got {local.values.shape}")
    for step in plan.steps:
        world = _carry_out(step, world, _Options(key, eps, nominal))
    return world


def max_reduce(mesh: Mesh, axes: Sequence[str], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All-reduces arrays by maximum over mesh axes; returns the result of every rank."""
    return [np.maximum.reduce(_alike([arrays[r] for r in mesh.group(rank, axes)])) for rank in range(mesh.size)]


def all_gather(mesh: Mesh, axes: Sequence[str], arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """All-gathers arrays over mesh axes; returns for every rank the arrays of its group, in order."""
    return [_alike([arrays[r] for r in mesh.group(rank, axes)]) for rank in range(mesh.size)]


def reduce_scatter(
    terms: Sequence[np.ndarray],
    format: Format | str,
    *,
    key: Key | None = None,
    ranks: Sequence[int] | None = None,
    factor: float = 1.0,
) -> list[np.ndarray]:
    """Quantizes each rank's array and sums them as described in `sharding.reducing`; returns every rank's part of the sum.

    Args:
        terms: one array per rank, all of one shape; the sum is cut along axis 0.
        format: a format in blocks of one row. One-axis arrays are summed unquantized.
        key: for stochastic rounding, equal on all ranks; None rounds to nearest even.
        ranks: the numbers folded into the key; 0, 1, .. by default.
        factor: divides the sum, as a multiplication by the fp32 reciprocal. The number of ranks gives a mean.

    Returns:
        The parts, float32; the last ones may be short or empty.
    """
    format = check_reduce_format(format, "format")
    total = None
    for rank, term in zip(range(len(terms)) if ranks is None else ranks, _alike(list(terms)), strict=True):
        values = term.astype(np.float32)
        if term.ndim > 1:
            finite = np.where(np.isinf(term), np.asarray(np.nan, term.dtype), term)
            q = numerics.quantize(finite, format, key=None if key is None else fold_in(key, rank))
            values = numerics.dequantize(*q, format, "float32", columns=term.shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):
            total = values if total is None else total + values
    assert total is not None
    total = total * np.float32(1 / factor) if factor != 1 else total
    chunk = -(-total.shape[0] // len(terms))
    return [total[rank * chunk : (rank + 1) * chunk] for rank in range(len(terms))]


def _alike(arrays: list[np.ndarray]) -> list[np.ndarray]:
    kinds = {(a.shape, a.dtype) for a in arrays}
    if len(kinds) > 1:
        raise ValueError(f"arrays of one collective must have one shape and dtype, got {', '.join(sorted(map(str, kinds)))}")
    return arrays


def _carry_out(step: Step, world: list[Local], options: _Options) -> list[Local]:
    match step:
        case Transpose():
            return [_transpose(step, local, rank) for rank, local in enumerate(world)]
        case Rotate():
            return [local._replace(values=rotate(local.values)) for local in world]
        case Quantize():
            return _quantize(step, world, options)
        case Dequantize():
            return [_dequantize(step, local, rank, options) for rank, local in enumerate(world)]
        case Gather():
            return _gather(step, world)


def _transpose(step: Transpose, local: Local, rank: int) -> Local:
    if step.format is None:
        return Local(swap_matrix(local.values))
    columns = step.sharding.region(rank).shape[-1]
    codes, scales = numerics.transpose(local.codes, local.scales, step.format, columns=columns)
    return local._replace(codes=codes, scales=scales)


def _quantize(step: Quantize, world: list[Local], options: _Options) -> list[Local]:
    format, sharding = step.format, step.sharding
    regions = sharding.regions
    amaxes = [numerics.amax(local.values, format, origin=region.origin) for local, region in zip(world, regions, strict=True)]
    if step.straddles and format.scale.four_over_six:
        members = [
            four_over_six.members(x.values, format, origin=region.origin) for x, region in zip(world, regions, strict=True)
        ]
        amaxes = [amax._replace(members=own) for amax, own in zip(amaxes, members, strict=True)]
    for straddle in step.straddles:
        amaxes = _reduce_straddling(step, straddle, amaxes)
    if step.amax_axes:
        field = "tensor" if format.scale.two_level else "blocks"
        whole = max_reduce(sharding.mesh, step.amax_axes, [getattr(amax, field) for amax in amaxes])
        amaxes = [amax._replace(**{field: largest}) for amax, largest in zip(amaxes, whole, strict=True)]
    quantized = [
        numerics.quantize(
            local.values,
            format,
            key=options.key,
            eps=options.eps,
            nominal=options.nominal,
            origin=region.origin,
            shape=(sharding.shape[-2], sharding.shape[-1]),
            amax=amax,
        )
        for local, region, amax in zip(world, regions, amaxes, strict=True)
    ]
    return [Local(None, *q) for q in quantized]


def _reduce_straddling(step: Quantize, straddle: Straddle, amaxes: list[Amax]) -> list[Amax]:
    """Reduces amaxes, NaN flags and members of blocks that span ranks along one axis."""
    mesh, regions = step.sharding.mesh, step.sharding.regions
    for field in ("blocks", "nan", "members"):
        parts = [getattr(amax, field) for amax in amaxes]
        if parts[0] is None:
            continue
        parts = [part.copy() for part in parts]
        held = [straddle.held(step.format, region) for region in regions]
        sent = []
        for part, own in zip(parts, held, strict=True):
            shape = list(part.shape)
            shape[straddle.dim] = len(straddle.blocks)
            sent.append(np.zeros(shape, part.dtype))
            for entry, index in own:
                np.moveaxis(sent[-1], straddle.dim, 0)[entry] = np.moveaxis(part, straddle.dim, 0)[index]
        received = max_reduce(mesh, straddle.axes, sent)
        for part, buffer, own in zip(parts, received, held, strict=True):
            for entry, index in own:
                np.moveaxis(part, straddle.dim, 0)[index] = np.moveaxis(buffer, straddle.dim, 0)[entry]
        amaxes = [amax._replace(**{field: part}) for amax, part in zip(amaxes, parts, strict=True)]
    return amaxes


def _dequantize(step: Dequantize, local: Local, rank: int, options: _Options) -> Local:
    region = step.sharding.region(rank)
    dtype = step.dtype or options.nominal
    values = numerics.dequantize(
        local.codes, local.scales, local.tensor_scale, step.format, dtype, columns=region.shape[-1], origin=region.origin
    )
    return Local(values)


def _gather(step: Gather, world: list[Local]) -> list[Local]:
    mesh, dim, ranks = step.sharding.mesh, step.dim, range(step.sharding.mesh.size)

    def gathered(arrays: Sequence[np.ndarray], joins: Sequence[Join]) -> list[list[np.ndarray]]:
        return all_gather(mesh, step.axes, [_pad(a, join.chunk, dim) for a, join in zip(arrays, joins, strict=True)])

    stored = [step.stored(rank) for rank in ranks]
    chunks = gathered([getattr(local, step.payload) for local in world], stored)
    if step.unpacks and step.format is not None:
        bits = step.format.element.bits
        joined = [_join_codes(chunks[rank], step.elements(rank), bits) for rank in ranks]
    else:
        joined = [_join(chunks[rank], stored[rank], dim) for rank in ranks]
    result = [Local(**{step.payload: array}) for array in joined]
    if step.format is None:
        return result
    joins = [step.scales(rank) for rank in ranks]
    chunks = gathered([local.scales for local in world], joins)
    result = [r._replace(scales=_join(chunks[rank], joins[rank], dim)) for rank, r in enumerate(result)]
    if step.format.scale.two_level:
        tensor = all_gather(mesh, step.axes, [local.tensor_scale for local in world])
        result = [r._replace(tensor_scale=tensor[rank][step.first(rank)]) for rank, r in enumerate(result)]
    return result


def _pad(array: np.ndarray, size: int, dim: int) -> np.ndarray:
    """Pads an array along one axis with garbage, so that tests notice a plan that reads padding."""
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, size - array.shape[dim])
    return np.pad(array, widths, constant_values=85)


def _join(chunks: list[np.ndarray], join: Join, dim: int) -> np.ndarray:
    return np.take(np.concatenate(chunks, axis=dim), join.index, axis=dim)


def _join_codes(chunks: list[np.ndarray], join: Join, bits: int) -> np.ndarray:
    """Joins packed codes along their last axis, where a chunk may end inside a byte."""
    return pack(_join([unpack(chunk, bits, join.chunk) for chunk in chunks], join, -1), bits)
