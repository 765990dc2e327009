"""A check that ranks hold the same kinds of weights, made once before their codes first go from one to another.

Codes of two formats may have as many bytes, and what one rank sent would be decoded by another's format without an error. So
before a group of FSDP2's parameters is gathered for the first time, every rank of their mesh puts a number that stands for the
names, formats, shapes, dtypes and recipes of these parameters into one reduction, which gives the largest and the least: where
they differ every rank raises. What FSDP2 made of a model says whether that was done, and it is alike on all ranks, whatever
they hold, so they enter the reduction together; later gathers look no further than that. What FSDP2 can't do with quantized
weights is refused at the same time. DistributedDataParallel's broadcasts of rank 0's weights ask in the same way (`bucket`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.recipes import Recipe

from ..custom_ops.collectives import max_reduce
from ..torch_internals import frame_above, fsdp_name, fsdp_param, fsdp_place, gathered_together, renew_fsdp_param
from .sharding import local_of, mesh_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_agreed: WeakSet[Any] = WeakSet()
"""FSDP2's own entries (`FSDPParam`) for parameters on whose kind all ranks agree."""


def agree_before_gather() -> None:
    """Checks what is gathered together, called by the hook before a gather: the first of a group asks for all of them.

    Raises:
        ValueError: on every rank, where ranks hold different kinds of a weight, both of which are named; or where FSDP2 is to
            reshard a weight to a smaller mesh after the forward.
    """
    caller = frame_above(2)
    param = fsdp_param(caller)
    if param is None or param in _agreed or torch.compiler.is_compiling():
        return
    _refuse_smaller_mesh(param)
    together = gathered_together(caller, param)
    meshes = list(dict.fromkeys(mesh for one in together if (mesh := mesh_of(one.sharded_param)) is not None))
    for mesh in meshes:
        kinds = {fsdp_name(one): _kind(one) for one in together if mesh_of(one.sharded_param) == mesh}
        agree([mesh.get_group(axis) for axis in range(mesh.ndim)], kinds, param.device, "FSDP gathers")
    _agreed.update(together)


def renew(param: Any) -> None:
    """Makes FSDP2's record of a parameter anew, whose local tensor is of another format now; the next gather asks again."""
    renew_fsdp_param(param)
    _agreed.discard(param)


def recipe_of(module: nn.Module) -> str | None:
    """A description of a layer's recipe, in the same words in every process; None where it has none."""
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        return None
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "name"}
    told = (f"{name}={sorted(value) if isinstance(value, frozenset) else value}" for name, value in values.items())
    return f"{recipe} ({', '.join(told)})"


def kind_of(param: Tensor) -> str:
    """A description of a parameter that holds on every rank: its format, shape and dtype."""
    format = getattr(local_of(param), "format", None)
    return f"{format or 'in high precision'} of shape {tuple(param.shape)} and {param.dtype}"


def _refuse_smaller_mesh(param: Any) -> None:
    """Raises ValueError where a parameter is to be resharded to a smaller mesh after the forward.

    FSDP2 keeps one plain tensor of such a parameter, and would fail after the forward with "Expected 1 all_gather_output".
    """
    smaller, mesh = getattr(param, "post_forward_mesh_info", None), getattr(param, "mesh_info", None)
    ranks = getattr(smaller, "shard_mesh_size", None)
    if smaller is not None and ranks != getattr(mesh, "shard_mesh_size", None):
        raise ValueError(
            f"reshard_after_forward={ranks}: FSDP2 can't reshard a quantized weight to a smaller mesh; use "
            "reshard_after_forward=True or False"
        )


def _kind(param: Any) -> str:
    recipe = recipe_of(fsdp_place(param)[0])
    return kind_of(param.sharded_param) + (f", recipe {recipe}" if recipe else "")


def agree(groups: Sequence[ProcessGroup], kinds: dict[str, str], device: torch.device, who: str) -> None:
    """Checks that all ranks of some groups hold the same kinds of weights. Every rank calls it.

    Args:
        groups: the process groups, of the axes of a mesh or one.
        kinds: what this rank holds (`kind_of`), by name.
        device: that the groups' collectives take.
        who: moves the weights between ranks, with what it does to them.

    Raises:
        ValueError: on every rank, where they don't.
    """
    number = int.from_bytes(hashlib.sha256(repr(sorted(kinds.items())).encode()).digest()[:7], "little")
    # The largest of the negated numbers is the least of them, negated: both in one reduction.
    bounds = max_reduce(torch.tensor([number, -number], device=device), [group.group_name for group in groups])
    largest, least = bounds.tolist()
    if largest + least == 0:
        return
    everyones = [(dist.get_rank(), kinds)]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyones, group=group)
        everyones = [one for some in gathered for one in some]
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in sorted(everyones, key=lambda one: one[0]):
        for name, kind in theirs.items():
            other, known = first.setdefault(name, (rank, kind))
            if known != kind:
                raise ValueError(
                    f"{name} is {known} on rank {other} and {kind} on rank {rank}: {who} weights that are alike on all "
                    "ranks; convert the model with the same recipe everywhere"
                )
    names = [", ".join(theirs) for _, theirs in everyones]
    raise ValueError(f"ranks hold different weights: {' on one, '.join(dict.fromkeys(names))} on another; {who} those of all")
