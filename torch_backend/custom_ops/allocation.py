"""Memory for results, as a plan asks for it: the same shape each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that makes a contiguous tensor of this kind, not filled, with new memory each time.

    It copies a tensor that has no memory of its own, which costs the host three quarters of what reading shape, dtype and
    device does.
    """
    shape = tuple(shape)
    like = torch.empty_strided(shape, strides_of(shape), dtype=dtype, device=device)
    like.untyped_storage().resize_(0)
    return partial(torch.empty_like, like)
