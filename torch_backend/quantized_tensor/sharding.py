"""Converts DTensors to the core's `Sharding` and this rank's `Region`, and local tensors to DTensors.

Meshes and groups are looked up at each use, never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.sharding.placement import Mesh, Placement, Region, Replicate, Sharding, from_dtensor

from ..distributed_internals import dtensor_like, local_tensor
from ..ops.dtensors import when_imported
from ..torch_internals import functional_collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
else:
    DTensor = ()  # no tensor is one before `torch.distributed.tensor` is imported


@when_imported
def _set_class(module: Any) -> None:
    globals()["DTensor"] = module.DTensor


ONE_RANK = Mesh((1,), ("one",))

# An optimizer step repeats these lookups for every parameter.
_kept = lru_cache(maxsize=4096)


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """Returns the tensor if it is a DTensor, else None."""
    return tensor if isinstance(tensor, DTensor) else None


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Returns the device mesh of a DTensor, or None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed_alike(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have equal meshes and placements."""
    return mesh_of(tensor) == mesh_of(other) and getattr(tensor, "placements", None) == getattr(other, "placements", None)


def sharding_of(tensor: Tensor) -> Sharding:
    """Returns a DTensor's sharding on its mesh, or a plain tensor's on a mesh of one rank.

    Raises ValueError for placements without a counterpart in the core, or several separate runs on a rank.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return unsharded(tuple(tensor.shape))
    return _sharding(tuple(dtensor.shape), core_mesh(dtensor.device_mesh), from_dtensor(dtensor.placements))


@_kept
def unsharded(shape: tuple[int, ...]) -> Sharding:
    """Returns the sharding of a plain tensor, on a mesh of one rank."""
    return Sharding(shape, ONE_RANK, (Replicate(),))


@_kept
def _sharding(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Sharding:
    return Sharding(shape, mesh, placements)


def core_mesh(mesh: DeviceMesh) -> Mesh:
    """Returns the core's `Mesh` with a device mesh's shape and axis names."""
    return _mesh(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()))


_mesh = _kept(Mesh)


def local_of(tensor: Tensor) -> Tensor:
    """Returns a DTensor's local tensor (quantized or plain), or a plain tensor itself.

    Looked up at each use: FSDP2 replaces a short shard when it first gathers it.
    """
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def rank_in(tensor: Tensor, lies: Sharding | None = None) -> int:
    """Returns this rank's index in the mesh of `sharding_of(tensor)` (`lies`, if known); 0 for a plain tensor.

    Raises ValueError if this rank is not in the mesh.
    """
    mesh = mesh_of(tensor)
    if mesh is None:
        return 0
    return (lies.mesh if lies is not None else core_mesh(mesh)).rank(_coordinate(mesh))


def region_of(tensor: Tensor, lies: Sharding | None = None) -> Region:
    """Returns the box of the unsharded tensor that this rank holds; raises ValueError if the local shape doesn't match."""
    lies = sharding_of(tensor) if lies is None else lies
    region = _region(lies, rank_in(tensor, lies))
    local = local_of(tensor)
    if tuple(local.shape) != region.shape:
        raise ValueError(
            f"a tensor placed as {lies} has shape {region.shape} on this rank, but its local tensor has {tuple(local.shape)}"
        )
    return region


@_kept
def _region(sharding: Sharding, rank: int) -> Region:
    return sharding.region(rank)


def own_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """Returns a view of this rank's shard of `whole`, placed as `tensor`, which has the same global shape.

    torch's `distribute_tensor` differs: FSDP2 gives ranks other rows of an unevenly divided strided DTensor.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return whole
    # The core shards matrices; a vector counts as one column.
    shape = (*tensor.shape, 1, 1)[: max(tensor.ndim, 2)]
    lies = _sharding(shape, core_mesh(dtensor.device_mesh), from_dtensor(dtensor.placements))
    return whole[_region(lies, rank_in(tensor, lies)).slices[: tensor.ndim]]


def group_name(tensor_or_mesh: Tensor | DeviceMesh, axis: str) -> str:
    """Returns the name of the process group along an axis of `core_mesh`, for collectives in compiled code.

    Raises ValueError for a plain tensor or an unknown axis.
    """
    mesh = mesh_of(tensor_or_mesh) if isinstance(tensor_or_mesh, Tensor) else tensor_or_mesh
    if mesh is None:
        raise ValueError("a plain tensor is on one rank and has no process group")
    return mesh.get_group(core_mesh(mesh).axis(axis)).group_name


def leading_rank(mesh: DeviceMesh, axes: int) -> int:
    """Returns this rank's index along the first `axes` axes of a mesh: the mesh given to `fully_shard`.

    They divide the batch, including HSDP's replica axis. The tensor-parallel axis comes last in a parameter's mesh, whatever
    its position in the parent mesh.
    """
    return _mesh(tuple(mesh.shape)[:axes], ()).rank(_coordinate(mesh)[:axes])


def place_on(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns a one-dimensional mesh's length and this rank's index, with few Python calls: FSDP2 asks at every gather."""
    return mesh.shape[0], _coordinate(mesh)[0]


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh} of the tensor")
    return coordinate


# ---- conversions between DTensors and local tensors


def check_mesh(x: Tensor, parameter: Tensor) -> None:
    """Raises ValueError unless a DTensor is on the layer's mesh, or on a one-dimensional mesh with the same group."""
    mesh, own = mesh_of(x), mesh_of(parameter)
    if mesh is None or own is None or mesh == own:
        return
    if mesh.ndim != 1 or mesh.get_group().group_name != own.get_group().group_name:
        raise ValueError(
            f"x is a DTensor on {mesh}, but the layer is sharded over {own}: redistribute x to that mesh, or pass this "
            "rank's part (x.to_local())"
        )


def to_local(tensor: Tensor) -> Tensor:
    """Returns a DTensor's local tensor, differentiably, or a plain tensor itself."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()


def from_local(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any], shape: Sequence[int] | None = None) -> Tensor:
    """Returns a DTensor of this rank's local tensor, evenly sharded unless `shape` is given; without a mesh, `local`."""
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    whole = {} if shape is None else {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)


def placed(param: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Returns a DTensor of this rank's `local` tensor with a parameter's mesh and placements, and by default its shape.

    If the parameter is not a DTensor, returns `local`.
    """
    mesh, shape = mesh_of(param), tuple(param.shape) if shape is None else shape
    if mesh is not None and local.device.type not in (mesh.device_type, "meta"):
        return dtensor_like(param, local, torch.empty(shape, dtype=local.dtype, device="meta"))
    return from_local(local, mesh, getattr(param, "placements", ()), shape)


def replicated(param: Tensor, whole: Tensor) -> Tensor:
    """Returns a replicated DTensor of a tensor that every rank of the parameter's mesh has."""
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(param)
    assert mesh is not None
    return from_local(whole, mesh, [Replicate()] * mesh.ndim)


def reduced(param: Tensor, lies: Sharding, tensor: Tensor, op: str) -> Tensor:
    """Reduces a tensor ("max" or "sum") over the mesh axes that shard a parameter; the result stays on its device."""
    mesh, device = mesh_of(param), tensor.device
    assert mesh is not None
    # The groups of parameters that FSDP2 offloads to the CPU may support GPU tensors only.
    tensor = tensor.to(mesh.device_type)
    for axis in dict.fromkeys(name for dim in range(len(lies.shape)) for name in lies.order(dim)):
        group = group_name(param, axis)
        sent = functional_collectives.all_reduce(tensor.contiguous(), op, group)
        tensor = functional_collectives.wait_tensor(sent)
    return tensor.to(device)
