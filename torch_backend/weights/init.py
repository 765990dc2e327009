"""`init_`: initializers for quantized weights, sharded ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from .cast_weight import CastWeight
from .loading import load_high_precision_


@torch.no_grad()
def init_(param: Tensor, function: Callable[..., Any], *, keep_init: bool = True) -> Tensor:
    """Initializes a parameter by a function that writes into a tensor, such as those of `torch.nn.init`.

    For a quantized weight the function gets a plain tensor of the whole weight's shape and dtype, and what it writes is
    quantized. Where the weight is sharded every rank calls `init_`, draws the whole weight and keeps its rows: ranks that are
    seeded alike get what one rank alone would. Any other parameter is given to the function itself.

    Args:
        param: a parameter, quantized or not, sharded or not; on the meta device nothing is done.
        function: called with one tensor, which it writes into; what it returns is ignored.
        keep_init: whether the original values are kept, on the CPU, until an optimizer takes them as its master weights.

    Returns:
        The parameter.

    Raises:
        TypeError: param is no tensor, or function can't be called.

    Example:
        >>> init_(layer.weight, partial(torch.nn.init.trunc_normal_, std=0.02))
    """
    if not isinstance(param, Tensor):
        raise TypeError(f"param must be a torch.Tensor, got {type(param).__name__}")
    if not callable(function):
        raise TypeError(f"function must be one that takes a tensor, such as torch.nn.init.normal_, got {function!r}")
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor | CastWeight):
        function(param)
    elif not local.is_meta:
        values = torch.empty(param.shape, dtype=param.dtype, device=local.device)
        function(values)
        load_high_precision_(param, values, keep_init=keep_init)
    return param
