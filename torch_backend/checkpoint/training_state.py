"""Builds an optimizer's state dict through torch's API, and undoes what that changes in the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.files.names import GROUPS, STATE
from blockfp.sharding.parts import offsets_agree

from ..optimizer.adamw import _Adam
from ..optimizer.local_parameter import LocalParameter
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import reduced, replicated
from ..quantized_tensor.tensor import QuantizedTensor


def restorer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns a function that removes optimizer state created from now on and restores the weights' original values.

    A leftover new master would hold the current weights, and the next step would undo a later load.
    """
    state = optimizer.state
    had = {param: set(entries) for param, entries in state.items()}
    places = []
    for param in _params(optimizer):
        local = sharding.local_of(param)
        if isinstance(local, QuantizedTensor):
            place = local.geometry
            places.append((place, place.initial, place.loaded))

    def put_back() -> None:
        optimizer.state = state
        for param in list(state):
            for entry in set(state[param]) - had.get(param, set()):
                del state[param][entry]
            if param not in had:
                del state[param]
        for place, initial, loaded in places:
            place.initial, place.loaded = initial, loaded

    return put_back


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> dict[str, Any]:
    """Returns the optimizer's state dict by parameter names, with blockfp's initial states where a parameter has none.

    Call `restorer` first to undo this; gradients are unchanged. With `whole`, torch's optimizers get a state for every
    parameter as memory to load into, which discards existing values. Raises ValueError for a parameter that isn't the model's.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    known = {id(param) for param in model.parameters()}
    for i, param in enumerate(_params(optimizer)):
        if id(param) not in known:
            raise ValueError(
                f"optimizer's parameter {i}, of shape {tuple(param.shape)}, isn't one of the model's: create the "
                "optimizer from model.parameters() after the model has been converted and sharded"
            )
    ours = isinstance(optimizer, _Adam)
    if ours:
        optimizer.make_state()
    elif whole and any(param.requires_grad and not optimizer.state.get(param) for param in _params(optimizer)):
        optimizer.state = defaultdict(dict)
    new = not optimizer.state
    with _gradients_aside(optimizer):
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if new and not (ours or whole):
        # torch creates state by a step with zero gradients, which leaves many optimizers in another state than their initial
        # one.
        state[STATE] = {}
    for group in state[GROUPS]:
        # Groups may share one learning rate tensor; the checkpoint may hold several values.
        group |= {name: value.clone() for name, value in group.items() if isinstance(value, Tensor)}
    return state


@contextmanager
def _gradients_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Removes gradients while torch initializes a missing state, which needs that; restores them and the learning rates."""
    params = list(_params(optimizer))
    gradients = [param.grad for param in params]
    rates = [group.get("lr") for group in optimizer.param_groups]
    if not optimizer.state:
        for param in params:
            param.grad = None
    try:
        yield
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- uneven DTensors


@dataclass(frozen=True)
class Replaced:
    """A DTensor and the container entry in which a whole tensor replaces it."""

    holder: Any
    key: Any
    value: Tensor


def replicate_uneven(state: Any) -> list[Replaced]:
    """Replaces unevenly sharded DTensors by replicated wholes, in nested dictionaries and lists; collective."""
    replaced = []
    for holder, key, value in list(leaves(state)):
        if sharding.mesh_of(value) is not None and not offsets_agree(LocalParameter(value).lies):
            holder[key] = replicated(value, _gathered(value))
            replaced.append(Replaced(holder, key, value))
    return replaced


def full_tensor(value: Tensor) -> Tensor:
    """Returns a DTensor's whole tensor on every rank; collective. Returns a plain tensor unchanged."""
    if sharding.mesh_of(value) is None:
        return value
    holder = [value]
    replicate_uneven(holder)
    return holder[0].full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def restore_uneven(replaced: list[Replaced]) -> None:
    """Copies this rank's shard of each whole back into its DTensor and puts the DTensor back."""
    for one in replaced:
        local, whole = sharding.local_of(one.value), sharding.local_of(one.holder[one.key])
        local.copy_(sharding.own_part(whole, one.value))
        one.holder[one.key] = one.value


def leaves(state: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yields (container, key, tensor) for each tensor."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, Tensor):
            yield state, key, value
        elif isinstance(value, dict | list):
            yield from leaves(value)


def _gathered(values: Tensor) -> Tensor:
    local, lies = sharding.local_of(values), LocalParameter(values).lies
    whole = torch.zeros(tuple(values.shape), dtype=local.dtype, device=local.device)
    sharding.own_part(whole, values).copy_(local)
    # Shards don't overlap and other ranks' bytes are zero here, so summing bytes is exact.
    return reduced(values, lies, whole.view(torch.uint8), "sum").view(local.dtype)
