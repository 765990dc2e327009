"""Plans by which codes and scales become values: what is static is checked and worked out once for tensors of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import numerics
from blockfp.definition.checks import check_codes, check_output_dtype, check_scales
from blockfp.formats import Format
from blockfp.kernels import calls, native, switch

from . import cuda
from .dtensors import when_imported
from .kernels import kernels_for
from .library import define, empty_parts, fake, impl, maker, name_of

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_plans: dict[Any, Run] = switch.plans()


def dequantize_parts(
    parts: Sequence[Tensor],
    format: Format,
    dtype: torch.dtype,
    columns: int,
    origin: tuple[int, int] = (0, 0),
    *,
    factored: bool = False,
) -> Tensor:
    """Carries out the op `dequantize`; `factored` takes 1 for the scale of the whole tensor beside those of blocks."""
    codes, scales = parts[0], parts[1]
    tensor_scale = parts[2] if len(parts) > 2 else None
    key = (codes.shape, codes.dtype, codes.device, scales.shape, scales.dtype, scales.device)
    key = (*key, None if tensor_scale is None else tensor_scale.device, format, dtype, columns, origin)
    run = _plans.get(key)
    if run is None:
        run = switch.kept(_plans, key, plan_of(parts, format, dtype, columns, origin))
    return run(codes, scales, None if factored else tensor_scale)


def plan_of(parts: Sequence[Tensor], format: Format, dtype: torch.dtype, columns: int, origin: tuple[int, int] = (0, 0)) -> Run:
    """Plans to dequantize tensors that lie as these parts do: a function of codes, scales and tensor scale, or None for 1."""
    codes, scales = parts[0], parts[1]
    tensor_scale = parts[2] if len(parts) > 2 else None
    name, shape = name_of(dtype), (*codes.shape[:-1], columns)
    kernels = kernels_for(codes)
    if kernels is cuda:
        cuda.check_beside(codes, "codes", scales=scales, tensor_scale=tensor_scale)
    check_output_dtype(name)
    check_codes(codes, columns, format)
    check_scales(scales, tensor_scale, shape, format, origin)
    function, device = "dequantize" if kernels is cuda else "cpu.dequantize", codes.device
    numbers = tuple(calls.dequantize(shape, name, format, origin, function).numbers.values())

    def on_the_device(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
        out = new()
        dequantize(codes.contiguous(), scales.contiguous(), tensor_scale, out, *numbers)
        return out

    def on_the_host(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
        out, scales = torch.empty(shape, dtype=dtype, device="cpu"), scales.contiguous()
        if scales.data_ptr() % scales.element_size():
            scales = scales.clone()
        # In a program of torch.export it may look as if it had a gradient, of which float() warns.
        scale = tensor_scale.detach() if tensor_scale is not None and tensor_scale.requires_grad else tensor_scale
        factor = 1.0 if scale is None else float(scale)
        dequantize(codes.contiguous(), scales, factor, out, *numbers)
        return out

    def by_the_definition(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
        if tensor_scale is None and format.scale.two_level:
            tensor_scale = torch.ones((), dtype=torch.float32, device=device)
        return numerics.dequantize(codes, scales, tensor_scale, format, name, columns=columns, origin=origin).contiguous()

    if kernels is numerics:
        return by_the_definition
    dequantize = (cuda if kernels is cuda else native).library().dequantize
    if kernels is native:
        return on_the_host
    new = maker(shape, dtype, device)
    return on_the_device


# ---- ops


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


@when_imported
def _register_sharding(dtensor: Any) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    # Ops with lists of tensors have no sharding rule: DTensor has no public way to specify placements of lists.
    Replicate, Shard = dtensor.Replicate, dtensor.Shard

    @register_sharding(dequantize)
    def placements(codes, scales, tensor_scale, format, dtype, columns, origin):
        """Lists the placements under which DTensors are dequantized locally: each row of codes needs its own row of scales."""
        # DTensor caches the result by shapes, whatever the format, so only shapes may decide.
        whole = None if tensor_scale is None else Replicate()
        rest = [whole, None, None, None, None]
        placements = [([Replicate()], [Replicate(), Replicate(), *rest])]
        for axis in range(codes.ndim - 1):
            if codes.shape[axis] == scales.shape[axis]:
                placements.append(([Shard(axis)], [Shard(axis), Shard(axis), *rest]))
        return placements
