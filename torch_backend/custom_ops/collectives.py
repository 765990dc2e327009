"""Collectives by group name: functional, so that compiled code holds them as they are and eager code the same ones.

blockfp::following  (x, other) -> x copied, which a compiler can't move to where `other` isn't known yet
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
    """The elementwise maximum over the ranks of each group, one group after another; every rank of them calls it alike.

    Args:
        tensor: int32 (amaxes as fp32 bits, whose integer order is that of the magnitudes); left as it is.
        groups: names of process groups (`sharding.group_name`); none returns the tensor itself.
    """
    for name in groups:
        tensor = collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "max", name))
    return tensor


def max_reduce_together(tensors: Sequence[Tensor], groups: Sequence[str]) -> list[Tensor]:
    """`max_reduce` of several tensors in one collective a group."""
    if not tensors or not groups:
        return list(tensors)
    if len(tensors) == 1:
        return [max_reduce(tensors[0], groups)]
    flat = max_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), groups)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
