"""AdamW's and Adam's state dicts: what they show of each parameter's state, and what is made of one that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from .local_parameter import LocalParameter
from .optimizer_state import portable, renew_master, restore

_OWN = ("moments", "master", "capturable", "osci_reset")
"""The settings of how state is kept, which nothing that is loaded changes."""


def unsupported_setting(optimizer: Optimizer, settings: Mapping[str, Any]) -> str | None:
    """Returns the first of torch's settings that AdamW or Adam doesn't have with this value, as NAME=VALUE; else None."""
    if not hasattr(optimizer, "_decoupled"):
        return None
    own = {"amsgrad": False, "maximize": False, "differentiable": False}
    own |= {"decoupled_weight_decay": optimizer._decoupled}  # pyright: ignore[reportAttributeAccessIssue]
    return next((f"{name}={settings[name]}" for name, value in own.items() if bool(settings.get(name, value)) != value), None)


@dataclass
class _Made:
    """A tensor of a state on its way through torch's `load_state_dict`, which would cast it to the parameter's dtype."""

    value: Tensor


def renew_masters(optimizer: Optimizer) -> None:
    """Makes masters anew of weights whose values were loaded behind the optimizer."""
    for param, state in optimizer.state.items():
        renew_master(LocalParameter(param), state)


def show(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Shows the states in a state dict that torch has made; a hook, as the two below are."""
    renew_masters(optimizer)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = state_dict["state"]
    shown = {i: portable(param, states[i]) for i, param in zip(ids, params, strict=True) if i in states}
    state_dict["state"] = shown


def make(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Makes the state dict that torch is to load: states made, settings complete. Nothing is changed before all of it fits."""
    ours, theirs = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
        return state_dict  # torch says what is wrong.
    groups, states = [], {}
    for own, group in zip(ours, theirs, strict=True):
        if unfit := unsupported_setting(optimizer, group):
            raise ValueError(f"what is loaded has {unfit}, which {type(optimizer).__name__} doesn't have")
        kept = {name: own[name] for name in _OWN}
        groups.append({**optimizer.defaults, **group, **kept})
        for param, i in zip(own["params"], group["params"], strict=True):
            if state_dict["state"].get(i):
                made = restore(param, state_dict["state"][i], **kept)
                states[i] = {name: _Made(value) for name, value in made.items()}
    return {**state_dict, "state": states, "param_groups": groups}


def take(optimizer: Optimizer) -> None:
    """Takes the states that were made for torch to load."""
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: made.value for name, made in state.items()}
        local = sharding.local_of(param)
        if "master" in state and isinstance(local, QuantizedTensor):
            local.initial = None
