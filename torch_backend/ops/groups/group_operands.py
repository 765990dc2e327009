"""Operands of the products of groups, of all groups at once or of one group after another.

Rows are values, which are quantized here, or codes. Codes are multiplied rowwise as they came; their columnwise form follows
from them (`definition.recoding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition import groups
from blockfp.definition.numerics import Quantized
from blockfp.definition.recoding import keeps_codes, value_dtype
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast, Pair, given_of, operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast

from ..dequantize_plans import dequantize_parts
from ..library import name_of
from ..product.products import Matrix
from ..quantize import cuda_layouts, part_ops
from ..quantize.operand_ops import Directions, quantize_operand
from . import cuda_groups


class Codes(NamedTuple):
    """Rows [tokens, columns] in blocks of one row, or with one scale.

    Attributes:
        parts: codes, scales and, if present, the tensor scale.
        format: of the codes.
        columns: number of columns.
        dtype: nominal dtype.
    """

    parts: Sequence[Tensor]
    format: Format
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def between(self, first: int, last: int) -> Codes:
        """Returns some of the rows."""
        codes, scales, *tensor_scale = self.parts
        return self._replace(parts=[codes[first:last], scales if self.format.per_tensor else scales[first:last], *tensor_scale])

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantizes the rows."""
        return dequantize_parts(self.parts, self.format, dtype, self.columns)

    def columnwise(self, cast: Cast, eps: float, key: Tensor | None) -> Matrix:
        """Returns the matrix transposed, [columns, tokens], as an operand that contracts the rows; `key` is int32 [2]."""
        if cast.format is None:
            return Matrix([self.values(self.dtype).mT], None)
        if keeps_codes(self.format, cast.format, cast.rotate):
            return Matrix(part_ops.turned(self.parts[0], self.parts[1], self.format.name, self.columns), self.format)
        values = self.values(_dtype_of_values(self.dtype))
        keys = None if key is None else key.repeat(2, 1)
        found = quantize_operand(values, operand_cast(None, cast, eps, keyed=key is not None), keys=keys)
        return Matrix(found.column, cast.format)

    def rows_at_once(self, count: int) -> Matrix:
        """Returns the rows of all groups, in the layout of groups along the rows."""
        codes, scales, *tensor_scale = self.parts
        if self.format.per_tensor:
            scales = scales.reshape(1).repeat(count)
        elif groups.ordered(self.format):
            scales = cuda_layouts.ordered(scales)
        return Matrix([codes, scales, *(scale.reshape(1).repeat(count) for scale in tensor_scale)], self.format)

    def columns_at_once(self, cast: Cast, words: Tensor, count: int, eps: float, keys: Tensor | None) -> Matrix:
        """Returns `columnwise` of all groups, in the layout of groups along the columns; `words` locate the groups."""
        if cast.format is None:
            return Matrix([self.values(self.dtype)], None)
        values = self.values(_dtype_of_values(self.dtype))
        if keeps_codes(self.format, cast.format, cast.rotate):
            # Divided by its own scale a value rounds to its code.
            multiplier = self.parts[1].reshape(1).reciprocal()
            moved = OperandCast(column=self.format, given="multiplier")
            found = cuda_groups.quantize_groups(values, words, count, moved, multiplier=multiplier)
            assert found.column is not None
            return Matrix([found.column[0], self.parts[1].reshape(1).repeat(count)], self.format)
        found = cuda_groups.quantize_groups(
            values, words, count, operand_cast(None, cast, eps, keyed=keys is not None), keys=keys
        )
        return Matrix(found.column or [], cast.format)


def _dtype_of_values(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values from which the columnwise form of codes with this nominal dtype is quantized."""
    return getattr(torch, value_dtype(name_of(dtype)))


Rows = Tensor | Codes
"""Rows of groups."""
Note = Callable[[Tensor, Directions, Cast, Cast], None]
"""Is given a group's rows, their operands and both casts."""
_NOTHING = Matrix([], None)


# ---- all groups at once


def operands_at_once(
    x: Rows,
    words: Tensor,
    count: int,
    row: Cast,
    column: Cast | None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    eps: float,
    laid: Pair,
) -> tuple[Matrix, Matrix, Tensor | None]:
    """Returns all groups' operands rowwise and columnwise, and their amaxes or None; a column of None is not wanted."""
    if isinstance(x, Codes):
        columns = _NOTHING if column is None else x.columns_at_once(column, words, count, eps, keys)
        return x.rows_at_once(count), columns, None
    cast = operand_cast(row, column, eps, given=given_of(None, multiplier), keyed=keys is not None, laid=laid)
    found = cuda_groups.GroupedParts(None, None, None)
    if cast.row is not None or cast.column is not None:
        found = cuda_groups.quantize_groups(x, words, count, cast, keys=keys, multiplier=multiplier)
    rows = Matrix(found.row or [x], cast.row, laid=laid[0])
    return rows, Matrix(found.column or [x], cast.column, laid=laid[1]), found.amaxes


# ---- one group after another


def operands(
    x: Rows,
    first: int,
    last: int,
    row: Cast,
    column: Cast | None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    eps: float,
    note: Note | None,
) -> tuple[Matrix, Matrix, Tensor | None]:
    """Returns one group's operands rowwise and columnwise, and its amax or None; a column of None is not wanted."""
    if isinstance(x, Codes):
        codes = x.between(first, last)
        column_key = keys[1] if keys is not None and column is not None and column.stochastic else None
        columns = _NOTHING if column is None else codes.columnwise(column, eps, column_key)
        return Matrix(codes.parts, codes.format), columns, None
    rows, column = x[first:last], column or HIGH_PRECISION
    found = quantized(rows, row, column, multiplier, keys, eps)
    if note is not None:
        note(rows, found, row, column)
    by_row = Matrix([rows], None) if row.format is None else Matrix(found.row, row.format)
    return by_row, Matrix([rows.mT], None) if column.format is None else Matrix(found.column, column.format), found.amax


def quantized(rows: Tensor, row: Cast, column: Cast, multiplier: Tensor | None, keys: Tensor | None, eps: float) -> Directions:
    cast = operand_cast(row, column, eps, keyed=keys is not None)
    if cast.row is None and cast.column is None:
        return Directions([], [], None)
    return quantize_operand(rows, cast, multiplier=multiplier, keys=keys)


def words_of(offs: Tensor, ends: Sequence[int], tokens: int) -> Tensor:
    """Computes the outputs of `group_rows`, without the table that kernels read."""
    where = list(groups.groups_of(ends, tokens))
    words = offs.new_zeros(groups.words_for(tokens, len(ends)))
    found = [group.end for group in where] + [group.end_column for group in where]
    words[: len(found)] = torch.tensor(found, dtype=torch.int32, device=offs.device)
    return words


def laid_out(each: Sequence[Sequence[Tensor]], x: Tensor, ends: Sequence[int], format: Format, eps: float) -> list[Tensor]:
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
