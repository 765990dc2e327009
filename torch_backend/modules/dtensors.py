"""DTensors in and out of layers: what this rank holds of one, and one of what this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..quantized_tensor.sharding import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, differentiably; a plain tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]


def from_local(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any], shape: Sequence[int] | None = None) -> Tensor:
    """A DTensor of which this rank holds `local`, cut evenly if its shape is not given; without a mesh `local` itself."""
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    whole = {} if shape is None else {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)
