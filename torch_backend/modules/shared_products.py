"""Tensor-parallel layers and norms whose input may be a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp.recipes import Recipe

from ..linear.linear import LinearState, apply
from ..linear.tensor_parallel import outputs
from ..linear.tensor_parallel.parallel import Parallel
from ..quantized_tensor.sharding import as_dtensor, check_mesh, from_local, mesh_of, to_local


def multiply_shared(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    parallel: Parallel,
    *,
    state: LinearState,
    counts: Sequence[int] | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """Runs `linear` on x with this rank's shard of a layer's weight and bias, which are DTensors.

    x is this rank's part, with equally many tokens on every rank; or a DTensor on the same mesh, which is redistributed as the
    layer needs, and the output is one too. A DTensor on another mesh raises ValueError. `counts` holds the number of rows of
    each group, `offs` their ends.
    """
    check_mesh(x, weight)
    dtensor, features = as_dtensor(x), weight.shape[-2]
    weight, bias = to_local(weight), None if bias is None else to_local(bias)
    if dtensor is None:
        return apply(x, weight, bias, recipe, state=state, counts=counts, offs=offs, parallel=parallel)
    before, after = _placements(parallel, x.ndim)
    mesh, x = dtensor.device_mesh, dtensor.redistribute(placements=[before])
    if parallel.sequence:
        parallel = replace(parallel, length=x.shape[parallel.sequence_dim])
    y = apply(to_local(x), weight, bias, recipe, state=state, counts=counts, offs=offs, parallel=parallel)
    return from_local(y, mesh, [after], (*x.shape[:-1], features))


def _placements(parallel: Parallel, ndim: int) -> tuple[Any, Any]:
    """Returns the placements of x and the output."""
    from torch.distributed.tensor import Replicate, Shard

    features = Shard(ndim - 1)
    tokens = Shard(parallel.sequence_dim % ndim) if parallel.sequence else Replicate()
    return (tokens, features) if parallel.style == "column" else (features, tokens)


# ---- norms


class _SummedGradient(torch.autograd.Function):
    """Identity on a parameter that each rank applies to its own tokens; sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: str) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return outputs.all_reduce(gradient, ctx.group), None


class SharedNorm(nn.Module):
    """A norm after `parallelize`: its parameters are replicated DTensors, and each rank normalizes its tokens.

    `group` is the process group over which parameters' gradients are summed if ranks hold different tokens. `sequence` says
    whether they do for a plain x; a DTensor's placement says so itself.
    """

    group: str
    sequence: bool
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        x, own_tokens = self._laid_out(x)
        y = self.normalized(to_local(x), self.group if own_tokens else None)
        return from_local(y, mesh_of(x), getattr(x, "placements", ()), x.shape)

    def _laid_out(self, x: Tensor) -> tuple[Tensor, bool]:
        """Returns x with whole features on every rank, and whether ranks hold different tokens."""
        dtensor = as_dtensor(x)
        if dtensor is None:
            return x, self.sequence
        from torch.distributed.tensor import Replicate, Shard

        for parameter in self.parameters(recurse=False):
            check_mesh(x, parameter)
        tokens = x.ndim - len(self.normalized_shape)
        # Partial sums and feature shards can't be normalized separately.
        laid_out = [
            placement if isinstance(placement, Shard) and placement.dim < tokens else Replicate()
            for placement in dtensor.placements
        ]
        return dtensor.redistribute(placements=laid_out), isinstance(laid_out[0], Shard)

    def parameter(self, name: str, summed_over: str | None) -> Tensor | None:
        """Returns a parameter's local tensor; its gradient is summed over `summed_over` unless that is None."""
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
"""torch's norms and their classes after `parallelize`."""
