"""Keys of stochastic rounding as tensors, and the rank that is folded into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.definition.rounding import Key, fold_in, key_words

from ..custom_ops.key_ops import signed
from ..torch_internals import ddp_model


def key_tensor(key: Key, device: torch.device) -> Tensor:
    """A seed, or two uint32 words in any form, as an int32 tensor of shape (2,) on `device`.

    Raises:
        TypeError: the key is a `torch.Generator`.
        ValueError: it is not a seed or two words, or is a tensor on another device. The words of an int64 tensor are looked at
            on the CPU only, and not where they are traced.
    """
    # torch 2.15 compiles no question whether a tensor is a Generator.
    if not isinstance(key, Tensor) and isinstance(key, torch.Generator):
        raise TypeError("key must be a seed or two uint32 words, got a torch.Generator: pass random_key(generator)")
    words = key_words(key)
    if not isinstance(key, Tensor):
        return torch.tensor([signed(int(word)) for word in words], dtype=torch.int32, device=device)
    if key.device != device:
        raise ValueError(f"key is on {key.device} and x on {device}: pass key.to(x.device)")
    if key.dtype is torch.int64 and type(key) is Tensor and key.device.type == "cpu" and not torch.compiler.is_compiling():
        key_words(key.numpy(force=True))
    return key.view(torch.int32) if key.dtype is torch.uint32 else key.to(torch.int32)


def random_key(generator: torch.Generator | None = None) -> Tensor:
    """A new key drawn from a generator: an int64 tensor of two uint32 words on the generator's device.

    Args:
        generator: by default torch's own on the CPU.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randint(1 << 32, (2,), generator=generator, dtype=torch.int64, device=device)


_COPIED = int.from_bytes(b"copy")
"""Folded into the key of a copied layer: no step is so high."""


def copied_key(key: Tensor, number: int) -> Tensor:
    """Returns the key of a layer's copy, int64, on the key's device.

    Args:
        key: the layer's own.
        number: of the copy, from 1.
    """
    folded: Any = fold_in(fold_in(key, _COPIED), number)
    return folded.to(torch.int64) & 0xFFFFFFFF


def data_rank(sharded: int) -> int:
    """This rank's coordinate on the axes that divide the batch, as far as the point of use knows them.

    Args:
        sharded: that on the axes over which FSDP2 shards (`sharding.data_rank`). DDP's is the rank in the process group of the
            model whose forward this is.
    """
    model = ddp_model()
    return sharded if model is None or model.process_group is None else model.process_group.rank()
