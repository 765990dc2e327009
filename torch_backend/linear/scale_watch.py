"""A register of the layers with delayed scaling and of who updates their scales; it refuses steps that nobody follows up.

A layer records amaxes, and an optimizer knows parameters alone. So layers enter here when they are made, and an optimizer's
layers are those whose weights it holds. A layer has one keeper, which updates its scales after each of its own steps: an
`AdamW` of this library or a hook. Where a layer has none, a step of any optimizer leaves it with stale scales, and the second
such step in a row is refused, before it changes anything: torch calls the two hooks below around the steps of every optimizer.
What trains by other ways than an optimizer of torch is known by what it writes into weights, and the forward behind the second
such step is refused. Nothing of it is done in compiled code; what the host knows decides, and no device is waited for (but for
layers that are frozen and have no keeper: whether they were trained through stands in their history alone).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..quantized_tensor import sharding
from ..torch_internals import ddp_models, version_of
from .recipe_layer import RecipeLayer


def _nobody() -> None:
    """Stands where there is no weak reference to a keeper."""


@dataclass
class _Watched:
    """A layer's entry in the register.

    Attributes:
        stale: steps of optimizers that train it since its scales were updated.
        stale_frozen: steps of any optimizer since then while it was frozen. Apart from the others: a layer that is frozen while
            another model takes a step may have recorded nothing.
        by_hand: whether they were updated by hand since the last step.
        keeper: returns who updates them, or None.
        sharded: its weight as FSDP2 shards it, and an optimizer holds it, while the layer may hold the whole one.
        replicas: the DDP model that it is part of; None where that isn't known yet.
        stepped: whether an optimizer of torch has trained it.
        seen: how often its history of gradients and its scale had been written, in the first forward behind the last write of
            its weight.
        unfollowed: how often its weight was written behind a backward, in a row, with the scales left as they were.
    """

    stale: int = 0
    stale_frozen: int = 0
    by_hand: bool = False
    keeper: Callable[[], Any] = _nobody
    sharded: Tensor | None = None
    replicas: weakref.ref[DistributedDataParallel] | bool | None = None
    stepped: bool = False
    seen: tuple[int, int] = (0, 0)
    unfollowed: int = 0


_Entry = tuple[RecipeLayer, _Watched]

_watched: weakref.WeakKeyDictionary[RecipeLayer, _Watched] = weakref.WeakKeyDictionary()


def watch(layer: RecipeLayer) -> None:
    """Enters a layer with delayed scaling."""
    if not _watched:
        _listen()
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


def _all() -> list[_Entry]:
    """All layers with their entries, in the order in which they were made, which is every rank's.

    Taken at once, since other threads may make some. By the dictionary below: each step asks, of all layers, and the methods of
    one with weak keys would be some calls of Python for each.
    """
    entries: dict[weakref.ref[RecipeLayer], _Watched] = _watched.data.copy()  # pyright: ignore[reportAttributeAccessIssue]
    return [(layer, known) for ref, known in entries.items() if (layer := ref()) is not None]


def layers_of(optimizer: Optimizer) -> list[RecipeLayer]:
    """The layers whose weights an optimizer holds, in the order of its parameters."""
    return [layer for layer, _ in _held(optimizer, _all())]


def _held(optimizer: Optimizer, entries: Iterable[_Entry]) -> list[_Entry]:
    """Those of some layers whose weights an optimizer holds, in the order of its parameters.

    FSDP2 changes the weight that a layer holds between forward and backward.
    """
    by_weight: dict[int, list[_Entry]] = {}
    for entry in entries:
        layer, known = entry
        weight, sharded = layer.held_weight(), known.sharded
        if weight is not None:
            by_weight.setdefault(id(weight), []).append(entry)
        if sharded is not None and sharded is not weight:
            by_weight.setdefault(id(sharded), []).append(entry)
    if not by_weight:
        return []
    found: dict[RecipeLayer, _Watched] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in by_weight:
                found.update(by_weight[id(param)])
    return list(found.items())


def _weights(layer: RecipeLayer, known: _Watched) -> list[Tensor]:
    """The weight as the layer holds it now, and as an optimizer does."""
    return [weight for weight in (layer.held_weight(), known.sharded) if weight is not None]


def weights_of(layers: Iterable[RecipeLayer]) -> list[Tensor | None]:
    """The weights as an optimizer holds them, or as the layers do if no optimizer is known to."""
    entries = ((layer, _watched[layer].sharded) for layer in layers)
    return [layer.held_weight() if sharded is None else sharded for layer, sharded in entries]


def keep(layers: Iterable[RecipeLayer], keeper: Any) -> None:
    """Makes `keeper` update these layers' scales from now on, as long as it lives."""
    _keep([_watched[layer] for layer in layers], keeper)


