"""Functional collectives by group name, the same for compiled and eager code.

blockfp::following  (x, other) -> a copy of x, which a compiler can't schedule before `other` is computed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_internals import functional_collectives as collectives
from .library import define, fake, impl

following = define("following(Tensor x, Tensor other) -> Tensor")


@impl(following)
def _following(x: Tensor, other: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@fake(following)
def _following_fake(x: Tensor, other: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def max_reduce(tensor: Tensor, groups: Sequence[str]) -> Tensor:
    """Returns the elementwise maximum over the ranks of each group, one group after another; all their ranks must call it.

    `tensor` is int32, amaxes as fp32 bits, whose integer order is the magnitudes'; it is unchanged. Without groups it is
    returned itself.
    """
    for name in groups:
        tensor = collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "max", name))
    return tensor


def max_reduce_together(tensors: Sequence[Tensor], groups: Sequence[str]) -> list[Tensor]:
    """`max_reduce` of several tensors, with one collective per group."""
    if not tensors or not groups:
        return list(tensors)
    if len(tensors) == 1:
        return [max_reduce(tensors[0], groups)]
    flat = max_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), groups)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
