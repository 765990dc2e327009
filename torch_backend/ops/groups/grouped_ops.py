"""The custom ops of a linear layer whose rows are sorted by group, each group with a weight of its own.

    blockfp::grouped_forward    (x, weight, .., offs, casts, keep) -> [y, words, columnwise parts of x .., amaxes?]
    blockfp::grouped_columns    (x, words, multiplier, casts, groups) -> [columnwise parts of x .., amaxes?]
    blockfp::grouped_backward   (gradient, words, x, weight, .., casts, ..) -> [d_x?, d_weight?, d_bias?, amaxes?]

A group is a tensor of its own (`definition.groups`). Its end is in device memory: on a GPU nothing waits for it. `words` say
where groups lie. Operands lie in one array each. A weight [groups, n, k] comes as codes, scales and maybe tensor scale; as one
`QuantizedTensor`, which the op table takes apart; or as values. `casts` is a `Recipe.text`. The amaxes
of the groups are there where a multiplier is given.

On a CPU groups are quantized and multiplied one after another. So they are on a GPU where `grouped_products` has no product of
all groups; then the host waits for the ends, and a warning says so, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blockfp.definition import groups
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast, given_of, operand_cast
from blockfp.kernels.routes import why_groups_apart
from blockfp.kernels.switch import once
from blockfp.recipes import HIGH_PRECISION

from .. import cuda
from ..kernels import kernels_for
from ..layer.linear_ops import recipe_of
from ..library import define, fake, impl
from ..product.products import Matrix, multiply_parts
from ..quantize.operand_ops import quantize_operand
from ..quantize.quantize_plans import part_count
from . import cuda_groups
from .group_operands import (
    Codes,
    Note,
    group_operands,
    laid_out,
    operands,
    operands_at_once,
    quantized,
    words_of,
)
from .grouped_products import (
    columns_come_aligned,
    multiply_columns,
    multiply_rows,
    rows_come_aligned,
    why_apart,
    why_columns_apart,
)

forward = define(
    "grouped_forward(Tensor x, Tensor weight, Tensor? scales, Tensor? tensor_scale, Tensor offs, Tensor? bias, "
    "Tensor? multiplier, str casts, bool keep) -> Tensor[]"
)
columns = define("grouped_columns(Tensor x, Tensor words, Tensor? multiplier, str casts, SymInt groups) -> Tensor[]")
backward = define(
    "grouped_backward(Tensor gradient, Tensor words, Tensor[] x, Tensor? weight, Tensor? scales, Tensor? tensor_scale, "
    "Tensor? multiplier, Tensor? keys, str casts, SymInt groups, SymInt columns, bool needs_x, ScalarType? weight_dtype, "
    "ScalarType? bias_dtype) -> Tensor[]"
)


def _weight(weight: Tensor, scales: Tensor | None, tensor_scale: Tensor | None, format: Format | None) -> Matrix:
    parts = [part for part in (weight, scales, tensor_scale) if part is not None]
    return Matrix(parts, None if scales is None else format)


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
def forward_now(
    x: Any,
    weight: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    offs: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    casts: str,
    keep: bool,
    *,
    ends: Sequence[int] | None = None,
    note: Note | None = None,
) -> list[Tensor]:
    """Does what the op `forward` does, outside of a graph; of rows that come as codes nothing is kept.

    Args:
        x: values, or `Codes`; the others are the op's.
        ends: `offs`, if the host knows them.
        note: is given each group's rows and its operands, which are quantized one after another then.
    """
    recipe, coded = recipe_of(casts), isinstance(x, Codes)
    row, again = recipe.input, recipe.input_columnwise if keep else HIGH_PRECISION
    column = HIGH_PRECISION if coded else again
    w, fast = _weight(weight, scales, tensor_scale, recipe.weight.format), "forward" in recipe.fast_accum
    (tokens, k), n, count, eps, exact = x.shape, weight.shape[-2], offs.shape[0], recipe.eps, recipe.exactness
    like = x.parts[0] if coded else x
    reason = why_apart(x, n, row.format, w.format, exact=exact, transposed=False) or why_groups_apart(
        again.format, "column", rotate=again.rotate
    )
    if note is None and _on_device(like, reason):
        words = cuda_groups.group_rows(offs, tokens)
        aligned = (not coded and rows_come_aligned(x.device, row.format, w.format, exact, False), False)
        rows, columns, amaxes = operands_at_once(x, words, count, row, column, multiplier, None, eps, aligned)
        y = multiply_rows(rows, w, words, count, n, k, bias, x.dtype, exact)
        return [y, words, *([] if column.format is None else columns.parts), *_present(amaxes)]
    ends = offs.tolist() if ends is None else ends
    if like.is_cpu and any(end < before for before, end in pairwise([0, *ends, tokens])):
        raise ValueError(f"offs must ascend to at most the {tokens} rows of x, got {ends}")
    y, each, amaxes = like.new_zeros((tokens, n), dtype=x.dtype), [], []
    for number, group in enumerate(groups.groups_of(ends, tokens)):
        rows, columns, amax = operands(x, group.begin, group.end, row, column, multiplier, None, eps, note)
        own = None if bias is None else bias[number]
        y[group.begin : group.end] = multiply_parts(rows, w, n, k, own, x.dtype, fast, number, exact)
        each.append(columns.parts)
        amaxes += _present(amax)
    kept = [] if column.format is None else laid_out(each, x, ends, column.format, eps)
    return [y, words_of(offs, ends, tokens), *kept, *_stacked(amaxes, multiplier, offs)]


@fake(forward)
def _forward_fake(x, weight, scales, tensor_scale, offs, bias, multiplier, casts, keep) -> list[Tensor]:
    count, format = offs.shape[0], recipe_of(casts).input_columnwise.format
    kept = _empty_columns(x, count, format) if keep and format is not None else []
    y, words = x.new_empty((x.shape[0], weight.shape[-2])), offs.new_empty(groups.words_for(x.shape[0], count))
    return [y, words, *kept, *([] if multiplier is None else [offs.new_empty(count)])]


def _empty_columns(x: Tensor, count: int, format: Format) -> list[Tensor]:
    found: Any = groups.shapes(x.shape, count, format, columnwise=True)
    return [x.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in found]


@impl(columns)
def _columns(x, words, multiplier, casts, count) -> list[Tensor]:
    recipe = recipe_of(casts)
    cast = recipe.input_columnwise
    assert cast.format is not None
    if _on_device(x, why_groups_apart(cast.format, "column", rotate=cast.rotate)):
        how = operand_cast(None, cast, recipe.eps, given=given_of(None, multiplier))
        found = cuda_groups.quantize_groups(x, words, count, how, multiplier=multiplier)
        return [*(found.column or []), *_present(found.amaxes)]
    ends, each, amaxes = words[:count].tolist(), [], []
    for group in groups.groups_of(ends, x.shape[0]):
        made = quantized(x[group.begin : group.end], HIGH_PRECISION, cast, multiplier, None, recipe.eps)
        each.append(made.column)
        amaxes += _present(made.amax)
    return [*laid_out(each, x, ends, cast.format, recipe.eps), *_stacked(amaxes, multiplier, words)]


@fake(columns)
def _columns_fake(x, words, multiplier, casts, count) -> list[Tensor]:
    format = recipe_of(casts).input_columnwise.format
    assert format is not None
    parts = _empty_columns(x, count, format)
    return [*parts, *([] if multiplier is None else [words.new_empty(count)])]


def forward_apart(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    offs: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    casts: str,
    keep: bool,
    *,
    again: Tensor,
) -> list[Tensor]:
    """Does what the op `grouped_forward` does, in two ops: that, and one which makes x columnwise of `again`, x once more."""
    recipe = recipe_of(casts)
    scaled = multiplier if recipe.input.format is not None else None
    y, words, *recorded = forward(x, weight, scales, tensor_scale, offs, bias, scaled, casts, False)
    format = recipe.input_columnwise.format
    if not keep or format is None:
        return [y, words, *recorded]
    made = columns(again, words, multiplier, casts, offs.shape[0])
    return [y, words, *made[: part_count(format)], *(recorded or made[part_count(format) :])]


# ---- backward


@impl(backward)
def backward_now(
    gradient: Any,
    words: Tensor,
    x: Any,
    weight: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    casts: str,
    count: int,
    k: int,
    needs_x: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    ends: Sequence[int] | None = None,
    note: Note | None = None,
) -> list[Tensor]:
    """Does what the op `backward` does, outside of a graph. Gradient and x may be `Codes`; see `forward_now`."""
    recipe, (tokens, n), dtype, coded = recipe_of(casts), gradient.shape, gradient.dtype, isinstance(gradient, Codes)
    row = recipe.gradient if needs_x else HIGH_PRECISION
    column = HIGH_PRECISION if weight_dtype is None else recipe.gradient_columnwise
    kept_as, again, eps = recipe.input_columnwise, recipe.weight_columnwise.format, recipe.eps
    fast = {product: product in recipe.fast_accum for product in ("dgrad", "wgrad")}
    exact, w, reason = recipe.exactness, Matrix([], None), None
    like = gradient.parts[0] if coded else gradient
    if needs_x:
        if scales is None and recipe.weight.format is not None:
            # The forward's codes of it were not kept beside it.
            weight, scales, tensor_scale = [*quantize_operand(weight, OperandCast(recipe.weight.format)).row, None][:3]
        w = _weight(weight, scales, tensor_scale, recipe.weight.format)._replace(transposed=True)
        reason = why_apart(gradient, k, row.format, w.format, exact=exact, transposed=True, again=again)
    if reason is None and weight_dtype is not None:
        reason = why_columns_apart(gradient, column.format, kept_as.format, k, weight_dtype, exact=exact)
        reason = reason or why_groups_apart(column.format, "column", rotate=column.rotate)
        if isinstance(x, Codes):
            reason = reason or why_groups_apart(kept_as.format, "column", rotate=kept_as.rotate)
    if note is None and _on_device(like, reason):
        results = []
        aligned = (
            not coded and needs_x and rows_come_aligned(gradient.device, row.format, w.format, exact, True),
            not coded and columns_come_aligned(gradient.device, column.format, kept_as.format, exact),
        )
        wanted = None if weight_dtype is None else column
        rows, columns, amaxes = operands_at_once(gradient, words, count, row, wanted, multiplier, keys, eps, aligned)
        if needs_x:
            results.append(multiply_rows(rows, w, words, count, k, n, None, dtype, exact))
        if weight_dtype is not None:
            coded_x = isinstance(x, Codes)
            b = x.columns_at_once(kept_as, words, count, eps, None) if coded_x else Matrix(x, kept_as.format)
            results.append(multiply_columns(columns, b, words, count, n, k, weight_dtype, exact))
        if bias_dtype is not None:
            values = gradient.values(dtype) if coded else gradient
            results.append(cuda_groups.sum_groups(values, words, count).to(bias_dtype))
        return [*results, *_present(amaxes)]
    ends = words[:count].tolist() if ends is None else ends
    inputs = [] if isinstance(x, Codes) else group_operands(x, kept_as.format, ends, tokens, k)
    d_x = like.new_zeros((tokens, k), dtype=dtype) if needs_x else None
    d_weight = None if weight_dtype is None else like.new_empty((count, n, k), dtype=weight_dtype)
    d_bias = None if bias_dtype is None else like.new_empty((count, n), dtype=bias_dtype)
    amaxes = []
    for number, group in enumerate(groups.groups_of(ends, tokens)):
        first, last = group.begin, group.end
        key = None if keys is None else keys[number]
        wanted = None if weight_dtype is None else column
        rows, columns, amax = operands(gradient, first, last, row, wanted, multiplier, key, eps, note)
        amaxes += _present(amax)
        if d_weight is not None:
            b = x.between(first, last).columnwise(kept_as, eps, None) if isinstance(x, Codes) else inputs[number]
            d_weight[number] = multiply_parts(columns, b, k, group.rows, None, d_weight.dtype, fast["wgrad"], None, exact)
        if d_x is not None:
            one, index = w, number
            if w.format is None and again is not None:
                # A weight whose rowwise operand is in high precision has no codes yet.
                one, index = Matrix(quantize_operand(weight[number], OperandCast(column=again)).column, again), None
            d_x[first:last] = multiply_parts(rows, one, k, n, None, dtype, fast["dgrad"], index, exact)
        if d_bias is not None:
            values = (
                gradient.between(first, last).values(torch.float32) if isinstance(gradient, Codes) else gradient[first:last]
            )
            d_bias[number] = values.sum(0).to(bias_dtype)
    return [*_present(d_x), *_present(d_weight), *_present(d_bias), *_stacked(amaxes, multiplier, words)]


@fake(backward)
def _backward_fake(
    gradient, words, x, weight, scales, tensor_scale, multiplier, keys, casts, count, k, needs_x, weight_dtype, bias_dtype
) -> list[Tensor]:
    tokens, n = gradient.shape
    results = [gradient.new_empty((tokens, k))] if needs_x else []
    results += [] if weight_dtype is None else [gradient.new_empty((count, n, k), dtype=weight_dtype)]
    results += [] if bias_dtype is None else [gradient.new_empty((count, n), dtype=bias_dtype)]
    return [*results, *([] if multiplier is None else [words.new_empty(count)])]


@register_flop_formula(torch.ops.blockfp.grouped_forward)
def _forward_flops(x, weight, *_, **__) -> int:
    """Counts what torch's counters count of the same product in high precision."""
    return 2 * x[0] * x[1] * weight[-2]


@register_flop_formula(torch.ops.blockfp.grouped_backward)
def _backward_flops(
    gradient, words, x, weight, scales, tensor_scale, multiplier, keys, casts, count, k, needs_x, weight_dtype, *_, **__
):
    """Counts what torch's counters count of the same products in high precision."""
    return 2 * gradient[0] * gradient[1] * k * (int(needs_x) + int(weight_dtype is not None))


def _stacked(amaxes: Sequence[Tensor], multiplier: Tensor | None, words: Tensor) -> list[Tensor]:
    if multiplier is None:
        return []
    return [torch.cat([amax.view(1) for amax in amaxes]) if amaxes else words.new_empty(0)]


def _present(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]
