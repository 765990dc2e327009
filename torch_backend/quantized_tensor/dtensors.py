"""DTensors made of local tensors and taken apart, all in one place.

`sharding` reads how one lies. Here it is made: as a layer's output, as a parameter lies, or replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockfp.sharding.placement import Sharding

from ..torch_internals import dtensor_like, functional_collectives
from .sharding import group_name, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(x: Tensor, parameter: Tensor) -> None:
    """Checks that a DTensor lies on the mesh of a layer's parameter, or on another of one axis with the same group.

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
    """Returns a DTensor's local tensor, differentiably; a plain tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]


def from_local(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any], shape: Sequence[int] | None = None) -> Tensor:
    """Makes a DTensor of this rank's local tensor, cut evenly if its shape is not given; without a mesh returns `local`."""
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    whole = {} if shape is None else {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)


def placed(param: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Makes a local tensor a DTensor that lies as a parameter does; returns it as it is where that is no DTensor.

    Args:
        param: the parameter.
        local: this rank's part.
        shape: of the whole; by default the parameter's.
    """
    mesh, shape = mesh_of(param), tuple(param.shape) if shape is None else shape
    if mesh is not None and local.device.type not in (mesh.device_type, "meta"):
        return dtensor_like(param, local, torch.empty(shape, dtype=local.dtype, device="meta"))  # pyright: ignore[reportArgumentType]
    return from_local(local, mesh, getattr(param, "placements", ()), shape)


def replicated(param: Tensor, whole: Tensor) -> Tensor:
    """Makes a tensor that every rank of a parameter's mesh has a DTensor."""
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(param)
    assert mesh is not None
    return from_local(whole, mesh, [Replicate()] * mesh.ndim)


def reduced(param: Tensor, lies: Sharding, tensor: Tensor, op: str) -> Tensor:
    """Reduces a tensor ("max" or "sum") over the mesh axes that cut a parameter, on the tensor's own device."""
    mesh, device = mesh_of(param), tensor.device
    assert mesh is not None
    # Parameters that FSDP2 keeps on the CPU belong to groups that may speak to GPUs only.
    tensor = tensor.to(mesh.device_type)
    for axis in dict.fromkeys(name for dim in range(len(lies.shape)) for name in lies.order(dim)):
        group = group_name(param, axis)
        sent = functional_collectives.all_reduce(tensor.contiguous(), op, group)
        tensor = functional_collectives.wait_tensor(sent)
    return tensor.to(device)
