"""The switch between kernels and the definition, which give the same bits.

    with switch.definition_only():
        blockfp.quantize(x, "nvfp4")        # as on a machine where no kernel could be built

For tests, and for users who suspect a kernel. All code that chooses between the two asks `native.available()` or
`cuda_library.available()`, which ask here.
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
    """Returns whether kernels may run: False inside `definition_only`."""
    return not _entered


@contextmanager
def definition_only() -> Iterator[None]:
    """Runs the definition instead of kernels in NumPy, PyTorch and JAX, in all threads, until the block ends.

    JAX's compiled programs are dropped at both ends of the outermost block, because they hold the earlier choice. Programs that
    were compiled ahead of time keep theirs.
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
    """Registers a function that is called whenever the switch turns, to drop cached results."""
    _when_turned.append(forget)


def cached(function: _Function) -> _Function:
    """`functools.cache` for results that depend on the available kernels."""
    kept = cache(function)
    when_turned(kept.cache_clear)
    return kept  # pyright: ignore[reportReturnType]
