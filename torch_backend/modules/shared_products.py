"""The product of a layer that a tensor-parallel group shares, where x may be a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from blockfp.recipes import Recipe

from ..linear.linear import LinearState, apply
from ..linear.parallel import Parallel
from ..quantized_tensor.sharding import as_dtensor, check_mesh, from_local, to_local


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
    """Runs `linear` on x with this rank's part of a layer.

    Args:
        x: what this rank holds of it, the same number of tokens on every rank; or a DTensor on the tensor-parallel mesh, which
            is redistributed as the layer needs it. The output is a DTensor then.
        weight, bias: DTensors on that mesh.
        recipe: the `Recipe`.
        parallel: how its group shares the layer.
        state: the layer's buffers.
        counts, offs: rows of each group, or where it ends, for grouped layers.

    Raises:
        ValueError: a DTensor on another mesh.
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
    """Returns the placements of x and of the output."""
    from torch.distributed.tensor import Replicate, Shard

    features = Shard(ndim - 1)
    tokens = Shard(parallel.sequence_dim % ndim) if parallel.sequence else Replicate()
    return (tokens, features) if parallel.style == "column" else (features, tokens)
