"""Delayed scaling: casts use the scales of earlier steps and record amaxes, which give new scales after each optimizer step.

A post-hook of every torch optimizer's step updates the layers that the step concerns (`scale_watch.concerned_by`). If weights
are written without such a step, by hand for example, the layer's next forward notices. An operand that recorded nothing since
its last update doesn't change, so extra updates are harmless.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from blockfp.definition import scaling
from blockfp.definition.bits import INFINITY
from blockfp.formats import ElementFormat
from blockfp.recipes import Delayed, Operand, Recipe

from ..ops import cuda
from ..ops.collectives import max_reduce
from ..ops.kernels import function_for, functions, kernels_for
from ..ops.library import outside_graphs
from ..ops.optimizer import cuda_steps
from ..ops.quantize.operand_ops import delayed_multiplier, tensor_amax
from ..quantized_tensor import sharding
from ..torch_internals import dispatch_modes, foreach_copy_, uncounted
from . import scale_watch
from .call import Call, ends_of
from .joint import Joint, compare_later
from .scale_watch import RecipeLayer, delayed_layers


def record(history: Tensor, amax: Tensor, *, now: bool = False) -> None:
    """Sets history[0] to max(history[0], amax) in place, with a non-finite amax as 0 (`definition.scaling.record`).

    history is float32 [length], newest first; amax is int32 [1], fp32 bits. `now` means that nothing traces or watches
    operations, so a GPU needs one launch.
    """
    if now:
        run = functions.get(("record_amax", history.device), record)
        if run is record:
            run = function_for("record_amax", history)
        if run is not None:
            run(amax, history)
            return
    finite = torch.where(amax >= INFINITY, torch.zeros_like(amax), amax).view(torch.float32)
    newest = (history if now else uncounted(history))[:1]
    newest.copy_(torch.maximum(newest, finite))


def multiplier(
    x: Tensor,
    scale: Tensor | None,
    call: Call,
    operand: Operand,
    *,
    counts: Sequence[int] | None = None,
    offs: Tensor | None = None,
    group: str | None = None,
) -> Tensor | None:
    """Returns an operand's multiplier, float32 (): its delayed scale, or the scale of its current amax if there is none yet.

    x is [tokens, features]; `counts` or `offs` give its groups' row counts or ends. All groups share the scale, and a group
    with a non-finite amax counts as 0, as in the history. Ranks of `group` share the amax, so each must make the same call.
    """
    recipe = call.recipe
    format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
    if scale is None or call.has_scales or format is None:
        return scale
    offs = ends_of(counts, x) if counts is not None else offs
    x = x if call.traced else x.detach().resolve_neg()
    if not x.numel():
        amax = x.new_zeros(1, dtype=torch.int32)
    elif offs is None:
        amax = tensor_amax(x)
    else:
        group_of_row = torch.bucketize(torch.arange(x.shape[0], dtype=torch.int32, device=x.device), offs, right=True)
        # Rows after the last end form a group of their own that doesn't count.
        none = x.new_zeros(offs.shape[0] + 1, dtype=torch.int32)
        amaxes = none.scatter_reduce(0, group_of_row, tensor_amax(x, by_row=True), "amax")
        amax = torch.where(amaxes >= INFINITY, none, amaxes)
        amax = torch.cat([amax[:-1], none[:1]]).amax().view(1)
    amax = max_reduce(amax, () if group is None else (group,))
    return delayed_multiplier(scale, amax, format.name, call.eps)


def update_scales(model: nn.Module) -> None:
    """Updates the scales by hand: amaxes recorded since the last update become the scales of the next casts.

    Steps of torch's optimizers do this automatically, and so does the forward after a hand-written step. Call it, on every rank
    alike, only if neither sees the step: in a compiled model trained by hand. Layers without delayed scaling, or that recorded
    nothing since their last update, don't change. Ranks max-reduce the newest amaxes of all layers in one collective per axis
    of the weights' mesh (FSDP2), or over DDP's ranks.

    Raises:
        ValueError: the model is wrapped by DDP that broadcasts buffers, which would overwrite other ranks' amaxes.
    """
    layers = delayed_layers(model)
    replicas = model if isinstance(model, DistributedDataParallel) else None
    check_buffers(layers, replicas)
    update_layers(layers, replicas)


def update_scales_after(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Makes an optimizer update the scales of all layers of a model after each of its steps.

    Every torch optimizer updates the layers whose weights it holds, and frozen ones; this adds layers that require gradients
    but belong to no optimizer. A step skipped by a gradient scaler doesn't count.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        model: the model whose forward is called: wrapped by DDP, sharded, compiled.

    Returns:
        A handle; its `remove()` undoes this.

    Raises:
        TypeError: optimizer or model has the wrong type.
        ValueError: no layer of the model has delayed scaling; or, at a step, DDP broadcasts buffers.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> bfp.update_scales_after(optimizer, model)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: after steps of another "
            "(fastai's, Keras') the next forward updates the scales by itself"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not delayed_layers(model):
        raise ValueError("no layer of model has delayed scaling: there is nothing to update after a step")
    return optimizer.register_step_post_hook(lambda *_: update_scales(model))


def check_buffers(layers: Sequence[RecipeLayer], replicas: DistributedDataParallel | None = None) -> None:
    """Raises ValueError if DDP broadcasts buffers, which would overwrite amaxes."""
    found = [replicas] if replicas is not None and layers else scale_watch.replicas_of(layers)
    if any(ddp is not None and ddp.broadcast_buffers for ddp in found):
        raise ValueError(
            "DDP broadcasts the buffers of rank 0 over the amaxes that other ranks recorded: pass it "
            "forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)"
        )


# ---- hooks of optimizer steps

_turn = threading.local()
"""`outermost` is a weak reference to the optimizer whose step this thread is in."""


def _outermost() -> Optimizer | None:
    return getattr(_turn, "outermost", lambda: None)()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if scale_watch.several_ranks():
        check_buffers(scale_watch.concerned_by(optimizer))
    outer = _outermost()
    if outer is None or not _holds(outer, optimizer):
        _turn.outermost = weakref.ref(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    (_follow_outside if torch.compiler.is_compiling() else _follow)(optimizer)


def _follow(optimizer: Optimizer) -> None:
    """Updates the layers that a step concerns; of nested optimizers (ZeroRedundancyOptimizer) only the outermost counts."""
    outer = _outermost()
    if outer is optimizer:
        _turn.outermost = lambda: None
    elif outer is not None and _holds(outer, optimizer):
        return
    layers = scale_watch.concerned_by(optimizer)
    if layers:
        update_layers(layers)


_follow_outside = outside_graphs(_follow)


def _holds(outer: Optimizer, inner: Optimizer) -> bool:
    own, others = ({id(param) for group in one.param_groups for param in group["params"]} for one in (outer, inner))
    return others <= own


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


# ---- the update


@torch.no_grad()
def update_layers(layers: Sequence[RecipeLayer], replicas: DistributedDataParallel | None = None) -> None:
    """Updates the scales of layers with delayed scaling, in the same order on every rank.

    `replicas` is the layers' DDP model; by default each layer's is looked up.
    """
    found = scale_watch.replicas_of(layers) if replicas is None else [replicas] * len(layers)
    groups_of = _groups_of(layers, found)
    joints = _joints_in(layers, groups_of)
    for (groups, _), some in _together(layers, groups_of).items():
        _update(some, max_reduce(_newest(some), groups) if groups else None)
    for joint in joints:
        joint.note()
    for layer in layers:
        layer.note_updated()
    compare_later(joints)
    _look_for_scales([layer for layer in layers if not layer.has_scales])


def _look_for_scales(layers: Sequence[RecipeLayer]) -> None:
    """Marks layers whose scales are all set. On a GPU it reads the previous update's copy on the host, so it doesn't block."""
    on_gpu = []
    for layer in layers:
        buffers: Any = layer._buffers
        scales = [buffers[kind.scale] for kind in _scaled(layer.linear_recipe)]
        if not scales or any(type(scale) is not Tensor or scale.is_meta for scale in scales):
            continue
        if scales[0].device.type == "cpu":
            layer.note_scales(all(bool(scale > 0) for scale in scales))
        elif not torch.cuda.is_current_stream_capturing():
            on_gpu.append((layer, torch.stack(scales).min()))
    if not on_gpu:
        return
    for layer, _ in on_gpu:
        before = _copied.pop(layer, None)
        if before is not None:
            before[1].synchronize()
            layer.note_scales(bool(before[0] > 0))
    waiting = [(layer, least) for layer, least in on_gpu if not layer.has_scales]
    if waiting:
        copied = torch.stack([least for _, least in waiting]).to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        _copied.update((layer, (least, done)) for (layer, _), least in zip(waiting, copied.unbind(), strict=True))


_copied: weakref.WeakKeyDictionary[RecipeLayer, tuple[Tensor, torch.cuda.Event]] = weakref.WeakKeyDictionary()
"""Each layer's smallest scale, being copied to the host, with the event of its arrival."""


