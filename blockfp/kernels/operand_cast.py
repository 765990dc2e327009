"""`OperandCast`: the way in which an operand is quantized, as one value from a recipe's casts down to a kernel's call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ..definition.recipe import Cast
from ..formats import Format

_MADE = {("e4m3", None), ("e4m3", 128), ("e4m3", 32), ("e3m2", 32), ("e2m1", 32), ("e2m1", 16)}
_GRADIENTS = {("e4m3", None), ("e5m2", None)}
"""Elements and lengths of 1-D blocks, None for the whole tensor, of what an activation makes and of its gradients (kMadeBlock,
kMadeGradient in kernels/cuda/quantize/sources.cuh)."""

Pair = tuple[bool, bool]
"""Something of both directions, rowwise and columnwise."""
Given = Literal["amax", "multiplier", "scale"] | None
NEITHER: Pair = (False, False)


def cuda_rotates(format: Format) -> bool:
    """Returns True for a format whose CUDA kernels rotate its columns; for others array operations do, before the kernel."""
    return format.scale.two_level and not format.scale.four_over_six and not format.square


class OperandCast(NamedTuple):
    """The way in which an operand is quantized.

    Attributes:
        row, column: formats of the directions, None for one that isn't wanted.
        given: what scales of whole tensors are made of, None where their amax is measured. A "scale" is delayed scaling's: the
            multiplier, or 0 before its first update, when the amax is measured.
        random: which directions are rounded stochastically.
        rotate: whether the random Hadamard transform comes before the columnwise direction.
        eps: lifts amaxes.
        laid: which directions come laid out as the CUDA library's products read them: MX codes aligned to a scale for 128
            elements, and 1x128 scales or scales of rows block by block (`calls.laid_parts`).
    """

    row: Format | None = None
    column: Format | None = None
    given: Given = None
    random: Pair = NEITHER
    rotate: bool = False
    eps: float = 0.0
    laid: Pair = NEITHER

    @property
    def format(self) -> Format:
        """The format of a cast that has one."""
        format = self.row or self.column
        assert format is not None
        return format

    @property
    def directions(self) -> tuple[OperandCast, OperandCast]:
        """The cast along the rows and the one along the columns, alone."""
        (row, column), (rows, columns) = self.random, self.laid
        by_row = self._replace(column=None, random=(row, False), rotate=False, laid=(rows, False))
        return by_row, self._replace(row=None, random=(False, column), laid=(False, columns))

    @property
    def rotates(self) -> bool:
        """True where the columnwise direction is wanted, and rotated."""
        return self.rotate and self.column is not None

    @property
    def measures(self) -> bool:
        """True where the amax of the whole has to be found first."""
        return self.given is None and self.format.has_tensor_scale

    def one_pass(self, *, stored: bool = True) -> bool:
        """Says whether a kernel quantizes straight to aligned codes; `stored`: whether columns may stay those of the format."""
        row, column = self.row is not None, self.column is not None
        rows, columns = row and self.laid[0], column and self.laid[1]
        apart = (row and self.random[0]) or (column and (self.random[1] or self.rotate))
        wanted = self.format.scale.e8m0 and (rows or columns)
        return wanted and rows == row and (stored or columns == column) and not (self.format.square or apart)

    def of_made(self, rows: int, columns: int, *, gradient: bool = False) -> bool:
        """Says whether kernels that make their operand [rows, columns], an activation or its `gradient`, have this cast."""
        format, made = self.format, _GRADIENTS if gradient else _MADE
        if gradient and (self.column is None or self.given != "multiplier"):
            return False
        if (self.rotates and not cuda_rotates(format)) or (self.row is not None and self.column not in (None, self.row)):
            return False
        tall, length = format.block or (1, None)
        if any(self.random) or format.scale.four_over_six or tall != 1 or (format.element.name, length) not in made:
            return False
        whole = 8 if self.one_pass(stored=False) else 32 if format.element.bits == 4 else 16
        return not (rows % whole if self.column is not None or whole == 8 else columns % (length or 1))


def given_of(amax: Any, multiplier: Any) -> Given:
    """Returns which of an amax and a multiplier is given, of which a multiplier counts."""
    return "multiplier" if multiplier is not None else None if amax is None else "amax"


def operand_cast(
    row: Cast | None,
    column: Cast | None,
    eps: float,
    *,
    given: Given = None,
    keyed: bool = False,
    laid: Pair = NEITHER,
) -> OperandCast:
    """Describes a recipe's casts of an operand; a direction without cast or format isn't wanted.

    `keyed` says whether there are random keys, without which stochastic casts round to nearest.
    """
    row = None if row is None or row.format is None else row
    column = None if column is None or column.format is None else column
    random = (keyed and row is not None and row.stochastic, keyed and column is not None and column.stochastic)
    rotate, laid = column is not None and column.rotate, (laid[0] and row is not None, laid[1] and column is not None)
    formats = (None if row is None else row.format, None if column is None else column.format)
    return OperandCast(*formats, given, random, rotate, eps, laid)
