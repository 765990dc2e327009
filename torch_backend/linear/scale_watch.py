"""The register of layers with delayed scaling: which of them a step of an optimizer concerns, and which DDP model has them.

A layer records amaxes, and an optimizer knows parameters alone. So layers enter here when they are made, copied or unpickled;
those that an optimizer's step concerns are found by their weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..quantized_tensor import sharding
from ..torch_internals import ddp_models
from .recipe_layer import RecipeLayer


@dataclass
class _Watched:
    """A layer's entry in the register.

    Attributes:
        sharded: its weight as FSDP2 shards it, and an optimizer holds it, while the layer may hold the whole one.
        replicas: the DDP model that it is part of, or False; None where that isn't known yet.
    """

    sharded: Tensor | None = None
    replicas: weakref.ref[DistributedDataParallel] | bool | None = None


_watched: weakref.WeakKeyDictionary[RecipeLayer, _Watched] = weakref.WeakKeyDictionary()


def watch(layer: RecipeLayer) -> None:
    """Enters a layer with delayed scaling."""
    _watched[layer] = _Watched()


def unwatch(layer: RecipeLayer) -> None:
    """Takes a layer out that has no delayed scaling any more."""
    _watched.pop(layer, None)


def note_sharded(layer: RecipeLayer, weight: Tensor) -> None:
    """Notes that this DTensor is the layer's weight: sharded, or gathered and still cut by tensor parallelism."""
    known, mesh = _watched[layer], sharding.mesh_of(weight)
    assert mesh is not None
    before = None if known.sharded is None else sharding.mesh_of(known.sharded)
    if before is None or mesh.ndim >= before.ndim:
        # No weak reference: a tensor that has one can't be moved in place.
        known.sharded = weight


def delayed_layers(model: nn.Module) -> list[RecipeLayer]:
    """Returns the layers of a model that have delayed scaling."""
    layers = (module for module in model.modules() if isinstance(module, RecipeLayer))
    return [layer for layer in layers if layer.linear_recipe.delayed is not None]


def concerned_by(optimizer: Optimizer) -> list[RecipeLayer]:
    """Returns the layers whose weights an optimizer holds, and those whose weights are frozen, which no optimizer holds.

    In the order in which they were made, which is every rank's.
    """
    # Copied at once, since other threads may make layers; by `data`, since a dictionary with weak keys calls Python for each.
    entries: dict[weakref.ref[RecipeLayer], _Watched] = _watched.data.copy()  # pyright: ignore[reportAttributeAccessIssue]
    if not entries:
        return []
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = []
    for ref, known in entries.items():
        layer = ref()
        if layer is None:
            continue
        # FSDP2 changes the weight that a layer holds between forward and backward.
        own, sharded = layer._parameters, known.sharded
        weight = own["weight"] if "weight" in own else layer.held_weight()
        if id(weight) in held or id(sharded) in held or _is_frozen(weight, sharded):
            found.append(layer)
    return found


def _is_frozen(weight: Tensor | None, sharded: Tensor | None) -> bool:
    return weight is not None and not weight.requires_grad and (sharded is None or not sharded.requires_grad)


def weights_of(layers: Iterable[RecipeLayer]) -> list[Tensor | None]:
    """Returns the weights as an optimizer holds them, or as the layers do if no optimizer is known to."""
    entries = ((layer, _watched[layer].sharded) for layer in layers)
    return [layer.held_weight() if sharded is None else sharded for layer, sharded in entries]


def several_ranks() -> bool:
    """Returns whether this process is one of several ranks, which may share amaxes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def replicas_of(layers: Sequence[RecipeLayer]) -> list[DistributedDataParallel | None]:
    """Returns the DDP model that each layer is part of, which neither layer nor parameter knows."""
    if not several_ranks():
        return [None] * len(layers)
    known = [_watched[layer] for layer in layers]
    new = [one for one in known if one.replicas is None]
    if new and (models := ddp_models()):
        for model in models:
            for module in delayed_layers(model):
                _watched[module].replicas = weakref.ref(model)
        for one in new:
            one.replicas = False if one.replicas is None else one.replicas
    return [one.replicas() if isinstance(one.replicas, weakref.ref) else None for one in known]
