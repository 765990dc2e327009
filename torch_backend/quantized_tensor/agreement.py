"""Checks, before codes are first exchanged, that all ranks hold weights of the same formats; gives ranks the same random keys.

Codes of two formats may have equal sizes, so a rank could silently decode another rank's codes by its own format. Before FSDP2
first gathers a parameter group, every rank hashes the names, formats, shapes, dtypes and recipes of its parameters, and one
reduction over the mesh compares the hashes; if they differ every rank raises. Later gathers only look up the FSDPParam records,
which are marked on all ranks together. Settings of FSDP2 that don't work with quantized weights are rejected at the same time.
DistributedDataParallel's broadcasts make the same check (`bucket`).

A layer's random key comes from its own rank's generator. As a checkpoint keeps one rank's, another reduction gives all ranks
the key of the mesh's first rank, before any random bit is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.recipes import Recipe

from ..distributed_internals import fsdp_name, fsdp_param, fsdp_places, gathered_together, renew_fsdp_param
from ..ops.collectives import max_reduce
from ..torch_internals import frame_above
from .sharding import local_of, mesh_of

_agreed: WeakSet[Any] = WeakSet()
"""FSDP2's records (`FSDPParam`) of parameters that were compared."""

_keyed: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()
"""The records by which a layer has got the random key that all ranks have."""


def agree_before_gather() -> None:
    """Compares the parameters that are gathered together; called before each gather, it acts on the first of a group.

    Raises ValueError on every rank if ranks hold different kinds of a weight, or if FSDP2 is to reshard to a smaller mesh.
    """
    caller = frame_above(2)
    param = fsdp_param(caller)
    if param is None or param in _agreed or torch.compiler.is_compiling():
        return
    _refuse_smaller_mesh(param)
    agree_on(gathered_together(caller, param))


def agree_on(params: Sequence[Any]) -> None:
    """Compares the parameters of FSDP2's records, and gives their layers the random keys of each mesh's first rank.

    Collective, unless all were compared before. Raises ValueError on every rank if ranks hold different kinds of a weight.
    """
    if all(param in _agreed for param in params):
        return
    of_meshes: dict[Any, list[Any]] = {}
    for param in params:
        of_meshes.setdefault(mesh_of(param.sharded_param), []).append(param)
    of_meshes.pop(None, None)
    for mesh, members in of_meshes.items():
        kinds: dict[str, str] = {}
        for one in members:
            # Before FSDP2's first forward, parameters of several modules have one name.
            name = fsdp_name(one)
            kinds[f"{name} ({len(kinds)})" if name in kinds else name] = _kind(one)
        _agree(mesh, kinds, members[0].device)
        _share_keys(mesh, members)
    _agreed.update(params)


def renew(param: Any) -> None:
    """Renews FSDP2's record of a parameter whose local tensor has a new format; the next gather compares it again."""
    renew_fsdp_param(param)
    _agreed.discard(param)


def renew_key(layer: nn.Module) -> None:
    """Makes the next gather of a layer's weight share the layer's random key, which has been drawn anew."""
    for param in _keyed.pop(layer, ()):
        _agreed.discard(param)


def recipe_of(module: nn.Module) -> str | None:
    """Returns a layer's recipe as text that is equal in every process, or None."""
    recipe = getattr(module, "recipe", None)
    return told_recipe(recipe) if isinstance(recipe, Recipe) else None


def told_recipe(recipe: Recipe) -> str:
    """Returns a recipe as text that is equal in every process."""
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "name"}
    told = (f"{name}={sorted(value) if isinstance(value, frozenset) else value}" for name, value in values.items())
    return f"{recipe} ({', '.join(told)})"


def kind_of(param: Tensor) -> str:
    """Describes a parameter's format, global shape and dtype, which must be equal on every rank."""
    local = local_of(param)
    format, has_codes = getattr(local, "format", None), hasattr(local, "codes")
    kept = format if has_codes else "in high precision" if format is None else f"in high precision, cast to {format},"
    return f"{kept} of shape {tuple(param.shape)} and {param.dtype}"


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns the settings of an optimizer's groups as text, by name."""
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            # Pipeline stages have different parameters.
            if name not in ("params", "param_names"):
                found[f"optimizer.param_groups[{i}][{name!r}]"] = repr(value.tolist() if isinstance(value, Tensor) else value)
    return found


