"""The custom ops of a linear layer whose rows are sorted by group, each group with a weight of its own.

    blockfp::grouped_forward    (x, weight, offs, ..) -> [y, words, columnwise parts of x .., amaxes where a multiplier is given]
    blockfp::grouped_backward   (gradient, words, kept, weight, ..) -> [of x, of the weight, of the bias, amaxes], those wanted

A group is a tensor of its own (`definition.groups`). Its end is in device memory: on a GPU nothing waits for it. `words` say
where groups lie. Operands lie in one array each; a weight is the list of its parts [groups, ..], or one `QuantizedTensor`, which
the op table takes apart.

On a CPU groups are quantized and multiplied one after another. So they are on a GPU where `grouped_products` has no product of
all groups; then the host waits for the ends, and a warning says so, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import groups
from blockfp.definition.numerics import Quantized
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format

from blockfp.kernels.once import once

from . import cuda, cuda_groups
from .grouped_products import multiply_columns, multiply_rows, why_apart, why_columns_apart
from .kernels import kernels_for
from .library import define, fake, impl
from .operand_ops import quantize_operand
from .products import Matrix, multiply_parts

forward = define(
    "grouped_forward(Tensor x, Tensor[] weight, str? weight_format, Tensor offs, Tensor? bias, SymInt n, str? row, str? column, "
    "bool rotate, float eps, Tensor? multiplier, bool fast_accum) -> Tensor[]"
)
backward = define(
    "grouped_backward(Tensor gradient, Tensor words, Tensor[] kept, str? kept_format, Tensor[] weight, str? weight_format, "
    "SymInt groups, SymInt k, str? row, str? column, str? weight_column, bool rotate, float eps, Tensor? multiplier, Tensor? keys, "
    "bool row_keyed, bool column_keyed, bool needs_x, ScalarType? weight_dtype, ScalarType? bias_dtype, bool fast_dgrad, "
    "bool fast_wgrad) -> Tensor[]"
)


def _parse(name: str | None) -> Format | None:
    return None if name is None else Format.parse(name)


def _on_device(x: Tensor, reason: str | None) -> bool:
    """Says whether the groups' ends stay on the device; warns where they could not."""
    if kernels_for(x) is not cuda:
        return False
    if reason is not None:
        _warn(reason)
    return reason is None


@once
def _warn(reason: str) -> None:
    warnings.warn(f"groups are multiplied one after another, and the host waits for their ends: {reason}", stacklevel=2)


# ---- forward


@impl(forward)
def _forward(x, weight, weight_format, offs, bias, n, row, column, rotate, eps, multiplier, fast_accum) -> list[Tensor]:
    first, second, w = _parse(row), _parse(column), Matrix(weight, _parse(weight_format))
    count = offs.shape[0]
    reason = why_apart(x, n, first, w.format, transposed=False)
    if reason is None and second is not None and second.block is not None and second.block[0] > 1:
        reason = f"columns in square blocks, {second}"
    if _on_device(x, reason):
        words = cuda_groups.group_rows(offs, x.shape[0])
        found = cuda_groups.GroupedParts(None, None, None)
        if first is not None or second is not None:
            found = cuda_groups.quantize_groups(x, words, count, first, second, rotate=rotate, eps=eps, multiplier=multiplier)
        a = Matrix([x] if found.row is None else found.row, first)
        y = multiply_rows(a, w, words, count, n, bias, x.dtype, fast_accum)
        return [y, words, *(found.column or []), *_present(found.amaxes)]
    ends = offs.tolist()
    words, where = _words(offs, ends, x.shape[0]), list(groups.groups_of(ends, x.shape[0]))
    y = x.new_zeros((x.shape[0], n))
    columns, amaxes = [], []
    for number, group in enumerate(where):
        rows = x[group.begin : group.end]
        a, column_parts, amax = _quantized(rows, first, second, None, None, rotate, eps, multiplier)
        own = None if bias is None else bias[number]
        y[group.begin : group.end] = multiply_parts(a, w, n, x.shape[1], own, x.dtype, fast_accum, number)
        columns.append(column_parts)
        amaxes.append(amax)
    kept = [] if second is None else _laid_out(columns, x, ends, second, eps)
    return [y, words, *kept, *_stacked(amaxes, multiplier, x)]


