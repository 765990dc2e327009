"""Norms on a tensor-parallel group, each rank with its own tokens or with all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear import outputs
from ..quantized_tensor.sharding import as_dtensor, check_mesh, from_local, mesh_of, to_local


class _SummedGradient(torch.autograd.Function):
    """Identity on a parameter that each rank uses for its own tokens: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: str) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return outputs.all_reduce(gradient, ctx.group), None


class SharedNorm(nn.Module):
    """A norm after `parallelize`: its parameters are replicated DTensors, and each rank norms the tokens that it has.

    Attributes:
        group: name of the group. Gradients of the parameters are summed over it where each rank has its own tokens.
        sequence: whether each rank has its own tokens of a plain x; a DTensor says it itself.
    """

    group: str
    sequence: bool
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        x, own_tokens = self._laid_out(x)
        y = self.normalized(to_local(x), self.group if own_tokens else None)
        return from_local(y, mesh_of(x), getattr(x, "placements", ()), x.shape)

    def _laid_out(self, x: Tensor) -> tuple[Tensor, bool]:
        """Returns x with whole features on every rank, and whether each has its own tokens."""
        dtensor = as_dtensor(x)
        if dtensor is None:
            return x, self.sequence
        from torch.distributed.tensor import Replicate, Shard

        for parameter in self.parameters(recurse=False):
            check_mesh(x, parameter)
        tokens = x.ndim - len(self.normalized_shape)
        # The terms of a sum, or parts of the features, can't be normed one by one.
        laid_out = [
            placement if isinstance(placement, Shard) and placement.dim < tokens else Replicate()
            for placement in dtensor.placements
        ]
        return dtensor.redistribute(placements=laid_out), isinstance(laid_out[0], Shard)

    def parameter(self, name: str, summed_over: str | None) -> Tensor | None:
        """Returns a parameter as this rank uses it, its gradient summed over a group or not."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        local = to_local(parameter)
        return local if summed_over is None else _SummedGradient.apply(local, summed_over)

    def normalized(self, x: Tensor, summed_over: str | None) -> Tensor:
        raise NotImplementedError


class SharedLayerNorm(SharedNorm, nn.LayerNorm):
    def normalized(self, x: Tensor, summed_over: str | None) -> Tensor:
        weight, bias = self.parameter("weight", summed_over), self.parameter("bias", summed_over)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SharedRMSNorm(SharedNorm, nn.RMSNorm):
    def normalized(self, x: Tensor, summed_over: str | None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.parameter("weight", summed_over), self.eps)


SHARED_NORMS: dict[type[nn.Module], type[SharedNorm]] = {nn.LayerNorm: SharedLayerNorm, nn.RMSNorm: SharedRMSNorm}
"""Torch's norms, and their classes after `parallelize`."""