class _Scaled(NamedTuple):
    """A scaled operand: buffer names of its history and scale, its element type and options, and both as numbers for the
    kernel.
    """

    history: str
    scale: str
    element: ElementFormat
    options: Delayed
    numbers: cuda_steps.Numbers


class _Operands(NamedTuple):
    """Operands on one device whose amaxes the same process groups share.

    Attributes:
        kinds: one per operand.
        state: history and scale of each operand in turn.
    """

    kinds: list[_Scaled]
    state: list[Tensor]


def _joints_in(layers: Sequence[RecipeLayer], groups_of: Sequence[tuple[str, ...]]) -> list[Joint]:
    """Returns the joints that an update of these layers leaves equal: all members are among them, with the same ranks."""
    found: dict[Joint, list[tuple[str, ...]]] = {}
    for layer, groups in zip(layers, groups_of, strict=True):
        if layer.joint is not None:
            found.setdefault(layer.joint, []).append(groups)
    return [
        joint
        for joint, groups in found.items()
        if len(groups) == len(joint.members) and len(set(groups)) == 1 and joint.unchanged()
    ]


def _together(
    layers: Sequence[RecipeLayer], groups_of: Sequence[tuple[str, ...]]
) -> dict[tuple[tuple[str, ...], torch.device], _Operands]:
    """Returns all operands by groups and device, in order of first appearance, which is the same on every rank."""
    found: dict[tuple[tuple[str, ...], torch.device], _Operands] = {}
    kinds_of: dict[int, list[_Scaled]] = {}
    for layer, groups in zip(layers, groups_of, strict=True):
        # Attribute access costs a Python call per buffer.
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
    """Returns, for each layer, the names of the process groups that share its amaxes."""
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
    """Returns the scaled operands of a layer with this recipe."""
    assert recipe.delayed is not None
    found = []
    for operand in ("input", "gradient"):
        format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
        if format is not None:
            element, options = format.element, recipe.delayed
            numbers = cuda_steps.numbers(element, options)
            found.append(_Scaled(f"{operand}_amax_history", f"{operand}_scale", element, options, numbers))
    return found


