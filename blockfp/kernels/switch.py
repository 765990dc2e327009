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
from functools import lru_cache, wraps
from typing import Any, TypeVar

WHY_NOT = "kernels.switch.definition_only() is in force"

_Result = TypeVar("_Result")

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


MOST = 4096
"""Plans that a table keeps. One more drops all: lengths that never come again must not fill the memory."""


def memo(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keeps what a function returns, by its arguments, until the switch turns: plans, and answers that depend on the kernels.

    Code that is compiled calls no cache of functools, and code that has a key of its own at hand takes `plans`.
    """
    kept = lru_cache(maxsize=MOST)(function)
    when_turned(kept.cache_clear)
    return kept


def plans() -> dict[Any, Any]:
    """Returns a table of plans for `kept`, which is emptied when the switch turns. Looking something up enters no function."""
    table: dict[Any, Any] = {}
    when_turned(table.clear)
    return table


def kept(table: dict[Any, Any], key: Any, plan: Any) -> Any:
    """Keeps a new plan among at most `MOST`, and returns it."""
    if len(table) >= MOST:
        table.clear()
    table[key] = plan
    return plan


# ---- calls made once


T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Caches a function's results by arguments and never runs it in two threads at once.

    `functools.cache` may run it in several threads before the first result is stored, which libraries that register a name once
    (XLA's custom calls) refuse. A call that raises isn't cached.
    """
    kept: dict[tuple[Any, ...], T] = {}
    lock = threading.RLock()

    @wraps(function)
    def run(*arguments: Any) -> T:
        if arguments in kept:
            return kept[arguments]
        with lock:
            if arguments not in kept:
                kept[arguments] = function(*arguments)
            return kept[arguments]

    return run
