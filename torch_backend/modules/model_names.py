"""Names of a model's parameters without what torch.compile, DDP and activation checkpointing put into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_COMPILED, _RECOMPUTED = "_orig_mod.", "_checkpoint_wrapped_module."


def plain_module(model: nn.Module) -> nn.Module:
    """Unwraps a module: DDP and torch.compile put wrappers around it that would come into the names.

    Raises:
        TypeError: it is no module.
    """
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    if not isinstance(inner, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(inner).__name__}")
    return inner


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """Returns a function that takes names in a model, whose modules may be wrapped too, to names in the unwrapped model, as
    checkpoints have them."""
    named = model.named_modules(remove_duplicate=False)
    wrappers = [f"{path}.module.".removeprefix(".") for path, module in named if isinstance(module, DistributedDataParallel)]

    def clean(name: str) -> str:
        # "module" is a name like any other, so it goes only where DDP is: the innermost first, while the others' is there.
        for wrapper in reversed(wrappers):
            if name.startswith(wrapper):
                name = wrapper.removesuffix("module.") + name.removeprefix(wrapper)
        return name.replace(_COMPILED, "").replace(_RECOMPUTED, "")

    return clean


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Gives each module once by its clean path, as `Module.named_modules` does; a wrapper before what it wraps, by its path."""
    clean = cleaner(model)
    return ((clean(f"{path}.").removesuffix("."), module) for path, module in model.named_modules())


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules by clean name: the wrapped ones, not their wrappers."""
    clean, named = cleaner(model), model.named_modules(remove_duplicate=False)
    return {clean(f"{name}.").removesuffix("."): module for name, module in named}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by clean name, under each name where they have several."""
    clean = cleaner(model)
    return {clean(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def wrapped_names(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict under the names that torch's `set_model_state_dict` takes.

    torch puts what torch.compile and DDP add back into the names of parameters and buffers, but not of what is neither: scales
    and formats (`weights.state_dict`).
    """
    clean = cleaner(model)
    wrapped: dict[str, str] = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        # The wrapper of activation checkpointing does this by itself.
        wrapped[clean(f"{name}.")] = f"{name}.".replace(_RECOMPUTED, "")
    known = {clean(name) for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    found = {}
    for name, value in state.items():
        prefix, dot, last = name.rpartition(".")
        found[name if name in known else wrapped.get(prefix + dot, prefix + dot) + last] = value
    return found


# ---- optimizers in wrappers


def optimizers_in(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers that keep the states, of one that may be a wrapper, or of several.

    torchtitan's container is an optimizer too, whose own state stays empty.

    Raises:
        TypeError: something else.
    """
    wraps = isinstance(optimizer, Optimizer) or isinstance(getattr(optimizer, "optimizer", None), Optimizer)
    if wraps or not isinstance(optimizer, Iterable) or isinstance(optimizer, str | Tensor):
        return _unwrapped(optimizer)
    return [one for each in optimizer for one in _unwrapped(each, f" in a {type(optimizer).__name__}")]


def _unwrapped(optimizer: Any, where: str = "") -> list[Optimizer]:
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _unwrapped(inner, where)
    # What gives parts of its own kind for ever, as matrices and strings do, is no optimizer.
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}{where}")
    return [one for each in optimizer for one in _unwrapped(each, where)] if isinstance(optimizer, Iterable) else [optimizer]


def state_of(optimizers: list[Optimizer], param: Tensor) -> dict:
    """Returns what these keep for a parameter; nothing where none has a state for it."""
    return next((one.state[param] for one in optimizers if param in one.state), {})
