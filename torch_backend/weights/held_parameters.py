"""Parameters that others hold, such as optimizers and wrappers: they become another tensor, or others are told of it.

An optimizer that holds a parameter which the model has no more trains nothing, and says nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

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
    changed: Any = param
    changed.__class__ = ReplacedParameter
