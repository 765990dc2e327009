"""The custom op that quantizes an operand of a matrix product: rowwise, columnwise, or both from one read.

    blockfp::quantize_operand   (x, row, column, amax, multiplier, row_key, column_key, rotate, eps)
                                -> [row parts .., column parts .., amax where a multiplier is given]

Columnwise is rowwise of x transposed, so scales run along the rows of x and codes lie transposed. Parts are codes, scales and,
for formats of two levels, tensor_scale. `row` and `column` are names of formats, None where the direction isn't wanted. The
scales are those of the definition, but that they are NaN where x holds an Inf (`overflow`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition import numerics
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format

from . import cuda, kernels
from .kernels import kernels_for
from .library import define, empty_parts, fake, impl
from .overflow import mark

_op = define(
    "quantize_operand(Tensor x, str? row, str? column, Tensor? amax=None, Tensor? multiplier=None, Tensor? row_key=None, "
    "Tensor? column_key=None, bool rotate=False, float eps=0.0) -> Tensor[]"
)


class Directions(NamedTuple):
    """Parts of an operand in each direction, empty where it was not asked for; and its amax, int32 [1], or None."""

    row: list[Tensor]
    column: list[Tensor]
    amax: Tensor | None


def quantize_operand(
    x: Tensor,
    row: Format | None,
    column: Format | None,
    *,
    amax: Tensor | None = None,
    multiplier: Tensor | None = None,
    row_key: Tensor | None = None,
    column_key: Tensor | None = None,
    rotate: bool = False,
    eps: float = 0.0,
) -> Directions:
    """Quantizes a matrix along its rows, its columns, or both.

    Args:
        x: [rows, columns], float32, float16 or bfloat16.
        row, column: formats, or None.
        amax: int32 [1], fp32 bits of the largest magnitude, where it is known: formats with one scale per tensor take their
            scale from it, and all formats whether x overflows.
        multiplier: float32 of one element, instead of an amax: delayed scaling. The amax of x is returned then.
        row_key, column_key: two words each as int32 [2], for stochastic rounding.
        rotate: the random Hadamard transform before the columnwise direction.
        eps: lifts amaxes, as for `numerics.quantize`, of formats where it has a meaning.
    """
    names = [None if format is None else format.name for format in (row, column)]
    parts = _op(x, *names, amax, multiplier, row_key, column_key, rotate, eps)
    recorded = None
    if multiplier is not None:
        parts, recorded = parts[:-1], parts[-1]
    if row is None or column is None:
        return Directions(parts if column is None else [], parts if row is None else [], recorded)
    first = part_count(row)
    return Directions(parts[:first], parts[first:], recorded)


def part_count(format: Format) -> int:
    """Counts the tensors that a format is stored in."""
    return 3 if format.scale.two_level else 2


def tensor_amax(x: Tensor) -> Tensor:
    """Largest magnitude of x, NaN ignored, as int32 [1] of fp32 bits, in plain torch operations.

    For compiled code, where it is fused with what makes x. It looks at the bits of x's own dtype: a comparison of floats might
    see values that were not yet rounded to it.
    """
    words = torch.int32 if x.dtype is torch.float32 else torch.int16
    magnitude = x.view(words) & torch.iinfo(words).max
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[x.dtype]
    largest = torch.where(magnitude > infinity, torch.zeros_like(magnitude), magnitude).amax()
    return largest.view(x.dtype).to(torch.float32).view(torch.int32).view(1)


@impl(_op)
def _quantize_operand(
    x, row, column, amax=None, multiplier=None, row_key=None, column_key=None, rotate=False, eps=0.0
) -> list[Tensor]:
    first, second = (None if name is None else Format.parse(name) for name in (row, column))
    if multiplier is not None and len({first, second} - {None}) != 1:
        raise ValueError(f"a given scale is for one format in both directions, got {row} rowwise and {column} columnwise")
    run = kernels_for(x)
    if run is cuda:
        return _in_one_read(x, first, second, amax, multiplier, row_key, column_key, rotate, eps)
    recorded: list[Tensor] = []
    if multiplier is None:
        results = _one_by_one(run, x, first, second, amax, row_key, column_key, rotate, eps)
    else:
        results = _multiplied(x, first, second, multiplier)
        amax = run.amax(x, first or second).blocks.reshape(1)
        recorded = [amax]
    directions = _unshared(results)
    mark(x, directions, amax)
    return [*(part for _, parts in directions for part in parts), *recorded]


@fake(_op)
def _quantize_operand_fake(
    x, row, column, amax=None, multiplier=None, row_key=None, column_key=None, rotate=False, eps=0.0
) -> list[Tensor]:
    directions = ((row, x.shape), (column, (x.shape[1], x.shape[0])))
    parts = [part for name, shape in directions if name is not None for part in empty_parts(x, shape, Format.parse(name))]
    return parts if multiplier is None else [*parts, x.new_empty((1,), dtype=torch.int32)]


def _one_by_one(run, x: Tensor, row, column, amax, row_key, column_key, rotate, eps) -> list[tuple[Format, Quantized]]:
    """Quantizes one direction after the other, by the definition or the CPU kernels."""
    results = []
    given = None if amax is None or not (row or column).per_tensor else Amax(amax.reshape(1, 1), None, None)
    if row is not None:
        results.append((row, run.quantize(x, row, key=row_key, eps=eps_for(row, eps), amax=given)))
    if column is not None:
        if row is not None and column is row and row.square and row_key is column_key is None and not rotate:
            found = results[0][1]
            codes, scales = kernels.transpose(found.codes, found.scales, row, columns=x.shape[-1])
            results.append((column, Quantized(codes, scales, found.tensor_scale)))
        else:
            turned = kernels.rotate(x.mT) if rotate else x.mT
            results.append((column, run.quantize(turned, column, key=column_key, eps=eps_for(column, eps), amax=given)))
    return results


def _multiplied(x: Tensor, row: Format | None, column: Format | None, multiplier: Tensor) -> list[tuple[Format, Quantized]]:
    """Quantizes both directions with a given multiplier, by the definition."""
    format = row or column
    assert format is not None
    quantized = numerics.quantize(x, format, multiplier=multiplier)
    turned = quantized._replace(codes=quantized.codes.mT)
    return [(format, result) for result, wanted in ((quantized, row), (turned, column)) if wanted is not None]


def _unshared(results: list[tuple[Format, Quantized]]) -> list[tuple[Format, list[Tensor]]]:
    """Makes each direction's parts outputs of an op, none of which may share memory with another."""
    directions: list[tuple[Format, list[Tensor]]] = []
    taken: set[int] = set()
    for format, result in results:
        parts = []
        for part in result:
            if part is not None:
                shared = part.untyped_storage().data_ptr() in taken
                part = part.clone(memory_format=torch.contiguous_format) if shared else part.contiguous()
                taken.add(part.untyped_storage().data_ptr())
                parts.append(part)
        directions.append((format, parts))
    return directions


