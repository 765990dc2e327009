"""The core's values for a DTensor: its `Sharding`, and the `Region` that this rank holds.

Nothing here is kept: the mesh and its groups are looked up at the point of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.sharding.placement import Mesh, Placement, Region, Replicate, Sharding, from_dtensor

from ..torch_internals import dtensor_like, functional_collectives, local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
else:
    DTensor = ()

ONE_RANK = Mesh((1,), ("one",))

# An optimizer step asks the same of the same values for every parameter.
_kept = lru_cache(maxsize=4096)


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """The tensor itself, known to be a DTensor; None for a plain one."""
    return tensor if isinstance(tensor, DTensor) else None


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The device mesh of a DTensor, or None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed_alike(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors lie on one mesh with the same placements, or both on none."""
    return mesh_of(tensor) == mesh_of(other) and getattr(tensor, "placements", None) == getattr(other, "placements", None)


def sharding_of(tensor: Tensor) -> Sharding:
    """The sharding of a tensor: a DTensor's on its mesh, a plain tensor's whole on a mesh of one rank.

    Raises:
        ValueError: a placement that has no counterpart in the core, or several separate runs on a rank.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return unsharded(tuple(tensor.shape))
    return _sharding(tuple(dtensor.shape), core_mesh(dtensor.device_mesh), from_dtensor(dtensor.placements))


@_kept
def unsharded(shape: tuple[int, ...]) -> Sharding:
    """Returns how a plain tensor lies: whole, on a mesh of one rank."""
    return Sharding(shape, ONE_RANK, (Replicate(),))


@_kept
def _sharding(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Sharding:
    return Sharding(shape, mesh, placements)


def core_mesh(mesh: DeviceMesh) -> Mesh:
    """The core's value of a device mesh: its shape and names."""
    return _mesh(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()))


_mesh = _kept(Mesh)


def local_of(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds: a DTensor's local tensor (quantized or plain), a plain tensor itself.

    It is looked up each time: FSDP2 replaces a short shard when it first gathers it.
    """
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def rank_in(tensor: Tensor, lies: Sharding | None = None) -> int:
    """This rank's number in the mesh of `sharding_of(tensor)`; 0 for a plain tensor.

    Args:
        tensor: a DTensor or a plain tensor.
        lies: `sharding_of(tensor)`, where it is at hand.

    Raises:
        ValueError: this rank is not in the mesh.
    """
    mesh = mesh_of(tensor)
    if mesh is None:
        return 0
    return (lies.mesh if lies is not None else core_mesh(mesh)).rank(_coordinate(mesh))


def region_of(tensor: Tensor, lies: Sharding | None = None) -> Region:
    """The box of the unsharded tensor that this rank holds; arguments as for `rank_in`.

    Raises:
        ValueError: the local tensor is not of the shape that the placements mean.
    """
    lies = sharding_of(tensor) if lies is None else lies
    region = _region(lies, rank_in(tensor, lies))
    local = local_of(tensor)
    if tuple(local.shape) != region.shape:
        raise ValueError(
            f"a tensor that lies {lies} has shape {region.shape} on this rank, but its local tensor has {tuple(local.shape)}"
        )
    return region


@_kept
def _region(sharding: Sharding, rank: int) -> Region:
    return sharding.region(rank)


def own_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """A view of this rank's part of a plain tensor that is whole, where `tensor`, of the same whole shape, lies.

    Not what torch's `distribute_tensor` gives: where nothing divides evenly, FSDP2 gives the ranks of a strided DTensor others.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return whole
    # The core knows matrices: a vector is one of one column.
    shape = (*tensor.shape, 1, 1)[: max(tensor.ndim, 2)]
    lies = _sharding(shape, core_mesh(dtensor.device_mesh), from_dtensor(dtensor.placements))
    return whole[_region(lies, rank_in(tensor, lies)).slices[: tensor.ndim]]


def group_name(tensor_or_mesh: Tensor | DeviceMesh, axis: str) -> str:
    """The name of the process group along a mesh axis, as collectives in compiled code take it.

    Args:
        tensor_or_mesh: a DTensor, or its mesh.
        axis: the axis's name in `core_mesh`.

    Raises:
        ValueError: a plain tensor, which has no mesh, or an axis the mesh hasn't.
    """
    mesh = mesh_of(tensor_or_mesh) if isinstance(tensor_or_mesh, Tensor) else tensor_or_mesh
    if mesh is None:
        raise ValueError("a plain tensor lies on one rank and has no process group")
    return mesh.get_group(core_mesh(mesh).axis(axis)).group_name


def leading_rank(mesh: DeviceMesh, axes: int) -> int:
    """This rank's number along the first axes of a parameter's mesh, those of the mesh that `fully_shard` was given.

    These axes divide the batch, HSDP's axis of replicas too. Tensor parallelism's axis comes last, wherever it lies in the mesh
    that both were taken from.

    Raises:
        ValueError: this rank is not in the mesh.
    """
    return _mesh(tuple(mesh.shape)[:axes], ()).rank(_coordinate(mesh)[:axes])


def place_on(mesh: DeviceMesh) -> tuple[int, int]:
    """The length of a one-dimensional mesh, and this rank's number in it, in few of torch's steps: FSDP2 asks at every gather.

    Raises:
        ValueError: this rank is not in the mesh.
    """
    return mesh.shape[0], _coordinate(mesh)[0]


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh} of the tensor")
    return coordinate


# ---- DTensors made of local tensors, and taken apart


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
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()


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
        return dtensor_like(param, local, torch.empty(shape, dtype=local.dtype, device="meta"))
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
