"""Delayed scaling: casts use the scale of earlier steps and record amaxes, `update_scales` turns them into new scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockfp import scaling
from blockfp.bits import INFINITY
from blockfp.formats import ElementFormat
from blockfp.recipes import Delayed, Recipe

from ..custom_ops.collectives import max_reduce
from ..quantized_tensor import sharding


def record(history: Tensor, amax: Tensor) -> None:
    """history[0] = max(history[0], amax) in place, a non-finite amax as 0 (`blockfp.scaling.record`).

    Args:
        history: float32 [length], newest first.
        amax: int32 [1], fp32 bits.
    """
    finite = torch.where(amax >= INFINITY, torch.zeros_like(amax), amax).view(torch.float32)
    history[:1].copy_(torch.maximum(history[:1], finite))


class _Scaled(NamedTuple):
    """One operand's state, and what decides how it moves on."""

    history: Tensor
    scale: Tensor
    element: ElementFormat
    options: Delayed
    groups: tuple[str, ...]


@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """The step of delayed scaling: amaxes that were recorded since the last call become the scales of the next casts.

    Call it once per optimizer step, on every rank alike. The newest amaxes of all layers are max-reduced together, one
    collective for each axis of the mesh over which a layer's weight lies (FSDP2), or over the ranks of DDP. Layers without
    delayed scaling are left alone, so it may be called for any model.

    Raises:
        ValueError: the model is wrapped by DDP that broadcasts buffers, which would overwrite the amaxes of all ranks but one.
    """
    ddp = isinstance(model, DistributedDataParallel)
    operands = list(_operands(model))
    if not operands:
        return
    if ddp and model.broadcast_buffers:
        raise ValueError(
            "DDP broadcasts the buffers of rank 0 over the amaxes that other ranks recorded: pass it "
            "forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)"
        )
    for groups, members in _by(operands, lambda one: one.groups):
        newest = torch.stack([one.history[0] for one in members])
        # Magnitudes are ordered like their bits.
        reduced = max_reduce(newest.view(torch.int32), groups).view(torch.float32)
        _write([one.history[0] for one in members], reduced.unbind())
    for (element, options, _), members in _by(operands, lambda one: (one.element, one.options, one.history.device)):
        histories = torch.stack([one.history for one in members], dim=1)
        scales = torch.stack([one.scale for one in members])
        moved, new = scaling.update(histories, scales, element, margin=options.margin, algorithm=options.algorithm)
        _write([one.history for one in members], moved.unbind(1))
        _write([one.scale for one in members], new.unbind())


def _write(into: list[Tensor], values: Iterable[Tensor]) -> None:
    torch._foreach_copy_(into, list(values))  # pyright: ignore[reportPrivateImportUsage]


def _operands(model: nn.Module) -> Iterator[_Scaled]:
    ranks = model.process_group if isinstance(model, DistributedDataParallel) else None
    for module in model.modules():
        recipe = getattr(module, "checked", None)
        if not isinstance(recipe, Recipe) or recipe.delayed is None:
            continue
        groups = _groups(module.get_parameter("weight")) if ranks is None else (ranks.group_name,)
        for operand in ("input", "gradient"):
            format = recipe.cast(operand).format or recipe.cast(operand, "columnwise").format
            history, scale = getattr(module, f"{operand}_amax_history"), getattr(module, f"{operand}_scale")
            if format is not None:
                yield _Scaled(history, scale, format.element, recipe.delayed, groups)


def _groups(weight: Tensor) -> tuple[str, ...]:
    """Every axis of a weight's mesh: those that divide the batch, and those that divide the layer's operands."""
    mesh = sharding.mesh_of(weight)
    if mesh is None:
        return ()
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _by(operands: Iterable[_Scaled], key) -> list[tuple]:
    """(key, members) in the order of first appearance, which is every rank's."""
    found: dict = {}
    for one in operands:
        found.setdefault(key(one), []).append(one)
    return list(found.items())
