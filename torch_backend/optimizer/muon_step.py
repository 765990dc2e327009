"""Carries out Muon's step of matrices: two AdamW steps, and Newton-Schulz of whole matrices in between.

momentum     a kernel call per device (`muon.momentum_coefficients`), which rounds it as AdamW's moments
  |
  v
direction    in the iteration's dtype: parts travel to each matrix's owner (`sharding.owners`), and results come back
  |
  v
weight       a step of AdamW whose gradient is the direction (`muon.coefficients`): masters, codes, and weights without masters
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import muon
from blockfp.sharding import owners
from blockfp.sharding.owners import Part, Stage

from ..quantized_tensor import sharding
from ..torch_internals import functional_collectives as collectives
from .local_parameter import MOMENT_NAMES, MOMENTUM_NAME, SCALE_NAMES, SCALES_OF, LocalParameter
from .optimizer_step import carry_out, update

# Size of a batch, in elements on one rank: its moments of 0, directions and whole matrices are in memory at once.
_TOGETHER = 1 << 26


def carry_out_muon(todo: list[LocalParameter], key: tuple[int, int]) -> None:
    """Takes the steps of matrices in place. `todo` has the same order on every rank."""
    for batch in _batches(todo):
        states = [one.state for one in batch]
        try:
            _take_momenta(batch, key)
            _orthogonalize(batch)
            for one, state in zip(batch, states, strict=True):
                zeros = {name: torch.zeros(one.local.shape, device=one.local.device) for name in MOMENT_NAMES}
                one.begin(state | zeros)
            carry_out(batch, key, {})
        finally:
            for one, state in zip(batch, states, strict=True):
                one.state = state


def _batches(todo: list[LocalParameter]) -> Iterator[list[LocalParameter]]:
    batch: list[LocalParameter] = []
    elements = 0
    for one in todo:
        own = math.prod(one.lies.regions[0].shape)  # no rank's part is larger
        if batch and elements + own > _TOGETHER:
            yield batch
            batch, elements = [], 0
        batch.append(one)
        elements += own
    if batch:
        yield batch


def _take_momenta(batch: list[LocalParameter], key: tuple[int, int]) -> None:
    """Updates the momenta, and replaces gradients by directions that are still to be orthogonalized."""
    weights, after = [], []
    for one in batch:
        momentum, scales = one.state[MOMENTUM_NAME], one.state.get(SCALES_OF[MOMENTUM_NAME])
        state: dict[str, Tensor] = dict(zip(MOMENT_NAMES, (momentum, torch.zeros_like(momentum)), strict=True))
        if scales is not None:
            state |= dict(zip(SCALE_NAMES, (scales, torch.ones_like(scales)), strict=True))
        one.begin(state)
        after.append(one.constants(unscale=1.0))
        constants = muon.momentum_coefficients(one.muon[0])._asdict()
        one.coefficients = one.constants(**{name: c for name, c in constants.items() if name not in ("unscale", "skip")})
        weights.append(torch.zeros(one.local.shape, device=one.local.device))
    update(zip(batch, weights, strict=True), key, {}, whole_step=False)
    for one, momentum, coefficients in zip(batch, weights, after, strict=True):
        settings, factors = one.muon
        gradient = one.gradient.to(torch.float32) * one.scalars.unscale
        one.gradient = muon.blended(momentum, gradient, factors).to(getattr(torch, settings.ns_dtype))
        one.coefficients = coefficients


def _orthogonalize(batch: list[LocalParameter]) -> None:
    """Replaces directions by orthogonal ones, all matrices of a mesh together."""
    alike: dict[Any, list[LocalParameter]] = {}
    for one in batch:
        alike.setdefault((sharding.mesh_of(one.param), one.gradient.dtype, one.gradient.device), []).append(one)
    for (mesh, _, device), some in alike.items():
        # The groups of parameters that FSDP2 offloads to the CPU may support GPU tensors only.
        found = _on_mesh(some, mesh, device if mesh is None else torch.device(mesh.device_type))
        for one, direction in zip(some, found, strict=True):
            one.gradient = direction.to(device)


def _on_mesh(some: list[LocalParameter], mesh: Any, device: torch.device) -> list[Tensor]:
    plan = owners.plan(tuple(one.lies for one in some), sharding.rank_in(some[0].param, some[0].lies), muon.cost)
    given = [one.gradient.to(device) for one in some]
    held = {part: _local(given[part.array], part) for part in plan.held}
    for stage in plan.gather:
        _exchange(stage, held, mesh, given[0])
    for parts in plan.whole:
        one = some[parts[0].array]
        # Always new memory: products of views may choose other algorithms.
        whole = given[0].new_empty(one.whole)
        for part in parts:
            _cut(whole, part).copy_(held[part])
        done = muon.orthogonalize(whole, one.muon[0], torch.addmm)
        held |= {part: _cut(done, part) for part in parts}
    for stage in plan.scatter:
        _exchange(stage, held, mesh, given[0])
    found = [torch.empty_like(x) for x in given]
    for part in plan.held:
        _local(found[part.array], part).copy_(held[part])
    return found


def _local(x: Tensor, part: Part) -> Tensor:
    return x.view(-1, *x.shape[-2:])[part.local]


def _cut(whole: Tensor, part: Part) -> Tensor:
    return whole[slice(*part.rows), slice(*part.columns)]


def _exchange(stage: Stage, held: dict[Part, Tensor], mesh: Any, like: Tensor) -> None:
    """Sends and receives the parts of one stage."""
    sent = [held[part].reshape(-1) for parts in stage.sent for part in parts]
    sizes = [[sum(part.size for part in parts) for parts in each] for each in (stage.received, stage.sent)]
    flat = torch.cat(sent) if sent else like.new_empty(0)
    came = collectives.wait_tensor(collectives.all_to_all_single(flat, *sizes, sharding.group_name(mesh, stage.axis)))
    received = [part for parts in stage.received for part in parts]
    for part, values in zip(received, came.split([part.size for part in received]), strict=True):
        held[part] = values.view(part.rows[1] - part.rows[0], part.columns[1] - part.columns[0])
