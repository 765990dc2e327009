"""Delayed scaling: casts use the scale of earlier steps and record amaxes, which become new scales after each optimizer step.

`AdamW` and `Adam` update the scales of the layers whose weights they hold; `update_scales_after` makes any optimizer do it; and
`update_scales` is the step by hand (`scale_watch` says which layer is whose, and refuses steps that nobody follows up).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from blockfp.definition import scaling
from blockfp.definition.bits import INFINITY
from blockfp.formats import ElementFormat
from blockfp.recipes import Delayed, Recipe

from ..custom_ops import cuda
from ..custom_ops.collectives import max_reduce
from ..custom_ops.kernels import kernels_for
from ..quantized_tensor import sharding
from ..torch_internals import foreach_copy_
from . import scale_watch
from .recipe_layer import RecipeLayer
from .scale_watch import delayed_layers


def record(history: Tensor, amax: Tensor, *, now: bool = False) -> None:
    """Sets history[0] to max(history[0], amax) in place, with a non-finite amax as 0 (`definition.scaling.record`).

    Args:
        history: float32 [length], newest first.
        amax: int32 [1], fp32 bits.
        now: whether nothing traces, and no mode watches operations: on a GPU it is one launch then.
    """
    if now and history.is_cuda and kernels_for(history) is cuda:
        cuda.library().record_amax(amax, history)
        return
    finite = torch.where(amax >= INFINITY, torch.zeros_like(amax), amax).view(torch.float32)
    history[:1].copy_(torch.maximum(history[:1], finite))


class _Scaled(NamedTuple):
    """One operand's state, and the options and groups by which it is updated."""

    history: Tensor
    scale: Tensor
    element: ElementFormat
    options: Delayed
    groups: tuple[str, ...]


def update_scales(model: nn.Module) -> None:
    """Updates the scales by hand: amaxes that were recorded since the last time become the scales of the next casts.

    `AdamW`, `Adam` and `update_scales_after` make this call needless: layers that they update are left alone. Otherwise call it
    once per optimizer step, on every rank alike. The newest amaxes of all layers are max-reduced together, one collective for
    each axis of the mesh over which a layer's weight lies (FSDP2), or over the ranks of DDP. Layers without delayed scaling are
    left alone, so it may be called for any model.

    Raises:
        ValueError: the model is wrapped by DDP that broadcasts buffers, which would overwrite the amaxes of all ranks but one.
    """
    layers = delayed_layers(model)
    replicas = model if isinstance(model, DistributedDataParallel) else None
    check_buffers(layers, replicas)
    update_layers(scale_watch.by_hand(layers), replicas)


