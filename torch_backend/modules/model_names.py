"""Names of a model's parameters without prefixes of torch.compile, DDP and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_COMPILED, _RECOMPUTED = "_orig_mod.", "_checkpoint_wrapped_module."


def plain_module(model: nn.Module) -> nn.Module:
    """Unwraps DDP and torch.compile; raises TypeError if the result is not a module."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    if not isinstance(inner, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(inner).__name__}")
    return inner


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """Returns a function from names in a model with wrapped modules to names in the unwrapped model, as in checkpoints."""
    named = model.named_modules(remove_duplicate=False)
    wrappers = [f"{path}.module.".removeprefix(".") for path, module in named if isinstance(module, DistributedDataParallel)]

    def clean(name: str) -> str:
        # "module" is removed only where DDP adds it; innermost first, while the outer prefixes still match.
        for wrapper in reversed(wrappers):
            if name.startswith(wrapper):
                name = wrapper.removesuffix("module.") + name.removeprefix(wrapper)
        return name.replace(_COMPILED, "").replace(_RECOMPUTED, "")

    return clean


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each module once with its clean path, like `Module.named_modules`; wrappers come before their modules."""
    clean = cleaner(model)
    return ((clean(f"{path}.").removesuffix("."), module) for path, module in model.named_modules())


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns modules by clean name; a wrapped module replaces its wrapper."""
    clean, named = cleaner(model), model.named_modules(remove_duplicate=False)
    return {clean(f"{name}.").removesuffix("."): module for name, module in named}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters by clean name, a tied one under each of its names."""
    clean = cleaner(model)
    return {clean(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def wrapped_names(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the names that torch's `set_model_state_dict` expects.

    torch adds wrapper prefixes back to names of parameters and buffers, but not to scales and formats (`weights.state_dict`).
    """
    clean = cleaner(model)
    wrapped: dict[str, str] = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        # The activation checkpointing wrapper does this itself.
        wrapped[clean(f"{name}.")] = f"{name}.".replace(_RECOMPUTED, "")
    known = {clean(name) for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    found = {}
    for name, value in state.items():
        prefix, dot, last = name.rpartition(".")
        found[name if name in known else wrapped.get(prefix + dot, prefix + dot) + last] = value
    return found


# ---- optimizers in wrappers


def optimizers_in(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers that hold states, from one that may be a wrapper, or from several.

    Raises TypeError for anything else. torchtitan's container is itself an optimizer, with an empty state.
    """
    wraps = isinstance(optimizer, Optimizer) or isinstance(getattr(optimizer, "optimizer", None), Optimizer)
    if wraps or not isinstance(optimizer, Iterable) or isinstance(optimizer, str | Tensor):
        return _unwrapped(optimizer)
    return [one for each in optimizer for one in _unwrapped(each, f" in a {type(optimizer).__name__}")]


def _unwrapped(optimizer: Any, where: str = "") -> list[Optimizer]:
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _unwrapped(inner, where)
    # Checked before iterating: strings and matrices contain parts of their own kind without end.
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}{where}")
    return [one for each in optimizer for one in _unwrapped(each, where)] if isinstance(optimizer, Iterable) else [optimizer]


def state_of(optimizers: list[Optimizer], param: Tensor) -> dict:
    """Returns the optimizers' state of a parameter, or {}."""
    return next((one.state[param] for one in optimizers if param in one.state), {})
