"""`parallelize`: layers whose weights are cut over a tensor-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp import parts
from blockfp.placement import Sharding

from .geometry import Geometry
from .state_dict import cut
from .tensor import QuantizedTensor


def part_of(q: QuantizedTensor, lies: Sharding, rank: int) -> QuantizedTensor:
    """What one rank holds of a whole quantized tensor, in memory of its own: any rows and columns, inside blocks and bytes too."""
    region = lies.region(rank)
    own = {part.name: cut(q.format, part, getattr(q, part.name), region).clone() for part in parts.parts(q.format, lies)}
    initial = None if q.initial is None else q.initial[region.slices].clone()
    geometry = Geometry(region.origin, initial=initial)
    return q.with_parts(own["codes"], own["scales"], own.get("tensor_scale"), columns=region.shape[-1], geometry=geometry)
