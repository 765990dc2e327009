"""Parameters and modules that others hold, such as optimizers and wrappers: they become another, or others are told of it.

An optimizer that holds a parameter which the model has no more trains nothing, and says nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..torch_internals import holder_of


def check_free(param: Tensor, name: str, remedy: str) -> None:
    """Raises ValueError where something holds a parameter that would not go on with what it becomes (`become_tensor`)."""
    holder = holder_of(param)
    if holder is not None:
        raise ValueError(f"{name} is held by {holder}, and can't become another tensor behind its back: {remedy}")


def become_tensor(param: Tensor, new: Tensor) -> None:
    """Makes a parameter another one; its gradient and the marks of other libraries (`vars(param)`) stay.

    It stays the same object, so that optimizers, other modules and whatever else holds it go on with what it is now. `new` is
    nobody's afterwards.

    Args:
        param: a parameter for which `check_free` raises nothing.
        new: one that is in no use yet.
    """
    gradient = param.grad
    torch.utils.swap_tensors(param, new)
    for mark, value in vars(new).items():
        vars(param).setdefault(mark, value)
    param.grad = gradient


def become(thing: nn.Module | Tensor, cls: type) -> None:
    """Makes a module, or a tensor, one of another class.

    It stays the same object, and so whatever refers to it goes on with the new class: its parents (under several names, in
    lists, in attributes that are no children), hooks, what users hold. Another in its place would reach none of these. torch's
    `fully_shard` does the same.

    Args:
        thing: any; it already has what the new class needs, or gets it next.
        cls: a class without a constructor's work to be done.

    Raises:
        TypeError: Python can't, since the two lay their memory out in different ways.
    """
    changed: Any = thing
    changed.__class__ = cls


class ReplacedParameter(Tensor):
    """A parameter in whose place another stands now: all that is done with it raises.

    It can't become a DTensor: torch gives that other slots.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            "this parameter is no longer the model's: parallelize has put another in its place, and what holds this one would "
            "train nothing. Build optimizers, and whatever else takes model.parameters(), behind parallelize"
        )

    def __repr__(self, **_: Any) -> str:
        return "ReplacedParameter()"


def retire(param: Tensor) -> None:
    """Makes a parameter say, whatever is done with it, that it was replaced."""
    become(param, ReplacedParameter)
