"""Custom ops that quantize plain tensors, and dequantize codes and scales or a `QuantizedTensor`.

    blockfp::quantize           (x, format, key) -> [codes, scales] or [codes, scales, tensor_scale]
    blockfp::dequantize         (codes, scales, tensor_scale, format, dtype, columns, origin) -> values
    blockfp::dequantize_tensor  (q, dtype) -> values

dynamo can't read attributes of a tensor subclass created inside the graph, so the third op takes q whole; its op table entry
unpacks it after dynamo has finished.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.formats import Format

from .dequantize_plans import dequantize_parts
from .kernels import kernels_for
from .library import define, empty_parts, fake, impl

quantize = define("quantize(Tensor x, str format, Tensor? key=None) -> Tensor[]")
dequantize = define(
    "dequantize(Tensor codes, Tensor scales, Tensor? tensor_scale, str format, ScalarType dtype, SymInt columns, "
    "SymInt[] origin) -> Tensor"
)
dequantize_tensor = define("dequantize_tensor(Tensor q, ScalarType dtype) -> Tensor")


@impl(quantize)
def _quantize(x: Tensor, format: str, key: Tensor | None = None) -> list[Tensor]:
    parts = kernels_for(x).quantize(x, Format.parse(format), key=key)
    return [part.contiguous() for part in parts if part is not None]


@fake(quantize)
def _quantize_fake(x: Tensor, format: str, key: Tensor | None = None) -> list[Tensor]:
    return empty_parts(x, x.shape, Format.parse(format))


@impl(dequantize)
def _dequantize(codes, scales, tensor_scale, format, dtype, columns, origin) -> Tensor:
    parts = (codes, scales) if tensor_scale is None else (codes, scales, tensor_scale)
    return dequantize_parts(parts, Format.parse(format), dtype, columns, tuple(origin))


@fake(dequantize)
def _dequantize_fake(codes, scales, tensor_scale, format, dtype, columns, origin) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)


@impl(dequantize_tensor)
def _dequantize_plain(q: Tensor, dtype: torch.dtype) -> Tensor:
    raise TypeError(f"q must be a QuantizedTensor, got a tensor of {q.dtype}")


@fake(dequantize_tensor)
def _dequantize_tensor_fake(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(q.shape, dtype=dtype, device=q.device)


if dist.is_available():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    # Ops with lists of tensors have no sharding rule: DTensor has no public way to specify placements of lists.
    @register_sharding(dequantize)
    def _dequantize_sharding(codes, scales, tensor_scale, format, dtype, columns, origin):
        """Lists the placements under which DTensors are dequantized locally: each row of codes needs its own row of scales."""
        # DTensor caches the result by shapes, whatever the format, so only shapes may decide.
        whole = None if tensor_scale is None else Replicate()
        rest = [whole, None, None, None, None]
        placements = [([Replicate()], [Replicate(), Replicate(), *rest])]
        for axis in range(codes.ndim - 1):
            if codes.shape[axis] == scales.shape[axis]:
                placements.append(([Shard(axis)], [Shard(axis), Shard(axis), *rest]))
        return placements
