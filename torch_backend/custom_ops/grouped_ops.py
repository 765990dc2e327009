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
from blockfp.definition.numerics import Quantized
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.once import once
from blockfp.kernels.routes import why_groups_apart
from blockfp.recipes import HIGH_PRECISION, Cast

from . import cuda, cuda_groups
from .grouped_products import (
    columns_come_aligned,
    multiply_columns,
    multiply_rows,
    rows_come_aligned,
    why_apart,
    why_columns_apart,
)
from .kernels import kernels_for
from .library import define, fake, impl
from .linear_ops import recipe_of
from .operand_ops import Directions, quantize_operand
from .products import Matrix, multiply_parts
from .quantize_plans import NEITHER, Aligned, part_count

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
def forward_now(x, weight, scales, tensor_scale, offs, bias, multiplier, casts, keep) -> list[Tensor]:
    """Does what the op `forward` does, outside of a graph."""
    recipe = recipe_of(casts)
    row, column = recipe.input, recipe.input_columnwise if keep else HIGH_PRECISION
    w, fast = _weight(weight, scales, tensor_scale, recipe.weight.format), "forward" in recipe.fast_accum
    (tokens, k), n, count = x.shape, weight.shape[-2], offs.shape[0]
    reason = why_apart(x, n, row.format, w.format, exact=recipe.exact_products, transposed=False)
    reason = reason or why_groups_apart(column.format, "column", rotate=column.rotate)
    if _on_device(x, reason):
        words, exact = cuda_groups.group_rows(offs, tokens), recipe.exact_products
        aligned = (rows_come_aligned(x.device, row.format, w.format, exact, False), False)
        found = quantized_at_once(x, words, count, row, column, multiplier, None, recipe.eps, aligned)
        y = multiply_rows(_rows(x, found.row, row, aligned[0]), w, words, count, n, k, bias, x.dtype, exact)
        return [y, words, *(found.column or []), *_present(found.amaxes)]
    ends = offs.tolist()
    if x.is_cpu and any(end < before for before, end in pairwise([0, *ends, tokens])):
        raise ValueError(f"offs must ascend to at most the {tokens} rows of x, got {ends}")
    y, each, amaxes = x.new_zeros((tokens, n)), [], []
    for number, group in enumerate(groups.groups_of(ends, tokens)):
        rows = x[group.begin : group.end]
        found = _quantized(rows, row, column, multiplier, None, recipe.eps)
        own = None if bias is None else bias[number]
        options = (n, k, own, x.dtype, fast, number, recipe.exact_products)
        y[group.begin : group.end] = multiply_parts(_rows(rows, found.row, row), w, *options)
        each.append(found.column)
        amaxes += _present(found.amax)
    kept = [] if column.format is None else _laid_out(each, x, ends, column.format, recipe.eps)
    return [y, _words(offs, ends, tokens), *kept, *_stacked(amaxes, multiplier, offs)]


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
        found = quantized_at_once(x, words, count, HIGH_PRECISION, cast, multiplier, None, recipe.eps)
        return [*(found.column or []), *_present(found.amaxes)]
    ends, each, amaxes = words[:count].tolist(), [], []
    for group in groups.groups_of(ends, x.shape[0]):
        made = _quantized(x[group.begin : group.end], HIGH_PRECISION, cast, multiplier, None, recipe.eps)
        each.append(made.column)
        amaxes += _present(made.amax)
    return [*_laid_out(each, x, ends, cast.format, recipe.eps), *_stacked(amaxes, multiplier, words)]


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
    gradient, words, x, weight, scales, tensor_scale, multiplier, keys, casts, count, k, needs_x, weight_dtype, bias_dtype
) -> list[Tensor]:
    """Does what the op `backward` does, outside of a graph."""
    recipe, (tokens, n), dtype = recipe_of(casts), gradient.shape, gradient.dtype
    row = recipe.gradient if needs_x else HIGH_PRECISION
    column = HIGH_PRECISION if weight_dtype is None else recipe.gradient_columnwise
    kept_as, again = recipe.input_columnwise.format, recipe.weight_columnwise.format
    fast = {product: product in recipe.fast_accum for product in ("dgrad", "wgrad")}
    exact, w, reason = recipe.exact_products, Matrix([], None), None
    if needs_x:
        if scales is None and recipe.weight.format is not None:
            # The forward's codes of it were not kept beside it.
            weight, scales, tensor_scale = [*quantize_operand(weight, recipe.weight.format, None, eps=0.0).row, None][:3]
        w = _weight(weight, scales, tensor_scale, recipe.weight.format)._replace(transposed=True)
        reason = why_apart(gradient, k, row.format, w.format, exact=exact, transposed=True, again=again)
    if reason is None and weight_dtype is not None:
        reason = why_columns_apart(gradient, column.format, kept_as, k, weight_dtype, exact=exact)
        reason = reason or why_groups_apart(column.format, "column", rotate=column.rotate)
    if _on_device(gradient, reason):
        results = []
        aligned = (
            needs_x and rows_come_aligned(gradient.device, row.format, w.format, exact, True),
            columns_come_aligned(gradient.device, column.format, kept_as, exact),
        )
        found = quantized_at_once(gradient, words, count, row, column, multiplier, keys, recipe.eps, aligned)
        if needs_x:
            a = _rows(gradient, found.row, row, aligned[0])
            results.append(multiply_rows(a, w, words, count, k, n, None, dtype, exact))
        if weight_dtype is not None:
            a, b = _rows(gradient, found.column, column, aligned[1]), Matrix(x, kept_as)
            results.append(multiply_columns(a, b, words, count, n, k, weight_dtype, exact))
        if bias_dtype is not None:
            results.append(cuda_groups.sum_groups(gradient, words, count).to(bias_dtype))
        return [*results, *_present(found.amaxes)]
    ends = words[:count].tolist()
    inputs = group_operands(x, kept_as, ends, tokens, k)
    d_x = gradient.new_zeros((tokens, k)) if needs_x else None
    d_weight = None if weight_dtype is None else gradient.new_empty((count, n, k), dtype=weight_dtype)
    d_bias = None if bias_dtype is None else gradient.new_empty((count, n), dtype=bias_dtype)
    amaxes = []
    for number, group in enumerate(groups.groups_of(ends, tokens)):
        rows = gradient[group.begin : group.end]
        found = _quantized(rows, row, column, multiplier, None if keys is None else keys[number], recipe.eps)
        amaxes += _present(found.amax)
        if d_weight is not None:
            a = Matrix([rows.mT], None) if column.format is None else Matrix(found.column, column.format)
            options = (k, group.rows, None, d_weight.dtype, fast["wgrad"], None, recipe.exact_products)
            d_weight[number] = multiply_parts(a, inputs[number], *options)
        if d_x is not None:
            one, index = w, number
            if w.format is None and again is not None:
                # A weight whose rowwise operand is in high precision has no codes yet.
                one, index = Matrix(quantize_operand(weight[number], None, again, eps=0.0).column, again), None
            a = _rows(rows, found.row, row)
            options = (k, n, None, dtype, fast["dgrad"], index, recipe.exact_products)
            d_x[group.begin : group.end] = multiply_parts(a, one, *options)
        if d_bias is not None:
            d_bias[number] = rows.sum(0).to(bias_dtype)
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


