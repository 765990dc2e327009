"""The custom op that derives the stochastic-rounding keys of a step's gradients.

blockfp::gradient_keys   (key, step, folds, groups) -> int32 [groups, 2, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.rounding import COLUMNWISE, ROWWISE, fold_in, gradient_key

from ...torch_internals import uncounted
from .. import cuda
from ..kernels import function_for, functions
from ..library import define, fake, impl, runs_now

_op = define("gradient_keys(Tensor key, Tensor? step, int[] folds, int groups) -> Tensor")


def gradient_keys(
    key: Tensor,
    *,
    step: Tensor | None = None,
    folds: Sequence[int] = (),
    groups: int | None = None,
    advance: bool = False,
    now: bool = False,
    single: bool = False,
) -> Tensor:
    """Returns the keys for rounding a layer's gradients, int32 [groups or 1, 2, 2]: per group, rowwise and columnwise.

    Folds the step and then each of `folds` into the key and applies `rounding.gradient_key`.

    Args:
        key: two words as an int32 or int64 tensor.
        step: an integer tensor of shape (), or None.
        folds: further numbers, such as this rank's data-parallel coordinate.
        groups: number of groups (experts); None for a layer without groups.
        advance: increments the step afterwards.
        now: nothing is known to trace or to watch operations.
        single: omits the axis of groups, for a layer without groups.
    """
    count = -1 if groups is None else groups
    if not now and (torch.compiler.is_compiling() or not runs_now(key)):
        keys = _op(key, step, list(folds), count)
    else:
        run = functions.get(("fold_keys", key.device), gradient_keys)
        if run is gradient_keys:
            run = function_for("fold_keys", key)
        if run is not None and len(folds) < 2:
            return cuda.gradient_keys(run, key, step, folds[0] if folds else -1, count, advance=advance, single=single)
        keys = _gradient_keys(key, step, list(folds), count)
    if advance:
        assert step is not None
        (step if now else uncounted(step)).add_(1)
    return keys[0] if single else keys


@impl(_op)
def _gradient_keys(key: Tensor, step: Tensor | None, folds: list[int], groups: int) -> Tensor:
    run = function_for("fold_keys", key)
    if run is not None and len(folds) < 2:
        return cuda.gradient_keys(run, key, step, folds[0] if folds else -1, groups)
    # On a CPU, Python integers cost less than a single tensor operation.
    words: Any = tuple(int(word) & 0xFFFFFFFF for word in key) if key.is_cpu else key.to(torch.int32)
    if step is not None:
        words = fold_in(words, int(step) & 0xFFFFFFFF if key.is_cpu else step)
    for fold in folds:
        words = fold_in(words, fold)
    numbers = (None,) if groups < 0 else range(groups)
    keys: list[Any] = [[gradient_key(words, way, group=number) for way in (ROWWISE, COLUMNWISE)] for number in numbers]
    if key.is_cpu:
        words32 = [[[signed(int(word)) for word in words] for words in pair] for pair in keys]
        return torch.tensor(words32, dtype=torch.int32, device="cpu").view(-1, 2, 2)
    return torch.stack([torch.stack(pair) for pair in keys]) if keys else key.new_empty((0, 2, 2), dtype=torch.int32)


@fake(_op)
def _gradient_keys_fake(key: Tensor, step: Tensor | None, folds: list[int], groups: int) -> Tensor:
    return key.new_empty((1 if groups < 0 else groups, 2, 2), dtype=torch.int32)


def signed(word: int) -> int:
    """Returns the int32 with the bits of a uint32 word."""
    return word - (1 << 32) if word >> 31 else word
