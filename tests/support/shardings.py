"""Hypothesis's strategies for how an array lies on a mesh."""

import math

from hypothesis import strategies as st

from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding, StridedShard


@st.composite
def shardings(draw, max_rows=90):
    """Draws shardings of a matrix, empty or not, over up to three axes and eight ranks; even or uneven, strided, replicated."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 8))
    placements, cut = [], {0: [], 1: []}
    for size in reversed(sizes):
        dim = draw(st.sampled_from([0, 0, 1, None]))
        if dim is None:
            placements.append(Replicate())
            continue
        factor = math.prod(cut[dim]) if draw(st.booleans()) else 1
        placements.append(Shard(dim) if factor == 1 else StridedShard(dim, factor))
        cut[dim].append(size)
    shape = (draw(st.integers(0, max_rows)), draw(st.integers(0, max_rows)))
    return Sharding(shape, Mesh(tuple(sizes)), tuple(reversed(placements)))
