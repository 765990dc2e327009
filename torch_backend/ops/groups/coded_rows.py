"""Rows that were quantized elsewhere, as operands of the products of groups.

Rowwise they are multiplied as they came. Their columnwise form follows from the codes (`definition.recoding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition import groups
from blockfp.definition.recoding import keeps_codes, value_dtype
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.recipes import Cast

from ..dequantize_plans import dequantize_parts
from ..library import name_of
from ..product.products import Matrix
from ..quantize import part_ops
from ..quantize.operand_ops import quantize_operand
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
        found = quantize_operand(values, None, cast.format, column_key=key, rotate=cast.rotate, eps=eps_for(cast.format, eps))
        return Matrix(found.column, cast.format)

    def rows_at_once(self, count: int) -> Matrix:
        """Returns the rows of all groups, in the layout of groups along the rows."""
        codes, scales, *tensor_scale = self.parts
        if self.format.per_tensor:
            scales = scales.reshape(1).repeat(count)
        elif groups.ordered(self.format):
            turned = scales.new_zeros((scales.shape[1], -(-len(codes) // 4) * 4))
            turned[:, : len(codes)] = scales.mT
            scales = turned
        return Matrix([codes, scales, *(scale.reshape(1).repeat(count) for scale in tensor_scale)], self.format)

    def columns_at_once(self, cast: Cast, words: Tensor, count: int, eps: float, keys: Tensor | None) -> Matrix:
        """Returns `columnwise` of all groups, in the layout of groups along the columns; `words` locate the groups."""
        if cast.format is None:
            return Matrix([self.values(self.dtype)], None)
        values = self.values(_dtype_of_values(self.dtype))
        if keeps_codes(self.format, cast.format, cast.rotate):
            # Divided by its own scale a value rounds to its code.
            multiplier = self.parts[1].reshape(1).reciprocal()
            found = cuda_groups.quantize_groups(values, words, count, None, self.format, multiplier=multiplier)
            assert found.column is not None
            return Matrix([found.column[0], self.parts[1].reshape(1).repeat(count)], self.format)
        keyed = keys is not None and cast.stochastic
        options = {"keys": keys, "column_keyed": keyed, "rotate": cast.rotate, "eps": eps}
        found = cuda_groups.quantize_groups(values, words, count, None, cast.format, **options)
        return Matrix(found.column or [], cast.format)


def _dtype_of_values(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values from which the columnwise form of codes with this nominal dtype is quantized."""
    return getattr(torch, value_dtype(name_of(dtype)))
