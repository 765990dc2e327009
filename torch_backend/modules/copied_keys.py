"""Random keys of copied layers: two of one model have different ones, and a copy of a whole model has the model's.

`copy.deepcopy` and pickle copy a layer with its key. Copies of a model are compared, and run alike. Copies that stand in one
model (`nn.TransformerEncoder(layer, 3)`) would round by the same random bits: so a layer that is registered in a module beside
another with its key gets a new one, which follows from that key. No generator is asked, and every rank does the same.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..linear.recipe_layer import RecipeLayer
from ..quantized_tensor.keys import copied_key

_listening: list[Any] = []


def note_copied(layer: RecipeLayer) -> None:
    """Notes that a layer with a random key is a copy; from then on modules are looked at where they are registered."""
    vars(layer)["copied"] = True
    if not _listening:
        _listening.append(register_module_module_registration_hook(_part_keys))


def _part_keys(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Gives layers of a module that is registered other keys where its parent has layers with theirs."""
    new = _keyed(module) if isinstance(module, nn.Module) else {}
    if not new:
        return
    beside = {layer: key for layer, key in _keyed(parent).items() if layer not in new}
    if not any("copied" in vars(layer) for layer in (*new, *beside)):
        return
    taken = {tuple(key.tolist()) for key in beside.values()}
    for key in new.values():
        own = key.clone()
        for number in itertools.count(1):
            if (words := tuple(key.tolist())) not in taken:
                taken.add(words)
                break
            key.copy_(copied_key(own, number))


def _keyed(module: nn.Module) -> dict[RecipeLayer, Tensor]:
    """Returns the layers inside a module that have a random key, with their keys."""
    layers = (layer for layer in module.modules() if isinstance(layer, RecipeLayer))
    found = {layer: layer._buffers.get("rng_key") for layer in layers}
    return {layer: key for layer, key in found.items() if type(key) is Tensor and not key.is_meta}