@fake(forward)
def _forward_fake(x, weight, weight_format, offs, bias, n, row, column, rotate, eps, multiplier, fast_accum) -> list[Tensor]:
    count = offs.shape[0]
    y, words = x.new_empty((x.shape[0], n)), offs.new_empty(groups.words_for(x.shape[0], count))
    second = _parse(column)
    kept = [] if second is None else _empty_columns(x, count, second)
    return [y, words, *kept, *([] if multiplier is None else [offs.new_empty(count)])]


# ---- backward


@impl(backward)
def _backward(
    gradient, words, kept, kept_format, weight, weight_format, count, k, row, column, weight_column, rotate, eps, multiplier,
    keys, row_keyed, column_keyed, needs_x, weight_dtype, bias_dtype, fast_dgrad, fast_wgrad,
) -> list[Tensor]:  # fmt: skip
    first, second = _parse(row), _parse(column)
    w, kept_as = Matrix(weight, _parse(weight_format), transposed=True), _parse(kept_format)
    dtype, n = gradient.dtype, gradient.shape[1]
    reason = why_apart(gradient, k, first, w.format, transposed=True, again=weight_column) if needs_x else None
    if reason is None and weight_dtype is not None:
        reason = why_columns_apart(gradient, second, kept_as, k, weight_dtype)
    if _on_device(gradient, reason):
        found = cuda_groups.GroupedParts(None, None, None)
        if first is not None or second is not None:
            options = {"row_keyed": row_keyed, "column_keyed": column_keyed, "rotate": rotate, "multiplier": multiplier}
            found = cuda_groups.quantize_groups(gradient, words, count, first, second, keys=keys, eps=eps, **options)
        results = []
        if needs_x:
            a = Matrix([gradient] if found.row is None else found.row, first)
            results.append(multiply_rows(a, w, words, count, k, None, dtype, fast_dgrad))
        if weight_dtype is not None:
            a = Matrix([gradient] if found.column is None else found.column, second)
            results.append(multiply_columns(a, Matrix(kept, kept_as), words, count, n, k, weight_dtype, fast_wgrad))
        if bias_dtype is not None:
            results.append(cuda_groups.sum_groups(gradient, words, count).to(bias_dtype))
        return [*results, *_present(found.amaxes)]
    tokens, ends = gradient.shape[0], words[:count].tolist()
    inputs = kept_parts(kept, kept_as, ends, tokens, k)
    d_x = gradient.new_zeros((tokens, k)) if needs_x else None
    d_weight = None if weight_dtype is None else gradient.new_empty((count, n, k), dtype=weight_dtype)
    d_bias = None if bias_dtype is None else gradient.new_empty((count, n), dtype=bias_dtype)
    amaxes = []
    for number, group in enumerate(groups.groups_of(ends, tokens)):
        rows = gradient[group.begin : group.end]
        own = keys[number] if keys is not None else None
        row_key, column_key = (own[i] if own is not None and keyed else None for i, keyed in enumerate((row_keyed, column_keyed)))
        a, columns, amax = _quantized(rows, first, second, row_key, column_key, rotate, eps, multiplier)
        amaxes.append(amax)
        if d_weight is not None:
            left = Matrix([rows.mT], None) if second is None else Matrix(columns, second)
            d_weight[number] = multiply_parts(left, inputs[number], k, group.rows, None, weight_dtype, fast_wgrad, None)
        if d_x is not None:
            one, index = w, number
            if w.format is None and weight_column is not None:
                # A weight whose rowwise operand is in high precision has no codes yet.
                one = Matrix(quantize_operand(weight[0][number], None, Format.parse(weight_column)).column, _parse(weight_column))
                index = None
            d_x[group.begin : group.end] = multiply_parts(a, one, k, n, None, dtype, fast_dgrad, index)
        if d_bias is not None:
            d_bias[number] = rows.sum(0).to(bias_dtype)
    return [*_present(d_x), *_present(d_weight), *_present(d_bias), *_stacked(amaxes, multiplier, gradient)]


