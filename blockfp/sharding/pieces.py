"""Cuts of an axis: the positions of the ranks' chunks, and pieces that tensor parallelism adds.

Meshes have thousands of ranks, and a training step must not loop over all of them in Python for each weight: positions are
arrays. There are as many pieces on any number of ranks, so that one tree adds their products.

    splits = 4      1 rank: ((0 + 1) + (2 + 3))      2 ranks: (0 + 1) + (2 + 3)      4 ranks: a piece each

A rank adds the terms of its own pieces first, and the ranks' sums follow in rank order. `splits` is a power of two that the
ranks divide, so a rank has a whole subtree.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ..definition.recipe import DIRECTIONS, OPERANDS, Recipe
from ..formats import WHOLE_ROW


@lru_cache(maxsize=1024)
def chunks(size: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, sizes), int64 [*counts]: the axis cut into counts[0] chunks, each of these into counts[1], and so on."""
    starts, sizes = np.zeros((), np.int64), np.array(size, np.int64)
    for count in counts:
        chunk = -(-sizes // count)[..., None]
        before = np.minimum(np.arange(count) * chunk, sizes[..., None])
        starts, sizes = starts[..., None] + before, np.minimum(chunk, sizes[..., None] - before)
    starts.flags.writeable = sizes.flags.writeable = False
    return starts, sizes


@lru_cache(maxsize=1024)
def straddling(size: int, counts: tuple[int, ...], block: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Returns the indices of blocks that several chunks share, and for each level of cuts whether such chunks differ in it."""
    starts, sizes = chunks(size, counts)
    places = np.flatnonzero(sizes)
    begins = starts.ravel()[places]
    first = begins // block
    # Chunks are in ascending order, so a chunk that begins inside a block shares it with the chunk before.
    shared = np.flatnonzero(begins != first * block)
    if not len(shared):
        return (), (False,) * len(counts)
    blocks = first[shared]
    blocks = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]
    before, after, differ = places[shared - 1], places[shared], []
    for level in range(len(counts)):
        within = math.prod(counts[level + 1 :])
        differ.append(bool((before // within % counts[level] != after // within % counts[level]).any()))
    return tuple(blocks.tolist()), tuple(differ)


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
