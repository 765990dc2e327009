"""Layers that a tensor-parallel group shares, at the point of use: DTensors in and out, and norms over cut tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear import outputs
from ..linear.linear import apply
from ..linear.parallel import Parallel
from ..quantized_tensor.sharding import mesh_of

if TYPE_CHECKING:
    from .quantized_layer import QuantizedLayer


def multiply_shared(layer: QuantizedLayer, parallel: Parallel, x: Tensor, counts: Sequence[int] | None) -> Tensor:
    """`linear` of x with this rank's part of a layer.

    Args:
        layer: its parameters are DTensors on the tensor-parallel mesh.
        parallel: how its group shares it.
        x: what this rank holds of it, the same number of tokens on every rank; or a DTensor on that mesh, which is
            redistributed as the layer needs it. The output is a DTensor then.
        counts: rows of each group, for grouped layers.
    """
    weight, bias = to_local(layer.weight), None if layer.bias is None else to_local(layer.bias)
    mesh = mesh_of(x)
    if mesh is None:
        return apply(x, weight, bias, layer.checked, state=layer.state(), counts=counts, parallel=parallel)
    before, after = _placements(parallel, x.ndim)
    x = x.redistribute(placements=[before])  # pyright: ignore[reportAttributeAccessIssue]
    if parallel.sequence:
        parallel = replace(parallel, length=x.shape[parallel.sequence_dim])
    shape = (*x.shape[:-1], layer.weight.shape[-2])
    y = apply(to_local(x), weight, bias, layer.checked, state=layer.state(), counts=counts, parallel=parallel)
    return _dtensor().from_local(
        y, mesh, [after], run_check=False, shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride()
    )


def _placements(parallel: Parallel, ndim: int) -> tuple[Any, Any]:
    """Of x and of the output."""
    from torch.distributed.tensor import Replicate, Shard

    features = Shard(ndim - 1)
    tokens = Shard(parallel.sequence_dim % ndim) if parallel.sequence else Replicate()
    if parallel.style == "experts":
        return Shard(0), Shard(0)
    return (tokens, features) if parallel.style == "column" else (features, tokens)


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, differentiably; a plain tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]


def from_local(local: Tensor, like: Tensor) -> Tensor:
    """What `to_local` undoes: a part as a DTensor that is cut evenly, and lies as another does; if that is plain, itself."""
    mesh = mesh_of(like)
    if mesh is None:
        return local
    return _dtensor().from_local(local, mesh, like.placements, run_check=False)  # pyright: ignore[reportAttributeAccessIssue]


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
        mesh = mesh_of(x)
        if mesh is None:
            return self.normalized(x)
        y = self.normalized(to_local(x))
        placements = x.placements  # pyright: ignore[reportAttributeAccessIssue]
        return _dtensor().from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

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