def _in_one_read(
    x: Tensor, first: Format | None, second: Format | None, amax, multiplier, row_key, column_key, rotate, eps
) -> list[Tensor]:
    """Quantizes both directions by the CUDA kernels: from one read of x where they share a format."""
    # Gradients of sums come as expanded scalars.
    x = x if x.stride(-1) == 1 else x.contiguous()
    format = first or second
    assert format is not None
    if multiplier is not None or (amax is not None and format.per_tensor):
        both, largest = cuda.quantize_scaled(
            x,
            format,
            amax=amax,
            multiplier=multiplier,
            rows=first is not None,
            columns=second is not None,
            eps=eps_for(format, eps),
        )
        parts = _written(both.row, both.column)
        mark(x, _directions(first, second, parts), amax if largest is None else largest)
        return parts if largest is None else [*parts, largest]
    if first is not None and first is second and (row_key is None) == (column_key is None):
        key = None if row_key is None or column_key is None else torch.cat([row_key, column_key])
        both = cuda.quantize_both(x, first, key=key, eps=eps_for(first, eps), rotate=rotate)
        parts = _written(both.row, both.column)
        mark(x, _directions(first, second, parts), _plain(amax, both))
        return parts
    parts = []
    if first is not None:
        both = cuda.quantize_both(x, first, key=row_key, eps=eps_for(first, eps), columns=False)
        parts = _written(both.row)
        amax = _plain(amax, both)
        mark(x, [(first, parts)], amax)
    if second is not None:
        both = cuda.quantize_both(x, second, key=_second(column_key), eps=eps_for(second, eps), rotate=rotate, rows=False)
        turned = _written(both.column)
        mark(x, [(second, turned)], _plain(amax, both))
        parts += turned
    return parts


def _directions(row: Format | None, column: Format | None, parts: list[Tensor]) -> list[tuple[Format, list[Tensor]]]:
    """Pairs each direction's format with its parts."""
    count = len(parts) if row is None or column is None else part_count(row)
    directions = ((row, parts[:count]), (column, parts[count:] or parts))
    return [(format, own) for format, own in directions if format is not None]


def _plain(amax: Tensor | None, both: cuda.Both) -> Tensor | None:
    """The amax of x itself, if it was given or measured."""
    return both.amax[:1] if amax is None and both.amax is not None else amax


def _written(*results: Quantized) -> list[Tensor]:
    """Lists what kernels wrote as outputs of an op: only the scale of the whole tensor may belong to both directions."""
    parts: list[Tensor] = []
    for codes, scales, tensor_scale in results:
        if codes is not None:
            parts += (codes, scales)
            if tensor_scale is not None:
                parts.append(tensor_scale.clone() if len(parts) > 2 else tensor_scale)
    return parts


def _second(key: Tensor | None) -> Tensor | None:
    """Puts the key where the kernel reads the transposed direction's."""
    return None if key is None else torch.cat([key, key])
