"""Compares a checkpoint's entries with what a model and an optimizer need, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockfp.errors import BadCheckpoint
from blockfp.files.names import GROUPS, LAYER_BUFFERS, MODEL, OPTIMIZER, STATE

from ..modules import model_names
from ..optimizer.adamw import _Adam
from ..optimizer.optimizer_state import unsupported_setting
from ..quantized_tensor.agreement import kind_of, recipe_of, settings_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


HOW_TO_STEP = ("capturable", "foreach", "fused", "differentiable")
"""Optimizer settings that depend on the device rather than the run."""


def names_of(index: Metadata, part: str) -> dict[str, Any]:
    """Returns the index's entries under `part`: "model", "optimizer" or "extra"."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): what for name, what in index.state_dict_metadata.items() if name.startswith(prefix)}


def described(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Describes each parameter, each layer's recipe and the optimizer's settings, for the check that ranks agree."""
    found = {name: kind_of(param) for name, param in model_names.parameters(model).items()}
    recipes = {f"the recipe of {name or 'the model'}": recipe_of(module) for name, module in model_names.modules(model).items()}
    found |= {name: recipe for name, recipe in recipes.items() if recipe is not None}
    return found if optimizer is None else found | settings_of(optimizer)


def match_model(checkpoint: Path, there: Mapping[str, Any], state: dict[str, Any], model: nn.Module, requantize: bool) -> None:
    """Raises BadCheckpoint unless a checkpoint has exactly the entries of the model's state dict, with equal shapes and dtypes.

    With `requantize`, recipe buffers may differ; buffers missing in the checkpoint are removed from `state` and keep their
    values.
    """
    surplus = there.keys() - dict(_flat(state)).keys()
    if requantize:
        modules = model_names.modules(model)

        def of_recipe(name: str) -> bool:
            prefix, _, last = name.rpartition(".")
            return any(last in pair for pair in LAYER_BUFFERS) and hasattr(modules.get(prefix), "weight")

        surplus = {name for name in surplus if not of_recipe(name)}
        for name in [name for name in state if name not in there and of_recipe(name)]:
            del state[name]
    _check(checkpoint, MODEL, there, dict(_flat(state)), surplus)


def match_optimizer(
    checkpoint: Path,
    there: Mapping[str, Any],
    plain: Mapping[str, Any],
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raises BadCheckpoint unless a checkpoint has the groups and states of the optimizer's state dict.

    Settings only in the checkpoint are added to `state`, to be read, as `load_state_dict` does. A missing number that the
    optimizer steps by is an error. Parameters without a saved state (no gradient yet) are removed from `state`; saved states of
    parameters that are frozen here are ignored.
    """
    ours = [group["params"] for group in state[GROUPS]]
    keys = (f"{OPTIMIZER}.{GROUPS}.{i}.params" for i in count())
    theirs = [plain[key] for key in takewhile(plain.__contains__, keys)]
    for i, (own, other) in enumerate(zip_longest(ours, theirs, fillvalue=())):
        if there and set(own) != set(other):
            raise BadCheckpoint(
                f"{checkpoint} has the optimizer's parameters in other groups: group {i} only in the checkpoint: "
                f"{_some(sorted(set(other) - set(own)))}; only here: {_some(sorted(set(own) - set(other)))}"
            )
    params, of, settings = model_names.parameters(model), {}, []
    for name in there:
        if name.startswith(f"{STATE}."):
            of[name] = _parameter_of(name, params)
        elif _is_setting(name):
            settings.append(name)
    states, known = state[STATE], set(of.values())
    for name in [name for name in states if name not in known]:
        del states[name]
    groups = {str(i): group for i, group in enumerate(state[GROUPS])}
    for name in settings:
        group, setting = groups.get(name.split(".")[1], {}), name.split(".", 2)[2]
        value = plain.get(f"{OPTIMIZER}.{name}")
        if isinstance(optimizer, _Adam) and unsupported_setting({setting: value}, decoupled=optimizer._decoupled):
            raise BadCheckpoint(f"{checkpoint} has {OPTIMIZER}.{name}={value}, which {type(optimizer).__name__} doesn't have")
        if setting != "param_names" and "." not in setting:
            group.setdefault(setting, empty(there[name]))
    wanted, frozen = dict(_flat(state)), {name for name, param in params.items() if not param.requires_grad}
    surplus = {name for name in there.keys() - wanted.keys() - set(settings) if of.get(name) not in frozen}
    optional = {name for name in wanted if _is_setting(name) and not _defines(optimizer, name.split(".")[2])}
    needed = {name: value for name, value in wanted.items() if name in there or name not in optional}
    _check(checkpoint, OPTIMIZER, there, needed, surplus)


def _is_setting(name: str) -> bool:
    return name.startswith(f"{GROUPS}.") and name.count(".") > 1 and not name.endswith(".params")


def _defines(optimizer: torch.optim.Optimizer, setting: str) -> bool:
    """Returns whether a setting is a number that defines the step. torch's versions and blockfp add switches, which don't."""
    # torch's states have no key; the optimizer rounds them with its own. OsciReset may differ too.
    switch = isinstance(optimizer.defaults.get(setting), bool | str | None)
    return not switch and setting not in ("key", "osci_reset")


def empty(what: Any) -> Tensor | None:
    """Returns an empty CPU tensor for a checkpoint's entry, or None if the entry is not a tensor."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return (
        torch.empty(what.size, dtype=what.properties.dtype, device="cpu") if isinstance(what, TensorStorageMetadata) else None
    )


def _parameter_of(name: str, params: Mapping[str, Tensor]) -> str:
    """Returns the parameter's name in an entry "state.PARAMETER.ENTRY", or ""."""
    key = name.removeprefix(f"{STATE}.")
    while key and key not in params:
        key = key.rpartition(".")[0]
    return key


def _check(checkpoint: Path, part: str, there: Mapping[str, Any], wanted: dict[str, Any], surplus: set[str]) -> None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not there and wanted:
        raise BadCheckpoint(f"{checkpoint} holds no {part}")
    missing = wanted.keys() - there.keys()
    if missing or surplus:
        lacks, has = _some(sorted(missing)), _some(sorted(surplus))
        raise BadCheckpoint(f"{checkpoint} doesn't fit the {part}: it lacks {lacks}, and has beyond it {has}")
    for name, value in wanted.items():
        saved, full_name = there[name], f"{part}.{name}"
        if isinstance(value, Tensor) != isinstance(saved, TensorStorageMetadata):
            kinds = ("no tensor", "a tensor") if isinstance(value, Tensor) else ("a tensor", "no tensor")
            raise BadCheckpoint(f"{full_name} is {kinds[0]} in the checkpoint and {kinds[1]} here")
        if isinstance(value, Tensor):
            _check_tensor(full_name, value, saved)


def _check_tensor(name: str, value: Tensor, saved: TensorStorageMetadata) -> None:
    if value.is_meta:
        raise BadCheckpoint(f"{name} is on the meta device and has no memory: call to_empty(device=...) of the model first")
    shapes = [tuple(saved.size), tuple(value.shape)]
    if all(shape[:1] == (0,) for shape in shapes):
        # A quantized weight's own entry has no bytes (`names.no_values`); only its other axes are compared.
        shapes = [shape[1:] for shape in shapes]
    kinds = (("shape", *shapes), ("dtype", saved.properties.dtype, value.dtype))
    for what, there, here in kinds:
        if there != here:
            raise BadCheckpoint(f"{name} has {what} {there} in the checkpoint and {here} here")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dictionaries and lists by DCP's names."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list) and any(isinstance(inner, dict | list | Tensor) for inner in value):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in entries:
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
