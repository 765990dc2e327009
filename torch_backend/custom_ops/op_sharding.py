"""What DTensor is told of the custom ops (`register_sharding`).

Codes and scales that are DTensors are dequantized where they lie, if every row of codes has a row of scales of its own; else
they are gathered. The other ops give lists of tensors, or take some, for which DTensor has no public way to say how they lie:
they refuse DTensors, and layers cut their operands themselves (linear_function.py).
"""

from __future__ import annotations

import torch.distributed as dist

from . import ops

if dist.is_available():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(ops.dequantize)
    def _dequantize(codes, scales, tensor_scale, format, dtype, columns, origin):
        # DTensor remembers the answer for tensors of these shapes, whatever the format: only shapes may decide.
        whole = None if tensor_scale is None else Replicate()
        rest = [whole, None, None, None, None]
        placements = [([Replicate()], [Replicate(), Replicate(), *rest])]
        for axis in range(codes.ndim - 1):
            if codes.shape[axis] == scales.shape[axis]:
                placements.append(([Shard(axis)], [Shard(axis), Shard(axis), *rest]))
        return placements
