"""Names of a model's parameters without what torch.compile, DDP and activation checkpointing put into them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_COMPILED, _RECOMPUTED = "_orig_mod.", "_checkpoint_wrapped_module."


def plain_module(model: nn.Module) -> nn.Module:
    """The module inside what DDP and torch.compile put around it, which would come into the names.

    Raises:
        TypeError: it is no module.
    """
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner._orig_mod
    if not isinstance(inner, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(inner).__name__}")
    return inner


def clean(name: str) -> str:
    """A name as it is in a checkpoint: modules inside of a model may be wrapped too."""
    return name.replace(_COMPILED, "").replace(_RECOMPUTED, "")


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by clean name, what is wrapped rather than what wraps it."""
    return {clean(f"{name}.").removesuffix("."): module for name, module in model.named_modules(remove_duplicate=False)}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by clean name, also of those with several names."""
    return {clean(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def for_loading(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict as torch's `set_model_state_dict` takes it.

    torch puts what torch.compile adds back into the names of parameters and buffers, but not of what is neither: scales and
    formats (`weights.state_dict`).
    """
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
