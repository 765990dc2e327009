"""The optimizers that others wrap: accelerate's and Lightning's wrappers of one, torchtitan's container of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


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
