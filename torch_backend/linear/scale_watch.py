"""Registers layers with delayed scaling, to find those that an optimizer step concerns and the DDP model of each.

A layer records amaxes, but an optimizer knows only parameters. Layers register when they are made, copied or unpickled, and are
found by their weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from blockfp.recipes import Recipe

from ..distributed_internals import ddp_models
from ..quantized_tensor import sharding
from .joint import Joint


@dataclass
class _Watched:
    """A layer's entry in the register.

    Attributes:
        sharded: its weight as FSDP2 shards it and an optimizer holds it, while the layer may hold the gathered one.
        replicas: the DDP model that contains it, or False for none; None if not yet known.
    """

    sharded: Tensor | None = None
    replicas: weakref.ref[DistributedDataParallel] | bool | None = None


_watched: weakref.WeakKeyDictionary[RecipeLayer, _Watched] = weakref.WeakKeyDictionary()


def watch(layer: RecipeLayer) -> None:
    """Registers a layer with delayed scaling."""
    _watched[layer] = _Watched()


def unwatch(layer: RecipeLayer) -> None:
    """Removes a layer that no longer has delayed scaling."""
    _watched.pop(layer, None)


def note_sharded(layer: RecipeLayer, weight: Tensor) -> None:
    """Records this DTensor as the layer's weight, sharded, or gathered and still cut by tensor parallelism; the larger mesh
    wins.
    """
    known, mesh = _watched[layer], sharding.mesh_of(weight)
    assert mesh is not None
    before = None if known.sharded is None else sharding.mesh_of(known.sharded)
    if before is None or mesh.ndim >= before.ndim:
        # Not a weak reference, which would prevent moving the tensor in place.
        known.sharded = weight


def delayed_layers(model: nn.Module) -> list[RecipeLayer]:
    """Returns a model's layers with delayed scaling."""
    layers = (module for module in model.modules() if isinstance(module, RecipeLayer))
    return [layer for layer in layers if layer.linear_recipe.delayed is not None]


def concerned_by(optimizer: Optimizer) -> list[RecipeLayer]:
    """Returns the layers whose weights an optimizer holds, and those with frozen weights, which no optimizer holds.

    They are in order of creation, which is the same on every rank.
    """
    # Copied at once, since other threads may create layers; through `data`, since a WeakKeyDictionary calls Python per key.
    entries: dict[weakref.ref[RecipeLayer], _Watched] = _watched.data.copy()  # pyright: ignore[reportAttributeAccessIssue]
    if not entries:
        return []
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = []
    for ref, known in entries.items():
        layer = ref()
        if layer is None:
            continue
        # FSDP2 switches the layer's weight between sharded and gathered.
        own, sharded = layer._parameters, known.sharded
        weight = own["weight"] if "weight" in own else layer.held_weight()
        if id(weight) in held or id(sharded) in held or _is_frozen(weight, sharded):
            found.append(layer)
    return found


def _is_frozen(weight: Tensor | None, sharded: Tensor | None) -> bool:
    return weight is not None and not weight.requires_grad and (sharded is None or not sharded.requires_grad)


def weights_of(layers: Iterable[RecipeLayer]) -> list[Tensor | None]:
    """Returns the weights as optimizers hold them, or else as the layers do."""
    entries = ((layer, _watched[layer].sharded) for layer in layers)
    return [layer.held_weight() if sharded is None else sharded for layer, sharded in entries]


def several_ranks() -> bool:
    """Returns whether there are several ranks, which may share amaxes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def replicas_of(layers: Sequence[RecipeLayer]) -> list[DistributedDataParallel | None]:
    """Returns each layer's DDP model or None; neither layer nor parameter refers to it."""
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


# ---- layers with a recipe


class RecipeLayer(nn.Module):
    """A layer with one weight, a recipe for its products, and the recipe's state in buffers.

    Attributes:
        linear_recipe: the products' `Recipe` (`recipes.for_linear`).
        observed: figures that `observe` collects, or None.
        has_scales: whether delayed scales are known to be above 0; otherwise casts check.
        recorded: whether eager code has recorded amaxes since delayed scaling's last update.
        written: whether a weight that FSDP2 shards was written in place since the layer last looked (`CastWeight`).
        joint: the layers whose input is scaled equally, if eager code has found any; or None.
        apart: whether that ended for good.
    """

    linear_recipe: Recipe
    observed: Tensor | None
    has_scales: bool
    recorded: bool
    written: list[bool]
    joint: Joint | None = None
    apart: bool = False

    weight: nn.Parameter
    input_amax_history: Tensor | None
    input_scale: Tensor | None
    gradient_amax_history: Tensor | None
    gradient_scale: Tensor | None
    rng_key: Tensor | None
    step: Tensor | None

    def held_weight(self) -> Tensor | None:
        """Returns the weight in its current form: whole, sharded or gathered."""
        return self._parameters.get("weight")

    def note_scales(self, found: bool) -> None:
        """Sets whether all scales are above 0."""
        raise NotImplementedError

    def note_updated(self) -> None:
        """Notes that the scales now reflect all recorded amaxes."""
        raise NotImplementedError