@fake(backward)
def _backward_fake(
    gradient, words, kept, kept_format, weight, weight_format, count, k, row, column, weight_column, rotate, eps, multiplier,
    keys, row_keyed, column_keyed, needs_x, weight_dtype, bias_dtype, fast_dgrad, fast_wgrad,
) -> list[Tensor]:  # fmt: skip
    tokens, n = gradient.shape
    results = [gradient.new_empty((tokens, k))] if needs_x else []
    results += [] if weight_dtype is None else [gradient.new_empty((count, n, k), dtype=weight_dtype)]
    results += [] if bias_dtype is None else [gradient.new_empty((count, n), dtype=bias_dtype)]
    return [*results, *([] if multiplier is None else [words.new_empty(count)])]


# ---- one group after another


def _quantized(
    rows: Tensor, first, second, row_key, column_key, rotate: bool, eps: float, multiplier: Tensor | None
) -> tuple[Matrix, list[Tensor], Tensor | None]:
    """Quantizes one group; rowwise there are the values where that has no format."""
    if first is None and second is None:
        return Matrix([rows], None), [], None
    found = quantize_operand(
        rows, first, second, multiplier=multiplier, row_key=row_key, column_key=column_key, rotate=rotate, eps=eps
    )
    return Matrix([rows] if first is None else found.row, first), found.column, found.amax


def _words(offs: Tensor, ends: Sequence[int], tokens: int) -> Tensor:
    """What `group_rows` writes, without the tables that kernels read."""
    where = list(groups.groups_of(ends, tokens))
    words = offs.new_zeros(groups.words_for(tokens, len(ends)))
    found = [group.end for group in where] + [group.end_column for group in where]
    words[: len(found)] = torch.tensor(found, dtype=torch.int32)
    return words


def _laid_out(each: Sequence[Sequence[Tensor]], x: Tensor, ends: Sequence[int], format: Format, eps: float) -> list[Tensor]:
    quantized = [Quantized(*parts[:2], parts[2] if len(parts) > 2 else None) for parts in each]
    found = groups.lay_out(quantized, x, ends, format, columnwise=True, eps=eps_for(format, eps))
    return [part for part in found if part is not None]


def kept_parts(kept: Sequence[Tensor], format: Format | None, ends: Sequence[int], tokens: int, features: int) -> list[Matrix]:
    """Lists the columnwise operand of each group, [features, rows], from what the forward kept: parts, or x where it has none.

    Args:
        kept: the parts, or x.
        format: of the parts.
        ends: of the groups.
        tokens, features: lengths of x.
    """
    if not kept:
        return []
    if format is None:
        return [Matrix([kept[0][group.begin : group.end].mT], None) for group in groups.groups_of(ends, tokens)]
    whole = Quantized(*kept[:2], kept[2] if len(kept) > 2 else None)
    each = groups.group_parts(whole, ends, tokens, features, format, columnwise=True)
    return [Matrix([part.contiguous() for part in parts if part is not None], format) for parts in each]


def _stacked(amaxes: Sequence[Tensor | None], multiplier: Tensor | None, x: Tensor) -> list[Tensor]:
    if multiplier is None:
        return []
    found = [amax.view(()) for amax in amaxes if amax is not None]
    return [torch.stack(found) if found else x.new_empty(0, dtype=torch.int32)]


def _present(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _empty_columns(x: Tensor, count: int, format: Format) -> list[Tensor]:
    found: Any = groups.shapes(x.shape, count, format, columnwise=True)
    return [x.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in found]
