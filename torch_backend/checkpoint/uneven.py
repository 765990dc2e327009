"""DTensors whose parts torch doesn't find: saved, and read, as replicated wholes.

Where FSDP2 cuts what tensor parallelism has cut and nothing divides evenly, the placements of a DTensor don't say which rows a
rank has (`sharding.parts.offsets_agree`); a checkpoint that went by them would load other rows on another mesh. This is about
biases, master weights and moments; codes and scales are whole already (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockfp.sharding.parts import offsets_agree

from ..optimizer.local_parameter import LocalParameter
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import reduced, replicated


@dataclass(frozen=True)
class Replaced:
    """A DTensor of a state, and the dictionary or list in which a whole stands for it."""

    holder: Any
    key: Any
    value: Tensor


def replicate_uneven(state: Any) -> list[Replaced]:
    """Replaces such DTensors by replicated wholes, in nested dictionaries and lists; collective."""
    replaced = []
    for holder, key, value in list(leaves(state)):
        if sharding.mesh_of(value) is not None and not offsets_agree(LocalParameter(value).lies):
            holder[key] = replicated(value, _gathered(value))
            replaced.append(Replaced(holder, key, value))
    return replaced


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a DTensor of values, on every rank; collective. A plain tensor as it is."""
    if sharding.mesh_of(value) is None:
        return value
    holder = [value]
    replicate_uneven(holder)
    return holder[0].full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def restore_uneven(replaced: list[Replaced]) -> None:
    """Copies this rank's part of each whole into the DTensor that it stands for, which takes its place again."""
    for one in replaced:
        local, whole = sharding.local_of(one.value), sharding.local_of(one.holder[one.key])
        local.copy_(sharding.own_part(whole, one.value))
        one.holder[one.key] = one.value


def leaves(state: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yields (dictionary or list, key, tensor) of each tensor."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, Tensor):
            yield state, key, value
        elif isinstance(value, dict | list):
            yield from leaves(value)


def _gathered(values: Tensor) -> Tensor:
    local, lies = sharding.local_of(values), LocalParameter(values).lies
    whole = torch.zeros(tuple(values.shape), dtype=local.dtype, device=local.device)
    sharding.own_part(whole, values).copy_(local)
    # The parts are apart, so the others' bytes are zero here, and sums of bytes know no rounding.
    return reduced(values, lies, whole.view(torch.uint8), "sum").view(local.dtype)
