"""The custom ops: quantize and dequantize on plain tensors, and dequantize on a `QuantizedTensor`.

    blockfp::quantize           (x, format, key) -> [codes, scales] or [codes, scales, tensor_scale]
    blockfp::dequantize         (codes, scales, tensor_scale, format, dtype, columns, origin) -> values
    blockfp::dequantize_tensor  (q, dtype) -> values

They carry a format as its name. A compiled graph holds one call to each; what runs behind it (a kernel, or the definition on
the same tensors) gives the same bits. The third exists because dynamo can't read attributes of a tensor subclass made
inside the graph: its op table entry takes q apart after dynamo has gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.definition import layout, numerics
from blockfp.formats import Format
from blockfp.kernels import cuda_library, native

from . import cuda

# A Library with Python functions costs two thirds of `torch.library.custom_op`'s host time.
_library = torch.library.Library("blockfp", "DEF")
_library.define("quantize(Tensor x, str format, Tensor? key=None) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "dequantize(Tensor codes, Tensor scales, Tensor? tensor_scale, str format, ScalarType dtype, SymInt columns, "
    "SymInt[] origin) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define("dequantize_tensor(Tensor q, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

quantize = torch.ops.blockfp.quantize.default
dequantize = torch.ops.blockfp.dequantize.default
dequantize_tensor = torch.ops.blockfp.dequantize_tensor.default


def name_of(dtype: torch.dtype) -> str:
    """The core's name of a dtype: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def empty_parts(x: Tensor, shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Codes, scales and, of two-level formats, the tensor scale of an array of this shape, not filled, on x's device."""
    scale_dtype = cast(torch.dtype, getattr(torch, format.scale.dtype))
    parts = [
        x.new_empty(layout.codes_shape(shape, format), dtype=torch.uint8),
        x.new_empty(layout.scales_shape(shape, format, origin), dtype=scale_dtype),
    ]
    return [*parts, x.new_empty((), dtype=torch.float32)] if format.scale.two_level else parts


def kernels_for(x: Tensor) -> Any:
    """The module that is fastest on x's device: kernels or, where there are none, the definition; the bits are the same."""
    if x.device.type == "cuda" and cuda_library.available():
        return cuda
    return native if x.device.type == "cpu" and native.available() else numerics


@torch.library.impl(_library, "quantize", "CompositeExplicitAutograd")
def _quantize(x: Tensor, format: str, key: Tensor | None = None) -> list[Tensor]:
    parts = kernels_for(x).quantize(x, Format.parse(format), key=key)
    return [part.contiguous() for part in parts if part is not None]


@torch.library.impl(_library, "dequantize", "CompositeExplicitAutograd")
def _dequantize(codes, scales, tensor_scale, format, dtype, columns, origin) -> Tensor:
    values = kernels_for(codes).dequantize(
        codes, scales, tensor_scale, Format.parse(format), name_of(dtype), columns=columns, origin=tuple(origin)
    )
    return values.contiguous()


@torch.library.impl(_library, "dequantize_tensor", "CompositeExplicitAutograd")
def _dequantize_plain(q: Tensor, dtype: torch.dtype) -> Tensor:
    raise TypeError(f"q must be a QuantizedTensor, got a tensor of {q.dtype}")


@torch.library.register_fake("blockfp::quantize", lib=_library)
def _quantize_fake(x: Tensor, format: str, key: Tensor | None = None) -> list[Tensor]:
    return empty_parts(x, x.shape, Format.parse(format))


@torch.library.register_fake("blockfp::dequantize", lib=_library)
def _dequantize_fake(codes, scales, tensor_scale, format, dtype, columns, origin) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)


@torch.library.register_fake("blockfp::dequantize_tensor", lib=_library)
def _dequantize_tensor_fake(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(q.shape, dtype=dtype, device=q.device)


if dist.is_available():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    # The ops that give or take lists of tensors have no sharding: DTensor has no public way to say how lists lie.
    @register_sharding(dequantize)
    def _dequantize_sharding(codes, scales, tensor_scale, format, dtype, columns, origin):
        """Lists how DTensors are dequantized where they lie: each row of codes needs a row of scales of its own."""
        # DTensor remembers the answer for tensors of these shapes, whatever the format: only shapes may decide.
        whole = None if tensor_scale is None else Replicate()
        rest = [whole, None, None, None, None]
        placements = [([Replicate()], [Replicate(), Replicate(), *rest])]
        for axis in range(codes.ndim - 1):
            if codes.shape[axis] == scales.shape[axis]:
                placements.append(([Shard(axis)], [Shard(axis), Shard(axis), *rest]))
        return placements
