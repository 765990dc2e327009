"""Plans by which a matrix is quantized rowwise, columnwise or both ways.

All that is static (shapes, strides, dtypes, formats, which kernels run) is worked out when a matrix is the first of its kind.
What is left for each call is memory for the results and the kernel, and on a CPU the mark of an Inf (`overflow`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import numerics, rotation
from blockfp.definition.checks import check_input
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels import calls, native, switch
from blockfp.kernels.operand_cast import OperandCast, cuda_rotates

from .. import cuda, kernels
from ..kernels import kernels_for
from ..library import name_of
from ..product.matrix import mark, marker
from .cuda_layouts import laid_behind, lay_plans
from .cuda_reader import Read, reader

_plans: dict[Any, Read] = switch.plans()


def quantize_matrix(
    x: Tensor, cast: OperandCast, amax: Tensor | None = None, multiplier: Tensor | None = None, keys: Tensor | None = None
) -> list[Tensor]:
    """Quantizes x [.., rows, columns] by the plan of its kind; `Read` says what is given and returned."""
    key = (cast, x.shape, x.stride(), x.dtype, x.device)
    run = _plans.get(key)
    if run is None:
        run = switch.kept(_plans, key, plan_of(x, cast))
    return run(x, amax, multiplier, keys)


def plan_of(x: Tensor, cast: OperandCast, *, one_scale: bool = False) -> Read:
    """Makes the plan for matrices that lie as x does; raises TypeError or ValueError where there is none.

    With `one_scale` both directions share the scale of the whole: no op's results may.
    """
    check_input(x)
    row, column = cast.row, cast.column
    if cast.given == "multiplier" and len({row, column} - {None}) != 1:
        raise ValueError(f"a given scale is for one format in both directions, got {row} rowwise and {column} columnwise")
    run = kernels_for(x)
    # The kernels choose between scales of 1x16 along the rows alone.
    chooses = column is not None and column.scale.four_over_six and not column.square
    if run is cuda and not chooses:
        return _cuda_plan(x, cast, one_scale)
    plan = _cpu_plan(x, cast) if run is native else _definition_plan(cast)
    return laid_behind(plan, lay_plans(x, cast, by_library=False)) if any(cast.laid) else plan


def part_count(format: Format) -> int:
    """Counts the tensors that a format is stored in."""
    return 3 if format.scale.two_level else 2


# ---- the CUDA kernels


def of_format(cast: OperandCast) -> OperandCast:
    """The cast as operands in its format take it: eps where it has a meaning, an amax where that makes the only scale."""
    format = cast.format
    given = cast.given if cast.given == "multiplier" or format.per_tensor else None
    return cast._replace(given=given, eps=eps_for(format, cast.eps))


def _cuda_plan(x: Tensor, cast: OperandCast, one_scale: bool = False) -> Read:
    """One call where both directions share a format and a way of rounding, otherwise one for each."""
    if cast.rotates and cast.column is not None and not cuda_rotates(cast.column):
        return _rotated_apart(x, cast)
    strided = x.stride(-1) != 1
    own = x.contiguous() if strided else x
    together = cast.row is not None and cast.column is cast.row and cast.random[0] == cast.random[1]
    wanted = (cast,) if together else [one for one in cast.directions if one.row is not None or one.column is not None]
    reads = [reader(own, of_format(one), one_scale=one_scale) for one in wanted]
    if len(reads) == 1 and not strided:
        return reads[0]

    def run(x: Tensor, amax: Tensor | None, multiplier: Tensor | None, keys: Tensor | None) -> list[Tensor]:
        # Gradients of sums come as expanded scalars.
        x = x.contiguous() if strided else x
        parts: list[Tensor] = []
        for read in reads:
            if multiplier is not None:
                # The amax that the direction before has recorded is the same one.
                del parts[-1:]
            parts += read(x, amax, multiplier, keys)
        return parts

    return run


def _rotated_apart(x: Tensor, cast: OperandCast) -> Read:
    """The columns of a format that the kernels don't rotate are rotated by array operations, and quantized as rows."""
    if cast.given == "multiplier":
        raise ValueError(f"a rotated operand in {cast.column} has another amax than the one that its scale was made of")
    row, column = cast.directions
    by_row = None if row.row is None else _cuda_plan(x, row)
    turned = OperandCast(column.column, None, None, (cast.random[1], False), eps=cast.eps, laid=(cast.laid[1], False))
    by_column = _cuda_plan(rotation.rotate(x.mT), turned)

    def run(x: Tensor, amax: Tensor | None, multiplier: Tensor | None, keys: Tensor | None) -> list[Tensor]:
        parts = [] if by_row is None else by_row(x, amax, None, keys)
        # A kernel takes the first of its keys for rows.
        own = None if keys is None else torch.stack([keys[1], keys[0]])
        return parts + by_column(rotation.rotate(x.mT), None, None, own)

    return run


# ---- the CPU kernels


