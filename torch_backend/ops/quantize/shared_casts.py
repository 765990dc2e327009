"""Shares the casts of an input among a module's layers that read it, such as query, key and value projections.

A tensor can't tell whether it was modified: collectives, `.data`, NumPy, DLPack and foreign kernels write without changing its
version. So casts are shared only during a forward that is known not to write between the layers (`modules.shared_inputs`).

This is for eager code; compilers find equal casts themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Casts = dict[Any, list[Tensor]]
"""The parts of one input, rowwise and columnwise, by the options of their cast (`linear_ops.forward`)."""


class SharedCasts:
    """Within `with`, lets layers share the casts of an input.

    `layers` may read the same tensor `input`, and `left` of them haven't yet; its `casts` are dropped after the last. `outer`
    is the enclosing `SharedCasts`.
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
        """Returns the casts of x that a layer shares, to be used and added to; None if the layer isn't among `layers`."""
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
"""`casts` is this thread's innermost active `SharedCasts`, or None."""