def _refuse_smaller_mesh(param: Any) -> None:
    """Raises ValueError for a parameter that FSDP2 would reshard to a smaller mesh after the forward.

    FSDP2 keeps a single plain tensor for that and would fail later with "Expected 1 all_gather_output".
    """
    smaller, mesh = getattr(param, "post_forward_mesh_info", None), getattr(param, "mesh_info", None)
    ranks = getattr(smaller, "shard_mesh_size", None)
    if smaller is not None and ranks != getattr(mesh, "shard_mesh_size", None):
        raise ValueError(
            f"reshard_after_forward={ranks}: FSDP2 can't reshard a quantized weight to a smaller mesh; use "
            "reshard_after_forward=True or False"
        )


def _kind(param: Any) -> str:
    recipe = recipe_of(fsdp_places(param)[0][0])
    keys = len(_layers_with_keys(param))
    return kind_of(param.sharded_param) + (f", recipe {recipe}" if recipe else "") + f", random keys: {keys}" * bool(keys)


def _layers_with_keys(param: Any) -> list[Any]:
    """Returns the layers with a random key that multiply with a record's sharded parameter."""
    found = []
    for module, name in fsdp_places(param):
        # Experts have a child for each weight, which keeps its state.
        for layer in (module, *module.children()):
            held = getattr(layer, "held_weight", None)
            if held is not None and layer._buffers.get("rng_key") is not None and held() is module._parameters.get(name):
                found.append(layer)
    return found


def _share_keys(mesh: Any, params: Sequence[Any]) -> None:
    """Writes the mesh's first rank's random keys into the layers of these records; collective if there is one."""
    layers = [(layer, param) for param in params for layer in _layers_with_keys(param)]
    if not layers:
        return
    keys = [local_of(layer.rng_key) for layer, _ in layers]
    words = torch.stack([key.to(params[0].device) for key in keys])
    if any(mesh.get_coordinate()):
        words.fill_(torch.iinfo(words.dtype).min)
    for key, shared in zip(keys, max_reduce(words, [group.group_name for group in groups_of(mesh)]), strict=True):
        key.copy_(shared)
    for layer, param in layers:
        _keyed.setdefault(layer, WeakSet()).add(param)


def _agree(mesh: Any, kinds: dict[str, str], device: torch.device) -> None:
    remedy = "FSDP gathers weights that are alike on all ranks; convert the model with the same recipe everywhere"
    everyones = agree(groups_of(mesh), kinds, device, remedy)
    if everyones:
        names = dict.fromkeys(", ".join(theirs) for theirs in everyones)
        raise ValueError(f"ranks gather different weights together: {' on one, '.join(names)} on another")


def groups_of(mesh: Any) -> list[dist.ProcessGroup]:
    """Returns the process groups of a mesh's axes."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def agree(
    groups: list[dist.ProcessGroup], described: dict[str, str], device: torch.device, remedy: str
) -> list[dict[str, str]]:
    """Compares descriptions, by name, over the ranks of `groups` with one reduction on `device`; collective.

    Raises ValueError on every rank if a name has two descriptions. If only the sets of names differ it returns every rank's
    descriptions, and [] if all are equal.
    """
    bounds = max_reduce(number_of(sorted(described.items()), device), [group.group_name for group in groups])
    return [] if int(bounds.sum()) == 0 else refuse_differences(groups, described, remedy)


def number_of(described: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a hash of a description and its negative, [2] of int64 or int32.

    One maximum gives both the largest hash and the negated smallest one; their sum is 0 if ranks agree.
    """
    number = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[: dtype.itemsize - 1], "little")
    return torch.tensor([number, -number], dtype=dtype, device=device)


def refuse_differences(groups: list[dist.ProcessGroup], described: dict[str, str], remedy: str) -> list[dict[str, str]]:
    """Gathers all descriptions and raises ValueError if a name has two; else returns every rank's descriptions."""
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
