"""From a DTensor to the core's values: how it lies on its mesh, and which part of it this rank holds.

Nothing here is kept: the mesh and its groups are looked up at the point of use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from blockfp.placement import Mesh, Placement, Region, Replicate, Sharding, from_dtensor

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
else:
    DTensor = ()

ONE_RANK = Mesh((1,), ("one",))

# An optimizer step asks the same of the same values for every parameter.
_kept = lru_cache(maxsize=4096)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The device mesh of a DTensor, or None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two DTensors have one mesh and the same placements."""
    return mesh_of(tensor) == mesh_of(other) and tensor.placements == other.placements  # pyright: ignore[reportAttributeAccessIssue]


def sharding_of(tensor: Tensor) -> Sharding:
    """How a tensor lies: a DTensor on its mesh, a plain tensor whole on a mesh of one rank.

    Raises:
        ValueError: a placement that has no counterpart in the core, or several separate runs on a rank.
    """
    mesh = mesh_of(tensor)
    if mesh is None:
        return Sharding(tuple(tensor.shape), ONE_RANK, (Replicate(),))
    return _sharding(tuple(tensor.shape), core_mesh(mesh), from_dtensor(tensor.placements))  # pyright: ignore[reportAttributeAccessIssue]


@_kept
def _sharding(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Sharding:
    return Sharding(shape, mesh, placements)


def core_mesh(mesh: DeviceMesh) -> Mesh:
    """The core's value of a device mesh: its shape and names."""
    return _mesh(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()))


_mesh = _kept(Mesh)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds: a DTensor's local tensor (quantized or plain), a plain tensor itself.

    It is looked up each time: FSDP2 replaces a short shard when it first gathers it.
    """
    return tensor if mesh_of(tensor) is None else tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]


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
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh} of the tensor")
    return (lies.mesh if lies is not None else core_mesh(mesh)).rank(coordinate)


def region_of(tensor: Tensor, lies: Sharding | None = None) -> Region:
    """What this rank holds of a tensor, as a box of the unsharded one; arguments as for `rank_in`.

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


def data_rank(mesh: DeviceMesh, axis: int = -1) -> int:
    """This rank's coordinate on the axes that divide the batch: one of a mesh, such as FSDP2's, and those outside of it.

    HSDP's axis of replicas lies outside, tensor parallelism's inside. What pipelines divide lies outside too, and is the same
    for all ranks of a layer.

    Args:
        mesh: a mesh with that axis, which may be flattened from several of a larger mesh.
        axis: which of its axes.
    """
    root = mesh._get_root_mesh()
    coordinate = root.get_coordinate()
    if root.ndim == 1 or coordinate is None or mesh.mesh_dim_names is None or root.mesh_dim_names is None:
        return mesh.get_local_rank(axis % mesh.ndim)
    name = mesh.mesh_dim_names[axis]
    innermost = root.mesh_dim_names.index(name) if name in root.mesh_dim_names else _innermost_axis(root, mesh, axis)
    rank = 0
    for outer in range(innermost + 1):
        rank = rank * root.size(outer) + coordinate[outer]
    return rank


def _innermost_axis(root: DeviceMesh, mesh: DeviceMesh, axis: int) -> int:
    """The last axis of the root mesh that an axis flattened from several of its axes runs along."""
    ranks = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis % mesh.ndim))[0]
    first, last = ((root.mesh == rank).nonzero()[0].tolist() for rank in (ranks[0], ranks[-1]))
    return max((outer for outer in range(root.ndim) if first[outer] != last[outer]), default=0)
