"""Delayed scaling: casts use the scale of earlier steps and record amaxes, which become new scales after each optimizer step.

`AdamW` and `Adam` update the scales of the layers whose weights they hold; `update_scales_after` makes any optimizer do it; and
`update_scales` is the step by hand (`scale_watch` says which layer is whose, and refuses steps that nobody follows up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from blockfp.definition import scaling
from blockfp.definition.bits import INFINITY
from blockfp.formats import ElementFormat
from blockfp.recipes import Delayed, Recipe

from ..custom_ops import cuda, cuda_delayed
from ..custom_ops.collectives import max_reduce
from ..custom_ops.kernels import kernels_for
from ..quantized_tensor import sharding
from ..torch_internals import dispatch_modes, foreach_copy_, uncounted
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
    newest = (history if now else uncounted(history))[:1]
    newest.copy_(torch.maximum(newest, finite))


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
    together = _together(layers, found)
    newest = [max_reduce(_newest(some), groups) if groups or made_up else None for (groups, _), some in together.items()]
    if made_up and not any(bool((one > 0).any()) for one in newest if one is not None):
        return
    for some, amaxes in zip(together.values(), newest, strict=True):
        _update(some, amaxes)


class _Scaled(NamedTuple):
    """An operand that is scaled: the names of its layer's history and scale, its element and options, and both in numbers."""

    history: str
    scale: str
    element: ElementFormat
    options: Delayed
    numbers: cuda_delayed.Numbers


class _Operands(NamedTuple):
    """Operands on one device, whose amaxes the same groups of ranks share.

    Attributes:
        kinds: of each one.
        state: of each one its history and its scale, one operand after the other.
    """

    kinds: list[_Scaled]
    state: list[Tensor]


def _together(
    layers: Sequence[RecipeLayer], replicas: Sequence[DistributedDataParallel | None]
) -> dict[tuple[tuple[str, ...], torch.device], _Operands]:
    """Returns all operands by groups and device, in the order of first appearance, which is the same on every rank."""
    found: dict[tuple[tuple[str, ...], torch.device], _Operands] = {}
    kinds_of: dict[int, list[_Scaled]] = {}
    for layer, groups in zip(layers, _groups_of(layers, replicas), strict=True):
        # An attribute of a module that is a buffer costs a Python call each.
        recipe, buffers = layer.linear_recipe, cast(Any, layer._buffers)
        kinds = kinds_of.get(id(recipe))
        if kinds is None:
            kinds = kinds_of[id(recipe)] = _scaled(recipe)
        for kind in kinds:
            history = buffers[kind.history]
            some = found.get((groups, history.device))
            if some is None:
                some = found[groups, history.device] = _Operands([], [])
            some.kinds.append(kind)
            some.state.extend((history, buffers[kind.scale]))
    return found


def _groups_of(layers: Sequence[RecipeLayer], replicas: Sequence[DistributedDataParallel | None]) -> Sequence[tuple[str, ...]]:
    """Returns for each layer the names of the groups of ranks that share its amaxes."""
    if not scale_watch.several_ranks():
        return [()] * len(layers)
    weights = scale_watch.weights_of(layers)
    meshes = [None if weight is None else sharding.mesh_of(weight) for weight in weights]
    along = {id(mesh): _groups_along(mesh) for mesh in {id(mesh): mesh for mesh in meshes}.values()}
    return [
        along[id(mesh)] if ddp is None else (cast(Any, ddp.process_group).group_name,)
        for mesh, ddp in zip(meshes, replicas, strict=True)
    ]


def _scaled(recipe: Recipe) -> list[_Scaled]:
    """Returns what is scaled of a layer."""
    assert recipe.delayed is not None
    found = []
    for operand in ("input", "gradient"):
        format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
        if format is not None:
            element, options = format.element, recipe.delayed
            numbers = cuda_delayed.numbers(element, options)
            found.append(_Scaled(f"{operand}_amax_history", f"{operand}_scale", element, options, numbers))
    return found


def _groups_along(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Names of the groups along every axis of a weight's mesh that has more than one rank."""
    if mesh is None:
        return ()
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _newest(some: _Operands) -> Tensor:
    """The newest amaxes of operands: int32, fp32 bits, whose order is that of the magnitudes."""
    if _by_kernel(some):
        newest = some.state[0].new_empty(len(some.kinds), dtype=torch.int32)
        if cuda_delayed.newest_amaxes(newest, some.state):
            return newest
    return torch.stack([history[0] for history in some.state[::2]]).view(torch.int32)


def _update(some: _Operands, newest: Tensor | None) -> None:
    """Takes the step of operands; `newest` stands instead of their histories' first entries, where ranks share these."""
    if _by_kernel(some) and cuda_delayed.update_scales([kind.numbers for kind in some.kinds], newest, some.state):
        increment_version(some.state)
        return
    histories, scales = some.state[::2], some.state[1::2]
    if newest is not None:
        foreach_copy_([history[0] for history in histories], list(newest.view(torch.float32).unbind()))
    # Of one element after the other: what it is made of are runs then, and all elements are one chain of launches.
    order = sorted(range(len(histories)), key=lambda place: some.kinds[place].element.name)
    by_options: dict[Delayed, list[int]] = {}
    for place in order:
        by_options.setdefault(some.kinds[place].options, []).append(place)
    for options, places in by_options.items():
        elements = [some.kinds[place].element for place in places]
        before = torch.stack([histories[place] for place in places])
        scale = torch.stack([scales[place] for place in places])
        moved, new = scaling.update(before.t(), scale, elements, margin=options.margin, algorithm=options.algorithm)
        # Rows of one tensor, laid out as the histories: columns would be a launch each.
        foreach_copy_([histories[place] for place in places], list(moved.t().contiguous().unbind()))
        foreach_copy_([scales[place] for place in places], list(new.unbind()))


def _by_kernel(some: _Operands) -> bool:
    """Returns whether the CUDA kernels may take the state as it lies: on their device, and nothing traces or watches."""
    on = some.state[0]
    if not on.is_cuda or kernels_for(on) is not cuda or dispatch_modes() or torch.compiler.is_compiling():
        return False
    return set(map(type, some.state)) == {Tensor}
