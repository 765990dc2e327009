"""Dispatches torch operations on a `QuantizedTensor` through the op table, which `optable` and `own_ops` fill."""

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
    """Registers a handler, which takes the op's own arguments, for these ops.

    `view` marks results that share memory with the first argument, for autograd and functionalization.
    """

    def register(handler):
        _TABLE.update(dict.fromkeys(functions, handler))
        if view:
            _VIEWS.update(functions)
        return handler

    return register


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs one operation; raises NotImplementedError if the table has no handler for it or its arguments."""
    handler = _TABLE.get(func)
    if handler is None:
        # Inference mode dispatches composite operations such as `view_as`, `chunk` and `to`.
        if decomposes(func):
            return func.decompose(*args, **kwargs)
        raise refusal(func)
    if func not in _VIEWS:
        return handler(*args, **kwargs)
    with viewing(args[0]):
        return return_and_correct_aliasing(func, args, kwargs, handler(*args, **kwargs))


def viewing(tensor: Tensor) -> AbstractContextManager[Any]:
    """Returns the inference mode context for making a view: base and view share a version counter, so both or neither are
    inference tensors.
    """
    normal = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if normal else nullcontext()