def _groups_along(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Returns the names of the groups along every mesh axis that has more than one rank."""
    if mesh is None:
        return ()
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _newest(some: _Operands) -> Tensor:
    """Returns the operands' newest amaxes as fp32 bits, int32, which order like the magnitudes."""
    if _by_kernel(some):
        newest = some.state[0].new_empty(len(some.kinds), dtype=torch.int32)
        if cuda_steps.newest_amaxes(newest, some.state):
            return newest
    return torch.stack([history[0] for history in some.state[::2]]).view(torch.int32)


def _update(some: _Operands, newest: Tensor | None) -> None:
    """Updates the operands' histories and scales; `newest`, if ranks share it, replaces history[0]."""
    if _by_kernel(some) and cuda_steps.update_scales([kind.numbers for kind in some.kinds], newest, some.state):
        increment_version(some.state)
        return
    histories, scales = some.state[::2], some.state[1::2]
    if newest is not None:
        foreach_copy_([history[0] for history in histories], list(newest.view(torch.float32).unbind()))
    # Sorted by element type, so that per-element constants form runs and all operands share one chain of launches.
    order = sorted(range(len(histories)), key=lambda place: some.kinds[place].element.name)
    by_options: dict[Delayed, list[int]] = {}
    for place in order:
        by_options.setdefault(some.kinds[place].options, []).append(place)
    for options, places in by_options.items():
        elements = [some.kinds[place].element for place in places]
        before = torch.stack([histories[place] for place in places])
        scale = torch.stack([scales[place] for place in places])
        moved, new = scaling.update(before.t(), scale, elements, margin=options.margin, algorithm=options.algorithm)
        # Contiguous rows in the histories' layout; copying columns would take a launch each.
        foreach_copy_([histories[place] for place in places], list(moved.t().contiguous().unbind()))
        foreach_copy_([scales[place] for place in places], list(new.unbind()))


def _by_kernel(some: _Operands) -> bool:
    """Returns whether the CUDA kernels may update the state: plain tensors on a GPU, and nothing traces or watches."""
    on = some.state[0]
    if not on.is_cuda or kernels_for(on) is not cuda or dispatch_modes() or torch.compiler.is_compiling():
        return False
    return set(map(type, some.state)) == {Tensor}