def _keep(entries: Iterable[_Watched], keeper: Any) -> None:
    reference = weakref.ref(keeper)
    for known in entries:
        known.keeper, known.stale, known.stale_frozen = reference, 0, 0


def layers_to_update(optimizer: Optimizer) -> list[RecipeLayer]:
    """The layers that an optimizer is to update after the step it begins, whose keeper it is from now on.

    Without those that have another keeper, or were updated by hand after their backward and before the keeper's first step.
    """
    held = _held(optimizer, _all())
    own = [(layer, known) for layer, known in held if (keeper := known.keeper()) is None or keeper is optimizer]
    _keep([known for _, known in own], optimizer)
    update = [layer for layer, known in own if not known.by_hand]
    for _, known in own:
        known.by_hand = False
    return update


def by_hand(layers: Iterable[RecipeLayer]) -> list[RecipeLayer]:
    """Returns the layers that a call by hand is to update, those without a keeper, and notes the call."""
    own = [(layer, known) for layer in layers if (known := _watched[layer]).keeper() is None]
    for _, known in own:
        known.stale, known.stale_frozen, known.by_hand = 0, 0, True
    return [layer for layer, _ in own]


def several_ranks() -> bool:
    """Returns whether this process is one of several ranks, which may share amaxes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def replicas_of(layers: Sequence[RecipeLayer]) -> list[DistributedDataParallel | None]:
    """The DDP model that each layer is part of. Neither layer nor parameter knows it: all such models are looked for, once."""
    if not several_ranks():
        return [None] * len(layers)
    known = [_watched[layer] for layer in layers]
    new = [one for one in known if one.replicas is None]
    if new:
        for model in ddp_models():
            for module in delayed_layers(model):
                _watched[module].replicas = weakref.ref(model)
        for one in new:
            one.replicas = False if one.replicas is None else one.replicas
    return [one.replicas() if isinstance(one.replicas, weakref.ref) else None for one in known]


# ---- refusing steps


_listening: list[Any] = []


def _listen() -> None:
    if not _listening:
        _listening.append(register_optimizer_step_pre_hook(_before_step))
        _listening.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not _watched:
        return
    if _has_closure(args, kwargs):
        for layer in layers_of(optimizer):
            _watched[layer].stepped = True
    else:
        _refuse_stale(optimizer)


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not _watched:
        return
    if _has_closure(args, kwargs):
        # The forward and the backward, and perhaps an update by hand, were part of the step.
        _refuse_stale(optimizer)
    # Of layers that have a keeper, and were not updated by hand, nothing is to be noted.
    concerned = [(layer, known) for layer, known in _all() if known.by_hand or known.keeper() is None]
    if not concerned:
        return
    counts = moves(optimizer)
    for _, known in _held(optimizer, concerned):
        known.by_hand, known.stepped = False, True
        known.stale += counts and known.keeper() is None
    for layer, known in concerned:
        if _is_frozen(layer, known):
            known.by_hand = False
            known.stale_frozen += counts and known.keeper() is None


def look_at_written(layer: RecipeLayer, written: list[bool]) -> None:
    """Refuses a forward of a layer that was trained twice, by no optimizer of torch, and whose scales were left as they were.

    fastai's and Keras' optimizers are none, and a loop may write weights by hand. A write behind a backward counts as a step.

    Args:
        written: the weight's, which is put back.
    """
    if not torch.is_grad_enabled():
        return
    known, history, scale = _watched[layer], layer.gradient_amax_history, layer.input_scale
    assert history is not None
    assert scale is not None
    # Of a weight that is cast at use torch's own operations record amaxes, and count it.
    now, before = (version_of(history), version_of(scale)), known.seen
    if known.stepped or known.keeper() is not None or now[1] != before[1]:
        known.unfollowed = 0
    elif now[0] != before[0]:
        if known.unfollowed:
            raise RuntimeError(
                "the weight of a layer with delayed scaling was written after each of two backwards, by no "
                "torch.optim.Optimizer, and its scales were not updated: delayed scaling would use them as they are for ever; "
                "call bfp.update_scales(model) after each step (in fastai and Keras in a callback), or evaluate under "
                "torch.no_grad()"
            )
        known.unfollowed = 1
    known.seen, written[0] = now, False


def moves(optimizer: Optimizer) -> bool:
    """Returns whether a step moves anything: by one that doesn't torch's distributed checkpoint makes an optimizer's state."""
    return any(not _is_zero(group.get("lr", 1.0)) for group in optimizer.param_groups)


