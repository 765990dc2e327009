"""Chooses the implementation for a tensor's device: CPU kernels, CUDA kernels, or the definition, all with the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.definition import numerics, rotation
from blockfp.formats import Format
from blockfp.kernels import cuda_library, native, switch

from ..torch_internals import FakeTensor
from . import cuda


def kernels_for(x: Tensor) -> Any:
    """Returns the fastest module for x's device, with the definition's `amax`, `quantize`, `requantize` and `dequantize`."""
    if type(x) is FakeTensor:
        return numerics
    found = _kernels.get(x.device)
    if found is None:
        if x.is_cpu:
            found = native if native.available() else numerics
        else:
            found = cuda if x.is_cuda and cuda_library.available() else numerics
        _kernels[x.device] = found
    return found


_kernels: dict[torch.device, Any] = switch.plans()
"""What `kernels_for` found for each device."""


functions: dict[tuple[str, torch.device], Any] = switch.plans()
"""Functions of the CUDA library by name and device, None for other devices: looking one up enters no Python function."""


def function_for(name: str, x: Tensor) -> Any:
    """Returns the CUDA library's function of this name, or None if kernels don't run on x's device; keeps it in `functions`."""
    if type(x) is FakeTensor:
        return None
    by_kernel = x.is_cuda and kernels_for(x) is cuda
    return switch.kept(functions, (name, x.device), getattr(cuda.library(), name) if by_kernel else None)


def transpose(codes: Tensor, scales: Tensor, format: Format, *, columns: int) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of the transposed matrix, possibly as views; see `numerics.transpose`."""
    if kernels_for(codes) is cuda:
        return cuda.transpose(codes, scales, format, columns=columns)
    if format.element.bits == 8 and format.square:
        return codes.mT, scales.mT
    return numerics.transpose(codes, scales, format, columns=columns)


def rotate(x: Tensor) -> Tensor:
    """Applies the random Hadamard transform along x's last axis; see `rotation.rotate`."""
    return (native if kernels_for(x) is native else rotation).rotate(x)
