"""Whole tensors from the rows of ranks, many in one collective.

Where a mesh of one axis cuts the rows of a tensor evenly, the whole is the ranks' rows one behind the other: what an all-gather
leaves, without a copy. Tensors that lie otherwise are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockfp.sharding.placement import Shard, from_dtensor

from ..quantized_tensor.sharding import as_dtensor
from ..torch_internals import functional_collectives as collectives

Key = tuple[str, str]
"""Name of a parameter, and of its part."""


@dataclass(frozen=True)
class Rows:
    """A tensor of which each rank of a group has as many rows.

    Attributes:
        read: returns this rank's rows.
        shape: of the whole.
        ranks, group: how many ranks the group has, and its name.
    """

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    ranks: int
    group: str


def rows_of(param: Tensor, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Rows | None:
    """Describes a tensor that is cut as a parameter is; None where its whole isn't the ranks' rows as they come.

    Args:
        param: the parameter, a DTensor or not.
        shape: of the whole.
        read: returns this rank's part.
    """
    dtensor = as_dtensor(param)
    if dtensor is None or from_dtensor(dtensor.placements) != (Shard(0),):
        return None
    mesh, own = dtensor.device_mesh, read()
    if not own.ndim or own.device.type != mesh.device_type or (mesh.size() * own.shape[0], *own.shape[1:]) != shape:
        return None
    return Rows(read, shape, mesh.size(), mesh.get_group().group_name)


def gather_rows(rows: Mapping[Key, Rows]) -> dict[Key, Tensor]:
    """Gathers the wholes on every rank, in one collective for each group; all of its ranks ask for the same ones."""
    groups: dict[str, list[Key]] = {}
    for key, one in rows.items():
        groups.setdefault(one.group, []).append(key)
    found: dict[Key, Tensor] = {}
    for group, keys in groups.items():
        # Bytes, so that one collective takes all dtypes.
        own = [rows[key].read().contiguous() for key in keys]
        sent = [one.reshape(-1).view(torch.uint8) for one in own]
        received = collectives.all_gather_into_tensor_coalesced(sent, rows[keys[0]].ranks, group)
        for key, one, whole in zip(keys, own, received, strict=True):
            found[key] = collectives.wait_tensor(whole).view(one.dtype).view(rows[key].shape)
    return found
