"""Casts of an input that several layers read one after another, as query, key and value do: made once, and kept once.

Eager code alone: compilers find equal casts themselves. Only results of operations that autograd has recorded are shared.
Writing into these is counted by their version, as autograd's own saved tensors require. A leaf, whose memory someone else may
fill, is quantized each time, and so is everything while a CUDA graph is captured.

What is kept in `latest` is kept as long as the input's Python object lives, no other such input comes, and no backward begins.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import raw_stream, version_of


class SharedCast:
    """The parts of an input, by how they were made.

    Attributes:
        input: the tensor.
        version: its version when they were made.
        address: of its memory then: `x.data = y` gives it another, and leaves the version.
        stream: the CUDA stream on which they were made: another one doesn't wait for it. 0 on a CPU.
        parts: lists of parts.
    """

    __slots__ = ("address", "input", "parts", "stream", "version")

    def __init__(self, x: Tensor, stream: int):
        self.input, self.version, self.stream = weakref.ref(x, _forget), version_of(x), stream
        self.address = x.data_ptr()
        self.parts: dict[Any, list[Tensor]] = {}


latest: list[SharedCast] = []
"""One at most."""


def _forget(reference: weakref.ref[Tensor]) -> None:
    # A loop: another thread may empty the list meanwhile.
    for found in latest:
        if found.input is reference:
            latest.clear()


def shared_cast(x: Tensor) -> SharedCast | None:
    """Returns what layers that read x, which is no leaf, share from now on; None while a CUDA graph is captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        latest.clear()
        return None
    stream = raw_stream(x.device.index) if x.is_cuda else 0
    for found in latest:
        same = found.input() is x and found.version == version_of(x) and found.address == x.data_ptr()
        if same and found.stream == stream:
            return found
    new = SharedCast(x, stream)
    latest[:] = [new]
    return new