def _cpu_plan(x: Tensor, cast: OperandCast) -> Read:
    """One direction after the other; square blocks that are rounded to nearest are turned instead."""
    library, dtype, row, column = native.library(), name_of(x.dtype), cast.row, cast.column
    contiguous, marked, size = x.is_contiguous(), x.numel() > 0, x.element_size()
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    turned = row if row is not None and column is row and row.square and not any(cast.random) and not cast.rotate else None
    planned = []
    for i, format in enumerate((row, column)):
        if format is None or (i and turned is not None):
            continue
        options = {"transposed": i == 1, "rotated": i == 1 and cast.rotate}
        call = calls.quantize_arrays(tuple(x.shape), dtype, format, eps_for(format, cast.eps), **options)
        made = [(part[0], getattr(torch, part[1])) for part in call.arrays.values() if part and part[0] != (0,)]
        given = cast.given == "multiplier" or (cast.given == "amax" and format.per_tensor)
        planned.append((made, given, cast.random[i], i, tuple(call.numbers.values())))
    empty, quantize, measure = partial(torch.empty, device="cpu"), library.quantize_arrays, library.amax
    mark_each = marker([format for format in (row, column) if format is not None], True)
    count = 0 if row is None else part_count(row)
    ends = [slice(0, count), slice(count, None)] if count and column is not None else [slice(None)]
    amax_numbers = tuple(calls.amax(tuple(x.shape), cast.format, function="cpu.amax", dtype=dtype).numbers.values())
    columns = x.shape[-1]

    # The plan knows which of amax, multiplier and keys are given.
    def run(x: Tensor, amax: Any, multiplier: Any, keys: Any) -> list[Tensor]:
        x = x.detach() if contiguous else x.contiguous()
        if x.is_neg():
            # torch's bit that says that memory holds the negated values, of parts of conjugated complex tensors.
            x = x.resolve_neg()
        if x.data_ptr() % size:
            x = x.clone()
        if multiplier is not None:
            amax = empty(1, dtype=torch.int32)
            measure(x, amax, None, None, *amax_numbers)
        parts: list[Tensor] = []
        for made, given, stochastic, i, numbers in planned:
            own = []
            for shape, dtype in made:
                own.append(empty(shape, dtype=dtype))
            known = (amax if multiplier is None else multiplier.detach()).view(1) if given else nothing
            key = keys[i] if stochastic else nothing
            quantize(x, known, key, own[0], own[1], own[2] if len(own) > 2 else nothing, *numbers)
            parts += own
        if turned is not None:
            codes, scales = kernels.transpose(parts[0], parts[1], turned, columns=columns)
            parts += [codes.clone(memory_format=torch.contiguous_format), scales.clone(), *(part.clone() for part in parts[2:])]
        if marked:
            mark_each(x, [parts[end] for end in ends], amax)
        return parts if multiplier is None else [*parts, amax]

    return run


# ---- the definition, and on a GPU formats that its kernels don't have


def _definition_plan(cast: OperandCast) -> Read:
    row, column, _, random, rotate, eps, _ = cast

    def run(x: Tensor, amax: Tensor | None, multiplier: Tensor | None, keys: Tensor | None) -> list[Tensor]:
        recorded: list[Tensor] = []
        x = x.resolve_neg()
        if multiplier is None:
            row_key, column_key = (keys[i] if keys is not None and random[i] else None for i in range(2))
            results = _one_by_one(x, row, column, amax, row_key, column_key, rotate, eps)
        else:
            results = _multiplied(x, row, column, multiplier)
            recorded = [numerics.amax(x, cast.format).blocks.reshape(1)]
            amax = recorded[0]
        directions = _unshared(results)
        mark(x, directions, amax)
        return [*(part for _, parts in directions for part in parts), *recorded]

    return run


def _one_by_one(x: Tensor, row, column, amax, row_key, column_key, rotate, eps) -> list[tuple[Format, Quantized]]:
    results, quantize = [], kernels_for(x).quantize
    given = None if amax is None else Amax(amax.reshape(1, 1), None, None)
    if row is not None:
        own = given if row.per_tensor else None
        results.append((row, quantize(x, row, key=row_key, eps=eps_for(row, eps), amax=own)))
    if column is not None:
        if row is not None and column is row and row.square and row_key is column_key is None and not rotate:
            found = results[0][1]
            codes, scales = numerics.transpose(found.codes, found.scales, row, columns=x.shape[-1])
            results.append((column, Quantized(codes, scales, found.tensor_scale)))
        else:
            turned = kernels.rotate(x.mT) if rotate else x.mT
            own = given if column.per_tensor else None
            results.append((column, quantize(turned, column, key=column_key, eps=eps_for(column, eps), amax=own)))
    return results


def _multiplied(x: Tensor, row: Format | None, column: Format | None, multiplier: Tensor) -> list[tuple[Format, Quantized]]:
    """Quantizes both directions with a given multiplier."""
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