# ---- all groups at once


def quantized_at_once(
    x: Tensor,
    words: Tensor,
    count: int,
    row: Cast,
    column: Cast,
    multiplier: Tensor | None,
    keys: Tensor | None,
    eps: float,
    aligned: Aligned = NEITHER,
) -> cuda_groups.GroupedParts:
    """The parts of all groups in both directions, None for one without a format; `words` says where the groups lie."""
    if row.format is None and column.format is None:
        return cuda_groups.GroupedParts(None, None, None)
    return cuda_groups.quantize_groups(
        x,
        words,
        count,
        row.format,
        column.format,
        keys=keys,
        row_keyed=keys is not None and row.stochastic,
        column_keyed=keys is not None and column.stochastic,
        rotate=column.rotate,
        eps=eps,
        multiplier=multiplier,
        aligned=aligned,
    )


def _rows(x: Tensor, parts: list[Tensor] | None, cast: Cast, aligned: bool = False) -> Matrix:
    """An operand by its parts, or by its values where the cast has no format."""
    return Matrix([x], None) if cast.format is None else Matrix(parts or [], cast.format, aligned=aligned)


# ---- one group after another


def _quantized(rows: Tensor, row: Cast, column: Cast, multiplier: Tensor | None, keys: Tensor | None, eps: float) -> Directions:
    if row.format is None and column.format is None:
        return Directions([], [], None)
    return quantize_operand(
        rows,
        row.format,
        column.format,
        multiplier=multiplier,
        row_key=keys[0] if keys is not None and row.stochastic else None,
        column_key=keys[1] if keys is not None and column.stochastic else None,
        rotate=column.rotate,
        eps=eps,
    )


def _words(offs: Tensor, ends: Sequence[int], tokens: int) -> Tensor:
    """Computes the outputs of `group_rows`, without the table that kernels read."""
    where = list(groups.groups_of(ends, tokens))
    words = offs.new_zeros(groups.words_for(tokens, len(ends)))
    found = [group.end for group in where] + [group.end_column for group in where]
    words[: len(found)] = torch.tensor(found, dtype=torch.int32, device=offs.device)
    return words


def _laid_out(each: Sequence[Sequence[Tensor]], x: Tensor, ends: Sequence[int], format: Format, eps: float) -> list[Tensor]:
    found = groups.lay_out([_parts_of(parts) for parts in each], x, ends, format, columnwise=True, eps=eps_for(format, eps))
    return [part for part in found if part is not None]


def _parts_of(parts: Sequence[Tensor]) -> Quantized:
    return Quantized(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def group_operands(x: Sequence[Tensor], format: Format | None, ends: Sequence[int], tokens: int, features: int) -> list[Matrix]:
    """Lists each group's operand [features, rows], from what the forward kept of x: its columnwise parts, or x itself.

    Args:
        x: the parts; x where it has no format; empty where nothing was kept.
        format: of the parts.
        ends: of the groups.
        tokens, features: lengths of x.
    """
    if not x:
        return []
    if format is None:
        return [Matrix([x[0][group.begin : group.end].mT], None) for group in groups.groups_of(ends, tokens)]
    each = groups.group_parts(_parts_of(x), ends, tokens, features, format, columnwise=True)
    return [Matrix([part.contiguous() for part in parts if part is not None], format) for parts in each]


def _stacked(amaxes: Sequence[Tensor], multiplier: Tensor | None, words: Tensor) -> list[Tensor]:
    if multiplier is None:
        return []
    return [torch.cat([amax.view(1) for amax in amaxes]) if amaxes else words.new_empty(0)]


def _present(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]
