"""The optimizers that others wrap: accelerate's and Lightning's wrappers of one, torchtitan's container of several."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer


def optimizers_in(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers that keep the states, of one that may be a wrapper, or of several.

    torchtitan's container is an optimizer too, whose own state stays empty.

    Raises:
        TypeError: something else.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return optimizers_in(inner)
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str | Tensor):
        return [one for each in optimizer for one in optimizers_in(each)]
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    return [optimizer]


def state_of(optimizers: list[Optimizer], param: Tensor) -> dict:
    """Returns what these keep for a parameter; nothing where none has a state for it."""
    return next((one.state[param] for one in optimizers if param in one.state), {})
