"""Casts of an input that several layers of one module read, as query, key and value do: made once, and kept once.

A tensor can't tell whether it is what it was: collectives, `.data`, NumPy, DLPack and other kernels write without moving its
version. So casts are shared only while a forward runs that is known to write nothing between (`modules.shared_inputs`).

Eager code alone: compilers find equal casts themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Casts = dict[Any, list[Tensor]]
"""The parts of one input, rowwise and columnwise, by how they were made (`linear_ops.forward`)."""


class SharedCasts:
    """Lets the layers of one module share the casts of what they read, within `with`.

    Attributes:
        layers: those that may read one tensor.
        left: how many of them haven't read it.
        input: what the last of them read.
        casts: what was made of it; dropped behind the last layer.
        outer: what is shared outside.
    """

    __slots__ = ("casts", "input", "layers", "left", "outer")

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers, self.left = layers, 0
        self.input: Tensor | None = None
        self.casts: Casts = {}
        self.outer: SharedCasts | None = None

    def __enter__(self) -> None:
        self.outer, running.casts = running.casts, self

    def __exit__(self, *error: object) -> None:
        running.casts = self.outer

    def of(self, layer: nn.Module, x: Tensor) -> Casts | None:
        """Returns the casts of x that a layer shares with the others: it takes what it finds, and adds what it makes."""
        if not any(layer is one for one in self.layers):
            return None
        if self.input is not x:
            self.input, self.casts, self.left = x, {}, len(self.layers)
        casts = self.casts
        self.left -= 1
        if self.left == 0:
            self.input, self.casts = None, {}
        return casts


class _Running(threading.local):
    casts: SharedCasts | None = None


running = _Running()
"""`casts` are those of the innermost `with` of this thread; None outside."""