def update_scales_after(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Makes an optimizer update the scales of delayed scaling after each of its steps.

    For optimizers other than `AdamW` and `Adam` of this library, and for layers that are trained through while their weights
    are frozen (LoRA), which no optimizer holds. Layers without delayed scaling are left alone. A step that a gradient scaler
    skips is none.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        model: the model, as its forward is called: wrapped by DDP, sharded, compiled.

    Returns:
        A handle, whose `remove()` undoes it.

    Raises:
        TypeError: optimizer or model is something else.
        ValueError: no layer of the model has delayed scaling; or, at a step, DDP broadcasts buffers.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> bfp.update_scales_after(optimizer, model)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: after steps of another "
            "(fastai's, Keras') call bfp.update_scales(model) by hand"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not delayed_layers(model):
        raise ValueError("no layer of model has delayed scaling: there is nothing to update after a step")
    keeper = _After(model)
    scale_watch.keep(delayed_layers(model), keeper)
    return optimizer.register_step_post_hook(keeper)


class _After:
    """The hook of `update_scales_after`; as long as it lives its layers are its own."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, optimizer: Optimizer, *_) -> None:
        layers = delayed_layers(self.model)
        scale_watch.keep(layers, self)
        replicas = self.model if isinstance(self.model, DistributedDataParallel) else None
        check_buffers(layers, replicas)
        update_layers(layers, replicas, made_up=not scale_watch.moves(optimizer))


def check_buffers(layers: Sequence[RecipeLayer], replicas: DistributedDataParallel | None = None) -> None:
    """Refuses DDP that would overwrite amaxes.

    Raises:
        ValueError: it broadcasts buffers.
    """
    found = [replicas] if replicas is not None and layers else scale_watch.replicas_of(layers)
    if any(ddp is not None and ddp.broadcast_buffers for ddp in found):
        raise ValueError(
            "DDP broadcasts the buffers of rank 0 over the amaxes that other ranks recorded: pass it "
            "forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)"
        )


@torch.no_grad()
def update_layers(
    layers: Sequence[RecipeLayer], replicas: DistributedDataParallel | None = None, *, made_up: bool = False
) -> None:
    """Updates the scales of these layers, in an order that is the same on every rank.

    Args:
        layers: with delayed scaling.
        replicas: the DDP model that they are of; by default the one that is found.
        made_up: whether the step may be one without a forward, that makes an optimizer's state (`scale_watch.moves`). It waits
            for the device then, and leaves everything where no amax was recorded: the histories may have been loaded before.
    """
    found = scale_watch.replicas_of(layers) if replicas is None else [replicas] * len(layers)
    operands = list(_operands(layers, found))
    for groups, members in _by(operands, lambda one: one.groups):
        if not groups:
            continue
        newest = torch.stack([one.history[0] for one in members])
        # Magnitudes are ordered like their bits.
        reduced = max_reduce(newest.view(torch.int32), groups).view(torch.float32)
        _write([one.history[0] for one in members], reduced.unbind())
    if made_up and not any(float(one.history[0]) > 0 for one in operands):
        return
    # Of one element after the other: what it is made of are runs then, and all elements are one chain of launches.
    operands.sort(key=lambda one: one.element.name)
    for (options, _), members in _by(operands, lambda one: (one.options, one.history.device)):
        histories = torch.stack([one.history for one in members])
        scales = torch.stack([one.scale for one in members])
        elements = [one.element for one in members]
        moved, new = scaling.update(histories.t(), scales, elements, margin=options.margin, algorithm=options.algorithm)
        # Rows of one tensor, laid out as the histories: columns would be a launch each.
        _write([one.history for one in members], moved.t().contiguous().unbind())
        _write([one.scale for one in members], new.unbind())


def _write(into: list[Tensor], values: Iterable[Tensor]) -> None:
    foreach_copy_(into, list(values))


def _operands(layers: Iterable[RecipeLayer], replicas: Iterable[DistributedDataParallel | None]) -> Iterator[_Scaled]:
    """Yields the state of each operand that is scaled."""
    known: dict[int, list[tuple[str, str, ElementFormat]]] = {}
    for layer, ddp in zip(layers, replicas, strict=True):
        recipe, group = layer.linear_recipe, None if ddp is None else cast(Any, ddp.process_group)
        assert recipe.delayed is not None
        groups = _groups(scale_watch.weight_of(layer)) if group is None else (group.group_name,)
        named = known.get(id(recipe))
        if named is None:
            named = known[id(recipe)] = _scaled(recipe)
        for history, scale, element in named:
            yield _Scaled(getattr(layer, history), getattr(layer, scale), element, recipe.delayed, groups)


def _scaled(recipe: Recipe) -> list[tuple[str, str, ElementFormat]]:
    """Returns the names of a layer's history and scale, and the element, of each operand that is scaled."""
    found = []
    for operand in ("input", "gradient"):
        format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
        if format is not None:
            found.append((f"{operand}_amax_history", f"{operand}_scale", format.element))
    return found


def _groups(weight: Tensor) -> tuple[str, ...]:
    """Names of the groups along every axis of a weight's mesh that has more than one rank."""
    mesh = sharding.mesh_of(weight)
    if mesh is None:
        return ()
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _by(operands: Iterable[_Scaled], key) -> list[tuple]:
    """Pairs (key, members) in the order of first appearance, which is the same on every rank."""
    found: dict = {}
    for one in operands:
        found.setdefault(key(one), []).append(one)
    return list(found.items())
