"""Custom ops that quantize an operand of a matrix product rowwise, columnwise, or both from one read.

    blockfp::quantize_operand   (x, row, column, amax, multiplier, keys, random_row, random_column, rotate, eps, lay_row,
                                 lay_column) -> [row parts .., column parts .., amax if a multiplier is given]
    blockfp::delayed_multiplier (scale, amax, format, eps) -> float32 (), delayed scaling's multiplier

Columnwise quantizes the transpose of x: scales run along the rows of x and codes are transposed. Parts are codes, scales and,
for two-level formats, tensor_scale. `row` and `column` are format names, None for an unneeded direction. Scales follow the
definition, except that they are NaN if x contains an Inf (`overflow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.check.measure import saturated
from blockfp.definition import layout, scaling
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast, Pair, given_of

from .. import kernels
from ..dequantize_plans import dequantize_parts
from ..library import define, empty_parts, fake, impl
from .cuda_layouts import empty_laid
from .quantize_plans import part_count, quantize_matrix

_op = define(
    "quantize_operand(Tensor x, str? row, str? column, Tensor? amax=None, Tensor? multiplier=None, Tensor? keys=None, "
    "bool random_row=False, bool random_column=False, bool rotate=False, float eps=0.0, bool lay_row=False, "
    "bool lay_column=False) -> Tensor[]"
)

delayed_multiplier = define("delayed_multiplier(Tensor scale, Tensor amax, str format, float eps) -> Tensor")
"""See `scaling.delayed_multiplier`; amax is int32 [1]. An op, so that compilers don't trace its integer arithmetic."""


class Directions(NamedTuple):
    """An operand's parts by direction, empty if not requested, and its amax, int32 [1], or None."""

    row: list[Tensor]
    column: list[Tensor]
    amax: Tensor | None


def quantize_operand(
    x: Tensor,
    cast: OperandCast,
    *,
    amax: Tensor | None = None,
    multiplier: Tensor | None = None,
    keys: Tensor | None = None,
) -> Directions:
    """Quantizes a matrix along its rows, its columns, or both.

    An amax (int32 [1]) makes the scale of formats with one per tensor; with a multiplier (float32 of one element) the amax of x
    is returned. Keys are int32 [2, 2], rowwise and columnwise.
    """
    row, column = cast.row, cast.column
    names = [None if format is None else format.name for format in (row, column)]
    parts = _op(x, *names, amax, multiplier, keys, *cast.random, cast.rotate, cast.eps, *cast.laid)
    recorded = None
    if multiplier is not None:
        parts, recorded = parts[:-1], parts[-1]
    if row is None or column is None:
        return Directions(parts if column is None else [], parts if row is None else [], recorded)
    first = part_count(row)
    return Directions(parts[:first], parts[first:], recorded)


def tensor_amax(x: Tensor, *, by_row: bool = False) -> Tensor:
    """Returns the largest magnitude of x, or of each row, ignoring NaN, as int32 [1 or rows] of fp32 bits.

    In plain operations, for compiled code, which fuses them with the computation of x. They use the bits of x's dtype, because
    float comparisons might see values before they are rounded to it.
    """
    words = torch.int32 if x.dtype is torch.float32 else torch.int16
    magnitude = x.view(words) & torch.iinfo(words).max
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[x.dtype]
    largest = torch.where(magnitude > infinity, torch.zeros_like(magnitude), magnitude)
    largest = largest.amax(-1) if by_row else largest.amax().view(1)
    return largest.view(x.dtype).to(torch.float32).view(torch.int32)


def empty_directions(x: Tensor, shape: Sequence[int], names: tuple[str | None, str | None], laid: Pair) -> list[Tensor]:
    """Returns uninitialized parts of a matrix of this shape, rowwise and columnwise, on x's device; None skips a direction."""
    parts: list[Tensor] = []
    for name, lines, is_laid in zip(names, (shape, shape[::-1]), laid, strict=True):
        if name is not None:
            parts += (empty_laid if is_laid else empty_parts)(x, lines, Format.parse(name))
    return parts


@impl(_op)
def _quantize_operand(
    x, row, column, amax=None, multiplier=None, keys=None, random_row=False, random_column=False, rotate=False, eps=0.0,
    lay_row=False, lay_column=False,
) -> list[Tensor]:  # fmt: skip
    first, second = (None if name is None else Format.parse(name) for name in (row, column))
    random, laid = (random_row, random_column), (lay_row, lay_column)
    cast = OperandCast(first, second, given_of(amax, multiplier), random, rotate, eps, laid)
    return quantize_matrix(x, cast, amax, multiplier, keys)


@fake(_op)
def _quantize_operand_fake(
    x, row, column, amax=None, multiplier=None, keys=None, random_row=False, random_column=False, rotate=False, eps=0.0,
    lay_row=False, lay_column=False,
) -> list[Tensor]:  # fmt: skip
    parts = empty_directions(x, x.shape, (row, column), (lay_row, lay_column))
    return parts if multiplier is None else [*parts, x.new_empty((1,), dtype=torch.int32)]


@impl(delayed_multiplier)
def _delayed_multiplier(scale, amax, format, eps) -> Tensor:
    return scaling.delayed_multiplier(scale, amax.view(()), Format.parse(format), eps)


@fake(delayed_multiplier)
def _delayed_multiplier_fake(scale, amax, format, eps) -> Tensor:
    return torch.empty_like(scale)


# ---- measuring an operand's quantization


FIGURES = ("amax", "elements", "saturated", "flushed", "signal", "noise")
"""The largest finite magnitude, counts, and the sums of squares of values and errors."""

quantization_figures = define(
    "quantization_figures(Tensor x, Tensor[] parts, str format, bool rotate, SymInt[] origin) -> Tensor"
)


@impl(quantization_figures)
def _figures(x: Tensor, parts: list[Tensor], format: str, rotate: bool, origin: list[int]) -> Tensor:
    parsed, columns = Format.parse(format), x.shape[-1]
    element = parsed.element
    back = dequantize_parts(parts, parsed, torch.float32, columns, (origin[0], origin[1]))
    values = (kernels.rotate(x) if rotate else x).float()
    finite = values.isfinite() & back.isfinite()
    magnitude = torch.where(values.isfinite(), values.abs(), 0.0)
    cut = saturated(values, back, layout.unpack(parts[0], element.bits, columns), element)
    error = torch.where(finite, values - back, 0.0)
    figures = (
        magnitude.amax() if magnitude.numel() else magnitude.sum(),
        torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device),
        cut.sum(),
        (finite & (values != 0) & (back == 0)).sum(),
        torch.where(finite, magnitude, 0.0).double().square().sum(),
        error.double().square().sum(),
    )
    return torch.stack([figure.double() for figure in figures])


@fake(quantization_figures)
def _figures_fake(x: Tensor, parts: list[Tensor], format: str, rotate: bool, origin: list[int]) -> Tensor:
    return x.new_empty((len(FIGURES),), dtype=torch.float64)