def _is_zero(lr: float | Tensor) -> bool:
    if isinstance(lr, Tensor):
        return lr.device.type == "cpu" and float(lr) == 0
    return lr == 0


def _has_closure(args: tuple, kwargs: dict[str, Any]) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _refuse_stale(optimizer: Optimizer) -> None:
    trained: list[RecipeLayer] = []
    # One that updates the scales of what it trains becomes their keeper in this very step.
    if not getattr(optimizer, "updates_scales", False):
        # No name for those that are stale: it would keep a model of nobody's from the garbage collector below.
        held = _held(optimizer, [one for one in _all() if one[1].stale and one[1].keeper() is None])
        trained = [layer for layer, known in held if _has_gradient(layer, known)]
    frozen = 0
    if not trained and _stale_frozen():
        # A model that nobody refers to any more may still be there, with what its last forward recorded.
        gc.collect()
        frozen = len(_stale_frozen())
    if trained or frozen:
        what = f"{len(trained)} layers that it trains" if trained else f"{frozen} frozen layers"
        use = "use bfp.AdamW, or call bfp" if trained else "call bfp"
        raise RuntimeError(
            f"{type(optimizer).__name__} takes another step, and the scales of {what} were not updated after the last one: "
            f"delayed scaling would use them as they are for ever; {use}.update_scales_after(optimizer, model) once, or "
            "bfp.update_scales(model) after each step"
        )


def _has_gradient(layer: RecipeLayer, known: _Watched) -> bool:
    return any(weight.grad is not None for weight in _weights(layer, known))


def _is_frozen(layer: RecipeLayer, known: _Watched) -> bool:
    """Returns whether no optimizer trains a layer's weight."""
    weights = _weights(layer, known)
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def _stale_frozen() -> list[RecipeLayer]:
    """Layers that nobody trains, whose amaxes became no scales after a step; not those that share a kept one's history."""
    watched = _all()
    candidates = [(layer, known) for layer, known in watched if known.stale_frozen and known.keeper() is None]
    stale = [layer for layer, known in candidates if _is_frozen(layer, known) and _recorded(layer)]
    if not stale:
        return stale
    kept = {_history_at(layer) for layer, known in watched if known.keeper() is not None} - {0}
    return [layer for layer in stale if _history_at(layer) not in kept]


def _history_at(layer: RecipeLayer) -> int:
    """Returns where a layer's history of inputs lies: averages of models (ignite's EMAHandler) take the model's own buffers."""
    history = layer.input_amax_history
    return history.data_ptr() if type(history) is Tensor else 0


def _recorded(layer: RecipeLayer) -> bool:
    """Returns whether amaxes were recorded that became no scales; waits for the device."""
    histories = (layer.input_amax_history, layer.gradient_amax_history)
    readable = [history for history in histories if type(history) is Tensor and not history.is_meta]
    if not readable or (readable[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return any(float(history[0]) > 0 for history in readable)
