"""Positions of an axis's chunks, as arrays.

Meshes have thousands of ranks, and a training step must not loop over all of them in Python for each weight.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


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
