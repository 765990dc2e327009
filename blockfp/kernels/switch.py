"""The one switch between kernels and the definition, which give the same bits.

    with switch.definition_only():
        blockfp.quantize(x, "nvfp4")        # as on a machine where no kernel could be built

It is for tests, and for whoever suspects a kernel. Everything that chooses between the two asks `native.available()` or
`cuda_library.available()`, and those ask here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

WHY_NOT = "kernels.switch.definition_only() is in force"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_entered = 0
_turning = threading.Lock()
_when_turned: list[Callable[[], Any]] = []


def kernels_allowed() -> bool:
    """False inside of `definition_only`."""
    return not _entered


@contextmanager
def definition_only() -> Iterator[None]:
    """Makes the definition run wherever a kernel would, in all threads, NumPy, PyTorch and JAX, until the block ends.

    JAX forgets its compiled programs at both ends of the outermost block, because they hold an earlier choice. A program
    that was compiled ahead of time keeps its own.
    """
    _turn(+1)
    try:
        yield
    finally:
        _turn(-1)


def _turn(by: int) -> None:
    global _entered
    with _turning:
        before, _entered = _entered, _entered + by
        if bool(before) != bool(_entered):
            for forget in _when_turned:
                forget()


def when_turned(forget: Callable[[], Any]) -> None:
    """Calls a function without arguments whenever the switch is turned, which drops what was worked out before."""
    _when_turned.append(forget)


def cached(function: _Function) -> _Function:
    """`functools.cache` for an answer that depends on which kernels there are."""
    kept = cache(function)
    when_turned(kept.cache_clear)
    return kept  # pyright: ignore[reportReturnType]
