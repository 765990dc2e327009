"""Forwards that blockfp does the work of: whether a class still has its own, and who else looks at the calls of a module."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks_of_all


def forward_of(cls: type[nn.Module]) -> Any:
    """Returns the forward that a library's class came with; None where another function stands in its place, or around it.

    The library's own decorators may stand around it.
    """
    forward: Any = cls.forward
    library = cls.__module__.partition(".")[0]
    own = inspect.unwrap(forward, stop=lambda function: module_of(function).partition(".")[0] != library)
    return forward if module_of(own) == cls.__module__ else None


def module_of(function: Any) -> str:
    """Returns the name of the module whose file a function stands in, which wrappers don't take over as they do its name."""
    return getattr(function, "__globals__", {}).get("__name__", "")


LINEAR, SEQUENTIAL, RMS_NORM = forward_of(nn.Linear), forward_of(nn.Sequential), forward_of(nn.RMSNorm)
GELU, SILU = forward_of(nn.GELU), forward_of(nn.SiLU)
FUNCTIONS = F.gelu, F.silu
"""torch's functions that these call, as they were."""


def watched(module: nn.Module) -> bool:
    """Says whether a call of a module is seen by hooks, its own or those of all modules, or has a forward put into it."""
    own = (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks),
        *(hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks),
        *(hooks_of_all._global_backward_hooks, hooks_of_all._global_backward_pre_hooks),
    )
    return any(own) or "forward" in vars(module)
