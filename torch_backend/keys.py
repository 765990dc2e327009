"""Keys of stochastic rounding as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.rounding import Key, key_words


def key_tensor(key: Key, device: torch.device) -> Tensor:
    """A seed, or two uint32 words in any form, as an int32 tensor of shape (2,) on `device`.

    Raises:
        TypeError: the key is a `torch.Generator`.
        ValueError: it is not a seed or two words, or is a tensor on another device.
    """
    if isinstance(key, torch.Generator):
        raise TypeError("key must be a seed or two uint32 words, got a torch.Generator: pass random_key(generator)")
    words = key_words(key)
    if not isinstance(key, Tensor):
        return torch.tensor([_signed(int(word)) for word in words], dtype=torch.int32, device=device)
    if key.device != device:
        raise ValueError(f"key is on {key.device} and x on {device}: pass key.to(x.device)")
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
