"""Norms on a tensor-parallel group, each rank with its own tokens or with all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear import outputs
from ..quantized_tensor.sharding import mesh_of
from .dtensors import from_local, to_local


class _SummedGradient(torch.autograd.Function):
    """A parameter that every rank has and each uses for its own tokens: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return outputs.all_reduce(gradient, ctx.group), None


class _SharedNorm(nn.Module):
    """What `parallelize` makes a norm: its parameters are DTensors, replicated; x holds this rank's tokens, or all.

    Attributes:
        summed_over: name of the group over which the parameters' gradients are summed; None where each rank has all tokens.
    """

    summed_over: str | None

    def parameter(self, name: str) -> Tensor | None:
        """A parameter as this rank uses it."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        local = to_local(parameter)
        return local if self.summed_over is None else _SummedGradient.apply(local, self.summed_over)  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalized(to_local(x))
        return from_local(y, mesh_of(x), getattr(x, "placements", ()), x.shape)

    def normalized(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SharedLayerNorm(_SharedNorm, nn.LayerNorm):
    def normalized(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.parameter("weight"), self.parameter("bias"), self.eps)


class SharedRMSNorm(_SharedNorm, nn.RMSNorm):
    def normalized(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.parameter("weight"), self.eps)


SHARED_NORMS: dict[type[nn.Module], type[_SharedNorm]] = {nn.LayerNorm: SharedLayerNorm, nn.RMSNorm: SharedRMSNorm}
"""What becomes of torch's norms."""
