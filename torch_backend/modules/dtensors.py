"""DTensors in and out of layers: what this rank holds of one, and one of what this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..quantized_tensor.sharding import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(x: Tensor, parameter: Tensor) -> None:
    """Whether a DTensor lies on the mesh of a layer's parameter, or on another of one axis with the same group.

    Raises:
        ValueError: another mesh.
    """
    mesh, own = mesh_of(x), mesh_of(parameter)
    if mesh is None or own is None or mesh == own:
        return
    if mesh.ndim != 1 or mesh.get_group().group_name != own.get_group().group_name:
        raise ValueError(
            f"x is a DTensor on {mesh}, and the layer is cut over {own}: redistribute x to that mesh, or pass what this rank "
            "holds of it (x.to_local())"
        )


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
