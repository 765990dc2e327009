"""The products of all experts at once, on a GPU, of operands that may be codes already; the host doesn't wait for the ends.

Where groups lie in one array is said by `definition.groups`. Which products there are is said by `grouped_products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockfp.definition import groups
from blockfp.definition.recoding import keeps_codes
from blockfp.formats import Format
from blockfp.kernels.calls import cuda_rotates
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe

from ..custom_ops import cuda, cuda_groups
from ..custom_ops.dequantize_plans import dequantize_parts
from ..custom_ops.grouped_ops import quantized_at_once
from ..custom_ops.grouped_products import (
    columns_come_aligned,
    multiply_columns,
    multiply_rows,
    rows_come_aligned,
    why_apart,
    why_columns_apart,
)
from ..custom_ops.kernels import kernels_for
from ..custom_ops.products import Matrix
from ..custom_ops.quantize_plans import Aligned
from ..quantized_tensor.tensor import QuantizedTensor
from .coded import values_of


def forward(
    x: Tensor, w: Matrix, bias: Tensor | None, offs: Tensor, outputs: int, recipe: Recipe, columnwise: Cast
) -> tuple[Tensor, Tensor, list[Tensor]] | None:
    """Returns y [rows, outputs], where the groups lie, and what is kept of x; None where they are multiplied one by one.

    Args:
        x: [rows, in], values or codes.
        w: [experts, out, in].
        bias: [experts, out], or None.
        offs: the end of each expert's rows, int32 [experts].
        outputs: of each expert.
        recipe: from `recipes.for_linear`.
        columnwise: the cast of what is kept of values.
    """
    exact = recipe.exact_products
    if columnwise.rotate and columnwise.format is not None and not cuda_rotates(columnwise.format):
        return None
    if not _here(x) or why_apart(x, outputs, recipe.input.format, w.format, exact=exact, transposed=False) is not None:
        return None
    count, w = len(offs), _apart(w)
    words = cuda_groups.group_rows(offs, x.shape[0])
    kept: list[Tensor] = []
    if isinstance(x, QuantizedTensor):
        row = _rows(x.parts, x.format, count)
    else:
        aligned = (rows_come_aligned(x.device, recipe.input.format, w.format, exact, False), False)
        row, column = _quantized(x, words, count, recipe.input, columnwise, recipe.eps, None, aligned)
        kept = list(column.parts) if column.format is not None else []
    return multiply_rows(row, w, words, count, outputs, x.shape[1], bias, x.dtype, exact), words, kept


def backward(
    gradient: Tensor,
    w: Matrix | None,
    x: Sequence[Tensor],
    coded: Format | None,
    words: Tensor,
    shape: Sequence[int],
    recipe: Recipe,
    keys: Tensor | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> list[Tensor | None] | None:
    """Returns the gradients of x, weight and bias; None where they are made one expert after another.

    Args:
        gradient: [rows, out], values or codes.
        w: the weight, or None where x wants no gradient.
        x: what was kept of it: its codes, its columnwise parts, or its values; the weight's gradient wants it.
        coded: the format of its codes, where these were kept.
        words: where groups lie.
        shape: of the weight, [experts, out, in].
        recipe: from `recipes.for_linear`.
        keys: of stochastic rounding, int32 [experts, 2, 2], or None.
        dtypes: of the gradients of weight and bias, None where they are not wanted.
    """
    (count, outputs, inputs), (weight_dtype, bias_dtype) = shape, dtypes
    row, exact = recipe.gradient if w is not None else HIGH_PRECISION, recipe.exact_products
    column = HIGH_PRECISION if weight_dtype is None else recipe.gradient_columnwise
    reason = None
    if w is not None:
        w = _apart(w)._replace(transposed=True)
        again = recipe.weight_columnwise.format
        reason = why_apart(gradient, inputs, row.format, w.format, exact=exact, transposed=True, again=again)
    if reason is None and weight_dtype is not None:
        kept_as = recipe.input_columnwise.format
        reason = why_columns_apart(gradient, column.format, kept_as, inputs, weight_dtype, exact=exact)
    if not _here(gradient) or reason is not None:
        return None
    columns = Matrix([], None)
    if isinstance(gradient, QuantizedTensor):
        rows = _rows(gradient.parts, gradient.format, count)
        if weight_dtype is not None:
            columns = _columns(gradient.parts, gradient.format, column, outputs, gradient.dtype, words, count, recipe.eps, keys)
    else:
        kept_as = recipe.input_columnwise.format
        aligned = (
            w is not None and rows_come_aligned(gradient.device, row.format, w.format, exact, True),
            columns_come_aligned(gradient.device, column.format, kept_as, exact),
        )
        rows, columns = _quantized(gradient, words, count, row, column, recipe.eps, keys, aligned)
    d_x = None if w is None else multiply_rows(rows, w, words, count, inputs, outputs, None, gradient.dtype, exact)
    d_weight = d_bias = None
    if weight_dtype is not None:
        cast = recipe.input_columnwise
        if coded is not None:
            kept = _columns(x, coded, cast, inputs, gradient.dtype, words, count, recipe.eps, None)
        else:
            kept = Matrix(list(x), cast.format)
        d_weight = multiply_columns(columns, kept, words, count, outputs, inputs, weight_dtype, exact)
    if bias_dtype is not None:
        values = gradient.dequantize() if isinstance(gradient, QuantizedTensor) else gradient
        d_bias = cuda_groups.sum_groups(values, words, count).to(bias_dtype)
    return [d_x, d_weight, d_bias]


def _here(x: Tensor) -> bool:
    return kernels_for(x.codes if isinstance(x, QuantizedTensor) else x) is cuda


def _apart(w: Matrix) -> Matrix:
    """The weight by its parts."""
    q = w.parts[0]
    return w._replace(parts=q.parts) if isinstance(q, QuantizedTensor) else w


def _quantized(
    x: Tensor, words: Tensor, count: int, row: Cast, column: Cast, eps: float, keys: Tensor | None, aligned: Aligned
) -> tuple[Matrix, Matrix]:
    found = quantized_at_once(x, words, count, row, column, None, keys, eps, aligned)
    rows, columns = Matrix(found.row or [x], row.format), Matrix(found.column or [x], column.format)
    return rows._replace(aligned=aligned[0]), columns._replace(aligned=aligned[1])


def _rows(parts: Sequence[Tensor], format: Format, count: int) -> Matrix:
    """Rows of codes, as parts of groups along the rows."""
    codes, scales, *tensor_scale = parts
    if format.per_tensor:
        scales = scales.reshape(1).repeat(count)
    elif groups.ordered(format):
        turned = scales.new_zeros((scales.shape[1], -(-len(codes) // 4) * 4))
        turned[:, : len(codes)] = scales.mT
        scales = turned
    return Matrix([codes, scales, *(scale.reshape(1).repeat(count) for scale in tensor_scale)], format)


def _columns(
    parts: Sequence[Tensor],
    format: Format,
    cast: Cast,
    columns: int,
    dtype: torch.dtype,
    words: Tensor,
    count: int,
    eps: float,
    keys: Tensor | None,
) -> Matrix:
    """Their columnwise form, as parts of groups along the columns (`coded.columnwise`)."""
    if cast.format is None:
        return Matrix([dequantize_parts(parts, format, dtype, columns)], None)
    values = values_of(parts, format, columns, dtype)
    if keeps_codes(format, cast.format, cast.rotate):
        # Divided by its own scale a value rounds to its code.
        multiplier = parts[1].reshape(1).reciprocal()
        found = cuda_groups.quantize_groups(values, words, count, None, format, multiplier=multiplier)
        assert found.column is not None
        return Matrix([found.column[0], parts[1].reshape(1).repeat(count)], format)
    found = quantized_at_once(values, words, count, HIGH_PRECISION, cast, None, keys, eps)
    return Matrix(found.column or [], cast.format)
