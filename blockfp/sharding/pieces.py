"""Pieces of the axis that tensor parallelism cuts, as many on any number of ranks, so that one tree adds their products.

    splits = 4      1 rank: ((0 + 1) + (2 + 3))      2 ranks: (0 + 1) + (2 + 3)      4 ranks: a piece each

A rank adds the terms of its own pieces first, and the ranks' sums follow in rank order. `splits` is a power of two that the
ranks divide, so a rank has a whole subtree.
"""

from __future__ import annotations

from ..definition.recipe import DIRECTIONS, OPERANDS, Recipe
from ..formats import WHOLE_ROW


def check_splits(splits: int | None, ranks: int, where: str) -> None:
    """Raises ValueError unless `splits` is None or a power of two that the ranks of `where` divide."""
    if splits is None:
        return
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1 or splits & (splits - 1) or splits % ranks:
        raise ValueError(
            f"splits must be a power of two that the {ranks} ranks of {where} divide, such as {1 << (ranks - 1).bit_length()}, "
            f"got {splits!r}"
        )


def check_pieces(features: int, splits: int, recipe: Recipe) -> None:
    """Raises ValueError unless the pieces of the sharded axis have equal lengths, in whole blocks of the recipe's formats."""
    formats = [recipe.cast(operand, direction).format for operand in OPERANDS for direction in DIRECTIONS]
    blocks = [format.block for format in formats if format is not None and format.block is not None]
    whole = max((side for block in blocks for side in block if side != WHOLE_ROW), default=1)
    if features % (splits * whole):
        raise ValueError(
            f"splits={splits}: {features} features are not {splits} pieces of whole blocks of {recipe}; they must be a "
            f"multiple of {splits * whole}, or splits smaller"
        )
