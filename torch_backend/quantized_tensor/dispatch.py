"""Looks a torch operation on a `QuantizedTensor` up in the op table, which its neighbours fill, and carries it out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import decomposes, return_and_correct_aliasing
from .refusals import refusal

_TABLE: dict[Any, Callable[..., Any]] = {}
_VIEWS: set[Any] = set()


def implements(*functions, view: bool = False):
    """Enters the decorated handler, which takes the op's own arguments, into the table.

    Args:
        functions: the ops that it handles.
        view: whether its result shares memory with the first argument, which autograd and functionalization are told.
    """

    def register(handler):
        _TABLE.update(dict.fromkeys(functions, handler))
        if view:
            _VIEWS.update(functions)
        return handler

    return register


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Carries out one operation.

    Raises:
        NotImplementedError: the operation is not in the table, or not with these arguments.
    """
    handler = _TABLE.get(func)
    if handler is None:
        # In inference mode operations come here that are made of others: `view_as`, `chunk`, `to`.
        if decomposes(func):
            return func.decompose(*args, **kwargs)
        raise refusal(func)
    if func not in _VIEWS:
        return handler(*args, **kwargs)
    with viewing(args[0]):
        return return_and_correct_aliasing(func, args, kwargs, handler(*args, **kwargs))


def viewing(tensor: Tensor) -> AbstractContextManager[Any]:
    """Enters the mode in which views of a tensor are made: both must be inference tensors or neither: they share a version."""
    normal = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if normal else nullcontext()
