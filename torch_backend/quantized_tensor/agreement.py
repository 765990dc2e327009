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
from dataclasses import fields
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.recipes import Recipe

from ..custom_ops.collectives import max_reduce
from ..torch_internals import frame_above, fsdp_name, fsdp_param, fsdp_place, gathered_together, renew_fsdp_param
from .sharding import local_of, mesh_of

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
        _agree(mesh, kinds, param.device)
    _agreed.update(together)


def renew(param: Any) -> None:
    """Makes FSDP2's record of a parameter anew, whose local tensor is of another format now; the next gather asks again."""
    renew_fsdp_param(param)
    _agreed.discard(param)


def recipe_of(module: nn.Module) -> str | None:
    """A description of a layer's recipe, in the same words in every process; None where it has none."""
    recipe = getattr(module, "recipe", None)
    return told_recipe(recipe) if isinstance(recipe, Recipe) else None


def told_recipe(recipe: Recipe) -> str:
    """A description of a recipe, in the same words in every process."""
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "name"}
    told = (f"{name}={sorted(value) if isinstance(value, frozenset) else value}" for name, value in values.items())
    return f"{recipe} ({', '.join(told)})"


def kind_of(param: Tensor) -> str:
    """A description of a parameter that holds on every rank: its format, shape and dtype."""
    local = local_of(param)
    format, has_codes = getattr(local, "format", None), hasattr(local, "codes")
    kept = format if has_codes else "in high precision" if format is None else f"in high precision, cast to {format},"
    return f"{kept} of shape {tuple(param.shape)} and {param.dtype}"


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Descriptions of the settings of an optimizer's groups, by name."""
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            # Stages of a pipeline have other parameters.
            if name not in ("params", "param_names"):
                found[f"optimizer.param_groups[{i}][{name!r}]"] = repr(value.tolist() if isinstance(value, Tensor) else value)
    return found


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


def _agree(mesh: Any, kinds: dict[str, str], device: torch.device) -> None:
    remedy = "FSDP gathers weights that are alike on all ranks; convert the model with the same recipe everywhere"
    everyones = agree(groups_of(mesh), kinds, device, remedy)
    if everyones:
        names = dict.fromkeys(", ".join(theirs) for theirs in everyones)
        raise ValueError(f"ranks gather different weights together: {' on one, '.join(names)} on another")


def groups_of(mesh: Any) -> list[dist.ProcessGroup]:
    """Returns the groups of a mesh's axes."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def agree(
    groups: list[dist.ProcessGroup], described: dict[str, str], device: torch.device, remedy: str
) -> list[dict[str, str]]:
    """Compares what the ranks of some groups say of themselves, all of which call it, by two numbers.

    Args:
        groups: of the axes of a mesh, or one.
        described: by name.
        device: on which the groups reduce.
        remedy: what to do where one name has two descriptions.

    Returns:
        What each rank says, where they have other names; nothing where all is alike.

    Raises:
        ValueError: on every rank, with the name and what two ranks say of it.
    """
    bounds = max_reduce(number_of(sorted(described.items()), device), [group.group_name for group in groups])
    return [] if int(bounds.sum()) == 0 else refuse_differences(groups, described, remedy)


def number_of(described: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A number that stands for a description, and its negative: [2], of int64 or int32.

    The largest of the negated numbers is the least of them, negated: where ranks agree their sum is 0 after one maximum.
    """
    number = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[: dtype.itemsize - 1], "little")
    return torch.tensor([number, -number], dtype=dtype, device=device)


def refuse_differences(groups: list[dist.ProcessGroup], described: dict[str, str], remedy: str) -> list[dict[str, str]]:
    """Raises what `agree` does, on every rank of some groups; returns what each says where no name has two descriptions."""
    everyones = [(dist.get_rank(), described)]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyones, group=group)
        everyones = [one for some in gathered for one in some]
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in sorted(everyones, key=lambda one: one[0]):
        for name, kind in theirs.items():
            other, known = first.setdefault(name, (rank, kind))
            if known != kind:
                raise ValueError(f"{name} is {known} on rank {other} and {kind} on rank {rank}: {remedy}")
    return [theirs for _, theirs in everyones]
