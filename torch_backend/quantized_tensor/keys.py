"""Keys of stochastic rounding as tensors, and the custom op that makes those of a step's gradients.

blockfp::gradient_keys   (key, folds, step, groups) -> int32 [groups, 2, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from blockfp.definition.rounding import COLUMNWISE, ROWWISE, Key, fold_in, gradient_key, key_words
from blockfp.kernels import cuda_library

from ..custom_ops import cuda

_library = torch.library.Library("blockfp", "FRAGMENT")
_library.define(
    "gradient_keys(Tensor key, Tensor? step, int[] folds, int groups) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

_op = torch.ops.blockfp.gradient_keys.default


def key_tensor(key: Key, device: torch.device) -> Tensor:
    """A seed, or two uint32 words in any form, as an int32 tensor of shape (2,) on `device`.

    Raises:
        TypeError: the key is a `torch.Generator`.
        ValueError: it is not a seed or two words, or is a tensor on another device. The words of an int64 tensor are looked at
            on the CPU only, and not where they are traced.
    """
    if isinstance(key, torch.Generator):
        raise TypeError("key must be a seed or two uint32 words, got a torch.Generator: pass random_key(generator)")
    words = key_words(key)
    if not isinstance(key, Tensor):
        return torch.tensor([_signed(int(word)) for word in words], dtype=torch.int32, device=device)
    if key.device != device:
        raise ValueError(f"key is on {key.device} and x on {device}: pass key.to(x.device)")
    if key.dtype is torch.int64 and type(key) is Tensor and key.device.type == "cpu" and not torch.compiler.is_compiling():
        key_words(key.numpy(force=True))
    return key.view(torch.int32) if key.dtype is torch.uint32 else key.to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def random_key(generator: torch.Generator | None = None) -> Tensor:
    """A new key drawn from a generator: an int64 tensor of two uint32 words on the generator's device.

    Args:
        generator: by default torch's own on the CPU.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randint(1 << 32, (2,), generator=generator, dtype=torch.int64, device=device)


def gradient_keys(key: Tensor, *, step: Tensor | None = None, folds: Sequence[int] = (), groups: int | None = None) -> Tensor:
    """The keys that a layer's gradients are rounded with, int32 [groups or 1, 2, 2]: of each group, rowwise and columnwise.

    They are `rounding.gradient_key` of the key with, one after another, the step and each of `folds` folded in.

    Args:
        key: two words as an int32 or int64 tensor.
        step: an integer tensor of shape (), or None.
        folds: further numbers, such as this rank's coordinate on the data-parallel axes.
        groups: how many groups (experts) the layer has; None for a layer without.
    """
    return _op(key, step, list(folds), -1 if groups is None else groups)


@torch.library.impl(_library, "gradient_keys", "CUDA")
def _gradient_keys_on_gpu(key: Tensor, step: Tensor | None, folds: list[int], groups: int) -> Tensor:
    if cuda_library.available() and len(folds) < 2:
        return cuda.gradient_keys(key, step, folds[0] if folds else -1, groups)
    return _gradient_keys(key, step, folds, groups)


@torch.library.impl(_library, "gradient_keys", "CompositeExplicitAutograd")
def _gradient_keys(key: Tensor, step: Tensor | None, folds: list[int], groups: int) -> Tensor:
    # On a CPU in Python's integers: a tensor operation costs more than all of them.
    words: Any = tuple(int(word) & 0xFFFFFFFF for word in key) if key.device.type == "cpu" else key.to(torch.int32)
    if step is not None:
        words = fold_in(words, int(step) & 0xFFFFFFFF if key.device.type == "cpu" else step)
    for fold in folds:
        words = fold_in(words, fold)
    numbers = (None,) if groups < 0 else range(groups)
    keys: list[Any] = [[gradient_key(words, way, group=number) for way in (ROWWISE, COLUMNWISE)] for number in numbers]
    if key.device.type == "cpu":
        signed = [[[_signed(int(word)) for word in words] for words in pair] for pair in keys]
        return torch.tensor(signed, dtype=torch.int32).view(-1, 2, 2)
    return torch.stack([torch.stack(pair) for pair in keys]) if keys else key.new_empty((0, 2, 2), dtype=torch.int32)


@torch.library.register_fake("blockfp::gradient_keys", lib=_library)
def _gradient_keys_fake(key: Tensor, step: Tensor | None, folds: list[int], groups: int) -> Tensor:
    return key.new_empty((1 if groups < 0 else groups, 2, 2), dtype=torch.int32)


def data_rank(sharded: int) -> int:
    """This rank's coordinate on the axes that divide the batch, as far as the point of use knows them.

    Args:
        sharded: that on the axes over which FSDP2 shards (`sharding.data_rank`). DDP's is the rank in the process group of the
            model whose forward this is.
    """
    model = DistributedDataParallel._get_active_ddp_module()
    return sharded if model is None or model.process_group is None else model.process_group.rank()
